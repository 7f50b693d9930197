"""A compiled TARGET called with several batch sizes: what each way to treat sizes costs and gains.

``torch.compile`` treats sizes as constants (``dynamic=False``), as constants until one changes
(``dynamic=None``, its default), or as symbols from the first call on (``dynamic=True``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from fuselab.inspect import inductor_capture, targets
from fuselab.inspect.profile import target_step
from fuselab.inspect.user_code import plain, raising_target_error
from fuselab.measure.steady_step import seconds_of, time_steps

SHAPES: dict[str, bool | None] = {"static": False, "automatic": None, "dynamic": True}
_BUDGET_S = 0.4  # to time one size


def sizes_to_try(target: targets.Target, asked: Sequence[int]) -> list[int]:
    """Return the batch sizes, the target's own first: those asked for, else a half, a third and
    one more of its own."""
    own = targets.batch_size(target)
    if own == 0:  # no tensor has rows that could be more or fewer
        return [own]
    others = asked or (max(own // 2, 2), max(own // 3, 3), own + 1)
    return list(dict.fromkeys((own, *others)))


def called_with_sizes(
    target: targets.Target,
    shapes: str,
    mode: str | None,
    backward: bool,
    sizes: Sequence[int],
    stage: Callable[[str], None],
) -> dict[str, Any]:
    """Compile a target with sizes as ``shapes`` says, call it with each, and return a row for each
    and the sizes that became constants."""
    torch._dynamo.reset()
    compiled = replace(
        target, callable=torch.compile(target.callable, mode=mode, dynamic=SHAPES[shapes])
    )
    rows = []
    with inductor_capture.sizes_made_constant() as constant:
        for size in sizes:
            stage(f"calling it with {size} rows, {shapes} sizes")
            inductor_capture.forget_metrics()
            args, kwargs = targets.with_batch(target, size)
            steps = {
                name: target_step(replace(one, args=args, kwargs=kwargs), backward)
                for name, one in (("eager", target), ("compiled", compiled))
            }
            with raising_target_error(f"{target.name} raised with {size} rows:"):
                steps["eager"]()
                first_s = seconds_of(steps["compiled"], target.device)
            new = inductor_capture.compilations()
            timed = time_steps(steps, target.device, _BUDGET_S)
            times = {name: samples.times_us for name, samples in timed.items()}
            rows.append(
                {
                    "batch": size,
                    "compiled": len(new),
                    "first_call_s": first_s,
                    "eager_us": median(times["eager"]) if times["eager"] else None,
                    "us": median(times["compiled"]) if times["compiled"] else None,
                    "reasons": [c.recompile_reason for c in new if c.recompile_reason],
                }
            )
    found = [
        {
            "size": one.size,
            "value": one.value,
            **({"line": plain(one.line), "source": one.line.text} if one.line is not None else {}),
        }
        for one in constant
    ]
    return {"rows": rows, "constant": found}

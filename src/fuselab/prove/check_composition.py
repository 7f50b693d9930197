"""Check a composition: its operators one by one, then the function as a whole."""

from __future__ import annotations

import functools
import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fuselab.composition import Composition
from fuselab.errors import ArgumentError, FuselabError
from fuselab.op import dtype_name
from fuselab.prove.accuracy import Bar
from fuselab.prove.draw import RecordedDraw
from fuselab.prove.result import Group, Result, Verdict
from fuselab.runtime import fallback

TRIALS = {True: 4, False: 24}  # by whether the check is quick
SECONDS = {True: 20.0, False: 300.0}
_DROPOUTS = ("alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d")


class RepeatedRandomness(TorchFunctionMode):
    """Give every call that draws random numbers the same numbers in every run and dtype: dropout
    drops the same elements, which depend on the shape alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS and len(args) > 0:
            chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            training = args[2] if len(args) > 2 else kwargs.get("training", True)
            return _dropped(args[0], float(chance)) if training else args[0]
        if name in ("rand_like", "randn_like"):
            return _uniform(args[0]).to(args[0].dtype)
        return func(*args, **kwargs)


def _uniform(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(like.numel())
    return torch.rand(like.shape, generator=generator, dtype=torch.float64).to(like.device)


def _dropped(given: Tensor, chance: float) -> Tensor:
    kept = _uniform(given) >= chance
    return given * kept.to(given.dtype) / max(1 - chance, 2.0**-20)


def composition_groups(
    composition: Composition,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    quick: bool,
    seed: int,
    budget_s: float | None,
    spec: str,
) -> list[Group]:
    """Return one group per dtype: outputs and gradients of the whole function, against the
    reference in float64."""
    return [
        _group(composition, dtype, device, quick, seed, budget_s or SECONDS[quick], spec)
        for dtype in dtypes
    ]


def _group(
    composition: Composition,
    dtype: torch.dtype,
    device: torch.device,
    quick: bool,
    seed: int,
    budget_s: float,
    spec: str,
) -> Group:
    begin = time.monotonic()
    planned = TRIALS[quick] if composition.draw is not None else 1
    result = Result("whole", Verdict.PASS, planned=planned)
    for args, lines in _trials(composition, dtype, device, seed, planned):
        if result.trials and time.monotonic() - begin > budget_s:
            break
        try:
            judged = _judged(composition, args)
        except FuselabError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            judged = (float("inf"), 0.0, 0.0, f"raised {type(error).__name__}: {error}")
        if judged is None:
            result = replace(result, unsupported=result.unsupported + 1)
            continue
        share, ours, eager, problem = judged
        result = replace(result, trials=result.trials + 1)
        if share >= result.share_of_bar:
            result = replace(result, share_of_bar=share, ours_ulp=ours, eager_ulp=eager)
        if problem is not None:
            repeat = f"fuselab check {spec} --dtype {dtype_name(dtype)} --seed {seed}"
            result = replace(
                result,
                verdict=Verdict.FAIL,
                reason=problem,
                case=lines,
                repeat_command=f"{repeat} --quick" if quick else repeat,
            )
            break
    if not result.trials and result.verdict is Verdict.PASS:
        reason = "the reference takes none of the inputs drawn"
        result = replace(result, verdict=Verdict.NOT_JUDGED, reason=reason)
    result = replace(result, seconds=time.monotonic() - begin)
    return Group(composition.name.split("::")[1], dtype_name(dtype), device.type, (result,))


def _trials(
    composition: Composition, dtype: torch.dtype, device: torch.device, seed: int, count: int
) -> Iterator[tuple[list[Any], tuple[str, ...]]]:
    source = random.Random(f"{composition.name} {dtype} {seed}")
    for turn in range(count):
        if composition.draw is None:
            generator = torch.Generator().manual_seed(seed)
            case = composition.cases[0]
            yield list(case.make(device, dtype, generator).args), (case.name,)
        else:
            draw = RecordedDraw(device, dtype, source, values=("normal",), turn=turn)
            try:
                args = list(composition.draw(draw).args)
            except ArgumentError:  # the reference accepts nothing that was drawn
                continue
            yield args, tuple(draw.notes)


def _judged(
    composition: Composition, args: Sequence[Any]
) -> tuple[float, float, float, str | None] | None:
    """Return the share of the bar, both errors in ulp and what is wrong; None where the reference
    refuses the inputs."""
    names = inspect.signature(composition.reference).parameters
    values = [
        arg.detach().requires_grad_(arg.is_floating_point() and name not in composition.frozen)
        if isinstance(arg, Tensor)
        else arg
        for name, arg in zip(names, args, strict=True)
    ]
    upstream: dict[int, Tensor] = {}
    try:
        bar = Bar(functools.partial(_results, composition.reference, upstream), values, [])
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    with fallback.strict():
        results = _results(composition.function, upstream, values)
    judgements = bar.judge(results)
    worst = max(judgements, key=lambda one: one.share_of_bar)
    problem = next((one.problem for one in judgements if one.problem), None)
    return worst.share_of_bar, worst.ours_ulp, worst.eager_ulp, problem


def _results(
    function: Callable[..., Any], upstream: dict[int, Tensor], values: Sequence[Any]
) -> list[Tensor | None]:
    """Return the outputs, the gradients of the arguments, and the arguments without gradients as
    the call leaves them. ``upstream`` holds the gradient of each output, drawn by the first
    call."""
    given = [value.clone() if isinstance(value, Tensor) else value for value in values]
    with RepeatedRandomness():
        output = function(*given)
    results = [value for value in pytree.tree_leaves(output) if isinstance(value, Tensor)]
    roots = [value for value in results if value.requires_grad]
    for place, root in enumerate(roots):
        if place not in upstream:
            generator = torch.Generator().manual_seed(1 + place)
            drawn = torch.randn(root.shape, generator=generator, dtype=torch.float64)
            upstream[place] = drawn.to(root.device)
    wanted = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    if roots and wanted:
        gradients = torch.autograd.grad(
            roots,
            wanted,
            [upstream[place].to(root.dtype) for place, root in enumerate(roots)],
            allow_unused=True,
        )
    # What has no gradient may be written over, as running statistics are.
    state = [
        one
        for one, value in zip(given, values, strict=True)
        if isinstance(one, Tensor) and not value.requires_grad
    ]
    return [*(value.detach() for value in results), *gradients, *state]

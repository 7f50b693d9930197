"""Check a composition: its operators one by one, then the function as a whole."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fuselab.composition import Composition
from fuselab.errors import ArgumentError
from fuselab.op import dtype_name
from fuselab.prove.bar_of_end import bar_of_end
from fuselab.prove.draw import RecordedDraw
from fuselab.prove.held import End, HeldWhole, Here, RemoteError, fault_of
from fuselab.prove.result import Group, Result, Verdict
from fuselab.prove.trials import Outcome, judged

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


@dataclass(frozen=True)
class Whole:
    """A composition under check: its two ends, and what the judge knows of it."""

    reference: End
    candidate: End
    device: torch.device
    name: str
    operators: tuple[str, ...]  # their short names
    dtypes: tuple[torch.dtype, ...]
    arguments: tuple[str, ...]  # their names
    differentiable: tuple[bool, ...]  # by argument
    has_draw: bool

    @classmethod
    def of_ends(cls, reference: End, candidate: End, device: torch.device) -> Whole:
        """Return the composition that the reference's end describes."""
        return cls(reference, candidate, device, **reference.ask(whole_facts))

    @classmethod
    def here(cls, composition: Composition, device: torch.device) -> Whole:
        """Return a composition that this process holds."""
        ends = [Here(HeldWhole(composition, is_reference)) for is_reference in (True, False)]
        return cls.of_ends(ends[0], ends[1], device)


def whole_facts(held: HeldWhole) -> dict[str, Any]:
    """Return what ``Whole`` says of a composition, as plain values. A procedure."""
    composition = held.composition
    names = tuple(inspect.signature(composition.reference).parameters)
    return {
        "name": composition.name,
        "operators": tuple(op.short_name for op in composition.operators),
        "dtypes": tuple(composition.dtypes),
        "arguments": names,
        "differentiable": tuple(name not in composition.frozen for name in names),
        "has_draw": composition.draw is not None,
    }


def composition_groups(
    whole: Whole,
    dtypes: Sequence[torch.dtype],
    quick: bool,
    seed: int,
    budget_s: float | None,
    spec: str,
) -> list[Group]:
    """Return one group per dtype: outputs and gradients of the whole function, against the
    reference in float64."""
    return [_group(whole, dtype, quick, seed, budget_s or SECONDS[quick], spec) for dtype in dtypes]


def _group(
    whole: Whole, dtype: torch.dtype, quick: bool, seed: int, budget_s: float, spec: str
) -> Group:
    begin = time.monotonic()
    planned = TRIALS[quick] if whole.has_draw else 1
    result = Result("whole", Verdict.PASS, planned=planned)
    for turn in range(planned):
        if result.trials and time.monotonic() - begin > budget_s:
            break
        drawn = whole.reference.ask(whole_trial, dtype, whole.device, seed, turn)
        if drawn is None:
            continue
        args, lines = drawn
        try:
            outcome = _judged(whole, args)
        except Exception as error:
            outcome = Outcome(fault_of(error, 200), share_of_bar=float("inf"))
        if outcome is None:
            result = replace(result, unsupported=result.unsupported + 1)
            continue
        result = replace(result, trials=result.trials + 1)
        if outcome.share_of_bar >= result.share_of_bar:
            result = replace(
                result,
                share_of_bar=outcome.share_of_bar,
                ours_ulp=outcome.ours_ulp,
                eager_ulp=outcome.eager_ulp,
            )
        if outcome.problem is not None:
            repeat = f"fuselab check {spec} --dtype {dtype_name(dtype)} --seed {seed}"
            result = replace(
                result,
                verdict=Verdict.FAIL,
                reason=outcome.problem,
                case=tuple(lines),
                repeat_command=f"{repeat} --quick" if quick else repeat,
            )
            break
    if not result.trials and result.verdict is Verdict.PASS:
        reason = "the reference takes none of the inputs drawn"
        result = replace(result, verdict=Verdict.NOT_JUDGED, reason=reason)
    result = replace(result, seconds=time.monotonic() - begin)
    return Group(whole.name.split("::")[1], dtype_name(dtype), whole.device.type, (result,))


def whole_trial(
    held: HeldWhole, dtype: torch.dtype, device: torch.device, seed: int, turn: int
) -> tuple[list[Any], tuple[str, ...]] | None:
    """Return the arguments of one trial and a line about each, or None where the reference accepts
    nothing that was drawn. A procedure."""
    composition = held.composition
    if composition.draw is None:
        case = composition.cases[0]
        generator = torch.Generator().manual_seed(seed)
        return list(case.make(device, dtype, generator).args), (case.name,)
    source = random.Random(f"{composition.name} {dtype} {seed} {turn}")
    draw = RecordedDraw(device, dtype, source, values=("normal",), turn=turn)
    try:
        return list(composition.draw(draw).args), tuple(draw.notes)
    except ArgumentError:
        return None


def _judged(whole: Whole, args: Sequence[Any]) -> Outcome | None:
    """Return the outcome of one trial; None where the reference refuses the inputs."""
    values = [
        arg.detach().requires_grad_(arg.is_floating_point() and is_differentiable)
        if isinstance(arg, Tensor)
        else arg
        for is_differentiable, arg in zip(whole.differentiable, args, strict=True)
    ]
    try:
        bar = bar_of_end(whole.reference, whole_results, values)
    except (RemoteError, RuntimeError, ValueError, TypeError, IndexError):
        return None
    bar.names = _result_names(whole, values, len(bar.eager))
    return judged(bar, whole.candidate.ask(whole_results, values))


def _result_names(whole: Whole, values: Sequence[Any], count: int) -> list[str]:
    """Return the name of each of the ``count`` results that ``whole_results`` gives."""
    tensors = [
        (name, value.requires_grad)
        for name, value in zip(whole.arguments, values, strict=True)
        if isinstance(value, Tensor)
    ]
    behind = [
        *(f"gradient of {name}" for name, needs_gradient in tensors if needs_gradient),
        *(f"{name} after the call" for name, needs_gradient in tensors if not needs_gradient),
    ]
    outputs = count - len(behind)
    return [*(["output"] if outputs == 1 else map("output {}".format, range(outputs))), *behind]


def whole_results(function: Callable[..., Any], values: Sequence[Any]) -> list[Tensor | None]:
    """Return the outputs, the gradients of the arguments, and the arguments without gradients as
    the call leaves them. A procedure.

    The upstream gradient of an output depends on its place and shape alone.
    """
    given = [value.clone() if isinstance(value, Tensor) else value for value in values]
    with RepeatedRandomness():
        output = function(*given)
    results = [value for value in pytree.tree_leaves(output) if isinstance(value, Tensor)]
    roots = [value for value in results if value.requires_grad]
    wanted = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    gradients: Sequence[Tensor | None] = [None] * len(wanted)
    if roots and wanted:
        upstream = [_upstream(place, root) for place, root in enumerate(roots)]
        gradients = torch.autograd.grad(roots, wanted, upstream, allow_unused=True)
    # What has no gradient may be written over, as running statistics are.
    state = [
        one
        for one, value in zip(given, values, strict=True)
        if isinstance(one, Tensor) and not value.requires_grad
    ]
    return [*(value.detach() for value in results), *gradients, *state]


def _upstream(place: int, root: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1 + place)
    drawn = torch.randn(root.shape, generator=generator, dtype=torch.float64)
    return drawn.to(root.device, root.dtype)

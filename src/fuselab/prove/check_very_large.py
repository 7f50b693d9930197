"""The check above 2^24 elements, up to which float32 counts one by one: in one dimension, and in
two at once."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from fuselab.op import tensors_in
from fuselab.prove.accuracy import judge
from fuselab.prove.asked_calls import in_rows, joined
from fuselab.prove.asked_costs import cost_of_results
from fuselab.prove.draw import VERY_LARGE_BITS
from fuselab.prove.held import RemoteError
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, judged

_PROBE_BITS = 20  # log2 of the elements of the call that says what a very large one costs
_MOST_S = 1.0  # that the reference may take for a very large call, by what that call takes
_MOST_OF_OURS_S = 30.0  # and the implementation, of which the first call may compile
_MOST_MEMORY = 0.1  # the share of the free memory that it may take
_JOINED = 256  # elements that make a row of a result
_PIECE = 1 << 22  # elements that are compared at once
_SLACK = 16.0  # times the bar: eager and one copy show little of what 2^24 roundings may add up to
_BEYOND = 4096.0  # a share of the bar that no error of eager on other inputs explains
_NEAR = 64  # eps of an element, and of the mean of its piece, within which results are near


def very_large_is_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge the output for more than 2^24 elements.

    An index that is computed in float32 is wrong there. What is wrong is off by far more than
    rounding, so a result that is near to eager's passes, and only another one is held against
    float64, in rows of ``_JOINED`` elements. Where calls on 2^20 elements say that the reference or
    the implementation would take long, or much of the memory, nothing is judged.
    """
    tensors = tensors_in(trial.args)
    if max((tensor.numel() for tensor in tensors), default=0) <= trial.draw.target:
        return Outcome(untried=True)
    dear = _why_dear(subject, trial)
    if dear is not None:
        return Outcome(not_judged=dear)
    values = list(trial.args)
    eager = subject.expected(*values)
    ours = subject.results(*values)
    most = max(tensor.numel() for tensor in tensors)
    if len(ours) == len(eager) and all(
        _is_near(*pair, most) for pair in zip(ours, eager, strict=True)
    ):
        return Outcome()
    bar = subject.bar_for(values, subject.result_names(values), in_rows, _JOINED, None)
    bar.slack = _SLACK
    found, after = joined(ours, _JOINED), f" (in rows of {_JOINED})"
    for name, one, right, exact in zip(bar.names, found, bar.eager, bar.exact, strict=False):
        if one is None or right is None or exact is None:
            continue
        judgement = judge(one, right, exact, slack=_SLACK)
        if judgement.share_of_bar > _BEYOND and one.numel() > _JOINED:
            return Outcome(f"{name}{after} {judgement.problem}")
    return judged(bar.with_few_copies(1), found, after=after)


def _is_near(ours: Tensor, eager: Tensor, terms: int) -> bool:
    """Return whether two results differ by rounding alone: by no more than 64 eps of an element and
    of the mean of the elements about it, or by the root of the terms that each may be a sum of."""
    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return False
    if not ours.dtype.is_floating_point:
        return torch.equal(ours, eager)
    roundings = max(_NEAR, math.sqrt(terms / max(1, ours.numel())))
    tolerance = roundings * torch.finfo(ours.dtype).eps
    for one, other in zip(
        ours.reshape(-1).split(_PIECE), eager.reshape(-1).split(_PIECE), strict=True
    ):
        allowed = other.abs()
        allowed.add_(allowed.mean()).mul_(tolerance)
        if not bool(((one - other).abs_() <= allowed).all()):
            return False
    return True


def _why_dear(subject: Subject, trial: Trial) -> str | None:
    """Return why calls on 2^20 elements, drawn alike, say that one on more than 2^24 takes long or
    much memory, or None."""
    probe = subject.draw(
        "very large",
        0,
        ("contiguous",),
        ("normal",),
        replay=trial.draw.choices,
        very_large=_PROBE_BITS,
    )
    times = 1 << (VERY_LARGE_BITS - _PROBE_BITS)
    if probe is None:
        return "2^20 elements are refused"
    try:
        seconds, memory = subject.reference.ask(cost_of_results, *probe.args)
    except (RemoteError, RuntimeError):
        return "the reference raises for 2^20 elements"
    if memory * times > _MOST_MEMORY:
        return "the reference needs too much memory"
    if seconds * times > _MOST_S:
        return f"the reference takes {seconds:.2g} s for 2^20 elements"
    begin = time.monotonic()
    subject.results(*probe.args)
    seconds = time.monotonic() - begin
    if seconds * times > _MOST_OF_OURS_S:
        return f"the implementation takes {seconds:.2g} s for 2^20 elements"
    return None


def _compiled(subject: Subject) -> tuple[Verdict, str] | None:
    """Return None unless Triton's interpreter runs the kernels, which takes minutes for it."""
    return (Verdict.SKIPPED, "the interpreter is too slow for it") if subject.interpreted else None


CHECKS = (
    # Above 2^24 elements: with 4,096 rows and columns at once, or in one dimension.
    Check(
        "very large",
        very_large_is_right,
        quick=2,
        full=10,
        applies=_compiled,
        turns=True,
        large=True,
        very_large=VERY_LARGE_BITS,
        shrink_tries=0,
        once=True,
    ),
)

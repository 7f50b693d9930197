"""Checks of what the operator declares: how much of it can be judged, its cost, its reference."""

from __future__ import annotations

import collections
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuselab.op import dtype_name, tensors_in
from fuselab.prove.accuracy import as_rows, error_of_rows, magnitude_of_rows, ulp_of_rows, upcast
from fuselab.prove.arguments import mapped
from fuselab.prove.asked_inputs import declared_cost, peer_results, support_by_values
from fuselab.prove.draw import LAYOUTS
from fuselab.prove.held import fault_of, is_of_reference, results
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome

DRAWS = 48  # inputs that are drawn to see how many of them can be judged
LEAST_TAKEN = 6  # fewer of them leave too little to judge
_LARGE_DRAWS = 4  # large inputs that are drawn where no small one is taken
_LAID_OUT = 12  # inputs that are drawn to see whether they have strides
_SPECIAL_DRAWS = 6  # inputs that are drawn to see whether they hold NaN, and infinities
_SLACK_BYTES = 1 << 10  # of a cost beyond its tensors
# The share of a row's magnitude by which peers may differ in float64: a peer may compute in float32
# inside, and a reference that is rounded to bfloat16 inside is off by 2^-9.
_PEER_AGREES = 2.0**-12
_FEW = 16  # elements of which the largest may be small by chance
_ROUGH_DRAWS = 6  # inputs of which most must be far off
ROUGH_ULPS = 1_000.0  # an eager result that is further from float64 makes a wide bar


def takes_nothing(subject: Subject) -> str | None:
    """Return why nothing can be judged where the operator or the implementation refuses all inputs
    drawn, small and large, and all of the operator's cases; None where it takes any, and where a
    draw fails, which the checks report."""
    try:
        if _takes_some(subject):
            return None
    except Exception:
        return None
    reasons = subject.refusals("coverage", range(DRAWS), **_PLAIN)
    text = "the implementation supports no input drawn"
    if reasons:
        text += f": {collections.Counter(reasons).most_common(1)[0][0]}"
    taken = [one for one in subject.op.dtypes if _takes_some(replace(subject, dtype=one))]
    if taken and len(subject.op.implementations) == 1:
        named = ", ".join(map(str, taken)) + "," * (len(taken) == 1)
        text += f"; declare dtypes=({named})"
    return text


_PLAIN: dict[str, Any] = {"layouts": ("contiguous",), "values": ("normal",), "max_numel": 512}


def _takes_some(subject: Subject) -> bool:
    """Return whether any input drawn is taken, or any of the operator's cases."""
    for some in (range(LEAST_TAKEN), range(LEAST_TAKEN, DRAWS)):
        if any(subject.draw_together("coverage", some, [None] * len(some), **_PLAIN)):
            return True
    if any(subject.from_case("cases", case) for case in subject.small_cases()):
        return True
    large = {**_PLAIN, "large": True}
    return any(subject.draw("large", index, **large) for index in range(_LARGE_DRAWS))


def is_little(subject: Subject) -> tuple[Verdict, str] | None:
    """Return None if the operator and the implementation take enough of the inputs that are drawn.

    A row that takes one input in a hundred would pass with one trial.
    """
    drawn = [
        subject.draw("coverage", index, ("contiguous",), ("normal",), max_numel=512)
        for index in range(DRAWS)
    ]
    taken = [one for one in drawn if one is not None]
    shapes = {tuple(tensor.shape for tensor in tensors_in(one.args)) for one in taken}
    if len(taken) < LEAST_TAKEN:
        return Verdict.NOT_JUDGED, (
            f"it takes {len(taken)} of {DRAWS} inputs drawn, where {LEAST_TAKEN} are the least; "
            "FusedOp.draw should draw what the implementation supports"
        )
    if subject.op.has_draw and len(shapes) == 1:
        return Verdict.NOT_JUDGED, (
            f"all {len(taken)} inputs that it takes have the same shapes; FusedOp.draw should draw "
            "sizes by draw.size()"
        )
    if not _are_laid_out(subject):
        return _NEVER_LAID_OUT
    return None if _have_specials(subject) else _NEVER_SPECIAL


_NEVER_LAID_OUT = (
    Verdict.NOT_JUDGED,
    (
        "every tensor of every input drawn is contiguous, so no strides and special values are "
        "judged; FusedOp.draw should draw tensors by draw.tensor()"
    ),
)


_NEVER_SPECIAL = (
    Verdict.NOT_JUDGED,
    (
        "no tensor of any input drawn holds a NaN or an infinity, which FusedOp.draw or "
        "FusedOp.validate leaves out, so no special values are judged; draw.tensor() gives some"
    ),
)


def _have_specials(subject: Subject) -> bool:
    """Return whether NaN and infinities that are drawn reach the inputs, unless none is floating or
    the operator varies its cases."""
    drawn = [
        subject.draw("coverage", index, ("contiguous",), (kind,), max_numel=512)
        for index in range(_SPECIAL_DRAWS)
        for kind in ("NaN", "infinities")
    ]
    tensors = [
        tensor
        for one in drawn
        if one is not None
        for tensor in tensors_in(one.args)
        if tensor.is_floating_point() and tensor.numel()
    ]
    return not (
        subject.op.has_draw and tensors and all(bool(one.isfinite().all()) for one in tensors)
    )


def _are_laid_out(subject: Subject) -> bool:
    """Return whether the tensors that are drawn have the layouts that a check asks for, unless none
    is floating, none is drawn with two elements, or the operator varies its cases."""
    drawn = [
        subject.draw("coverage", index, LAYOUTS[1:], ("normal",), max_numel=512)
        for index in range(_LAID_OUT)
    ]
    tensors = [
        tensor
        for one in drawn
        if one is not None
        for tensor in tensors_in(one.args)
        if tensor.is_floating_point() and tensor.numel() > 1
    ]
    return not (
        subject.op.has_draw
        and tensors
        and all(tensor.is_contiguous() and not tensor.storage_offset() for tensor in tensors)
    )


def is_taken(subject: Subject, trial: Trial) -> Outcome:
    """Check that the trial's inputs are taken whatever values their tensors have.

    A plan is kept for dtypes, shapes and strides. An implementation that refuses some values would
    get them from a plan, and would not be judged on them here.
    """
    found = subject.reference.ask(support_by_values, subject.implementation, list(trial.args))
    return Outcome(None if found is None else f"its 'supports' {found} in the same memory")


def cost_is_possible(subject: Subject, trial: Trial) -> Outcome:
    """Check that the declared cost moves at most the bytes of the arguments and the outputs.

    It counts every byte once, so a larger one makes a kernel look faster than it is.
    """
    cost = subject.reference.ask(declared_cost, list(trial.args))
    if cost is None:
        return Outcome()
    given = sum(tensor.nbytes for tensor in tensors_in(trial.args))
    returned = sum(tensor.nbytes for tensor in subject.expected(*trial.args))
    for what, declared, most in (("reads", cost[0], given), ("writes", cost[1], returned)):
        if declared > most + _SLACK_BYTES:
            return Outcome(
                f"FusedOp.cost {what} {declared} bytes, and the tensors have {most}; it counts "
                "every byte once"
            )
    return Outcome()


def reference_is_the_peers(subject: Subject, trial: Trial) -> Outcome:
    """Check that in float64 the reference gives what its peers give on the operator's own cases.

    A peer that refuses the arguments says nothing, and one that agrees on some case may be narrower
    than the reference; one that agrees on none is another function. All cases are gone through
    with the first one's trial, until every peer has agreed once.
    """
    cases = (subject.from_case("peers", case) for case in subject.small_cases())
    others = (other for other in cases if other is not None)
    if trial.title != next(others).title:
        return Outcome(untried=True)
    differing = set(_differing(subject, trial))
    while differing and (other := next(others, None)) is not None:
        differing &= set(_differing(subject, other))
    if differing:
        return Outcome(
            f"the reference and its peer '{min(differing)}' differ in float64; one of them is "
            "another function"
        )
    return Outcome()


def _differing(subject: Subject, trial: Trial) -> list[str]:
    """Return the names of the peers that differ from the reference on a trial's arguments."""
    wide = mapped(upcast, trial.args)
    found = subject.reference.ask(peer_results, wide)
    expected = subject.reference.ask(results, *wide) if found else []
    return [
        name
        for name, given in found.items()
        if not all(_agree(mine, other) for mine, other in zip(expected, given, strict=False))
    ]


def _agree(mine: Tensor, other: Tensor) -> bool:
    if mine.shape != other.shape:
        return False
    if not mine.is_floating_point() or mine.numel() == 0:
        return True
    exact = as_rows(mine.detach().double())
    error = error_of_rows(as_rows(other.detach().double()), exact)
    size = magnitude_of_rows(exact)
    return bool((error <= _PEER_AGREES * size.clamp(min=float(size.max()) / 1000)).all())


def eager_is_near(subject: Subject, trial: Trial) -> Outcome:
    """Warn where eager is far from float64 on most inputs: whatever the bar is, it is wide there.

    A reference that rounds inside is far off on all inputs. A sound one is on a few, such as those
    that all lie in the tail of an activation, where nothing is left of a difference.
    """
    others = (
        subject.draw("eager", index, ("contiguous",), ("normal",), max_numel=4096)
        for index in range(1, _ROUGH_DRAWS)
    )
    errors = []
    for one in filter(None, (trial, *others)):
        try:
            errors.append(_error_of_eager(subject, one))
        except Exception as error:
            if one is trial or not is_of_reference(error):
                raise
            return Outcome(fault_of(error, 200), tries=0, args=one.args, of_declaration=True)
    errors.sort(key=lambda found: found[0])
    typical, dtype = errors[(len(errors) - 1) // 2]
    if typical > ROUGH_ULPS and math.isfinite(typical) and dtype is not None:
        digits = 1 - round(math.log2(torch.finfo(dtype).eps))
        kept = max(0, digits - round(math.log2(typical)))
        return Outcome(
            refused=f"warning: on ordinary numbers eager is {typical:.3g} ulp from float64 (it "
            f"keeps {kept} of the {digits} bits of {dtype_name(dtype)}), which makes the bar wide; "
            "is the reference rounded to fewer bits inside?"
        )
    return Outcome()


def _error_of_eager(subject: Subject, trial: Trial) -> tuple[float, torch.dtype | None]:
    """Return the largest error of eager's outputs in ulp of the largest element, and its dtype."""
    worst: tuple[float, torch.dtype | None] = (0.0, None)
    for eager, exact in zip(
        subject.expected(*trial.args),
        subject.reference.ask(results, *mapped(upcast, trial.args)),
        strict=True,
    ):
        if not eager.is_floating_point() or eager.numel() < _FEW:
            continue
        # One row of all elements: where the terms of a narrow row cancel, eager is far off by luck.
        truth = exact.detach().double().reshape(1, -1)
        error = error_of_rows(eager.detach().reshape(1, -1), truth)
        ulps = float(error / ulp_of_rows(truth, eager.dtype))
        if ulps > worst[0]:
            worst = (ulps, eager.dtype)
    return worst


def _declares(subject: Subject) -> tuple[Verdict, str] | None:
    return (Verdict.SKIPPED, "it writes over arguments") if subject.op.mutates else None


CHECKS = (
    # Enough of the inputs drawn can be judged.
    Check("coverage", is_taken, non_empty=True, applies=is_little),
    # The declared bytes are those of the tensors.
    Check("cost", cost_is_possible, quick=6, max_numel=4096, applies=_declares, once=True),
    # The reference is the function that its peers are.
    Check("peers", reference_is_the_peers, source="cases", applies=_declares, once=True),
    # Eager is near float64.
    Check("eager", eager_is_near, quick=1, full=1, max_numel=4096, applies=_declares),
)

"""Checks that need a GPU: streams, CUDA graphs, tensors past 2^31 elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fuselab.op import tensors_in
from fuselab.prove.arguments import at, filled
from fuselab.prove.asked_device import behind_a_producer, released, replayed
from fuselab.prove.draw import make_values
from fuselab.prove.held import RemoteError, is_a
from fuselab.prove.result import Result, Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, call_bar, judged

# largest size of a huge case in float64; the bar holds several copies of it
_MOST_EXACT_BYTES = 1 << 32
_NO_GPU = (Verdict.NOT_JUDGED, "needs a GPU; there is none here")


def current_stream_is_obeyed(subject: Subject, trial: Trial) -> Outcome:
    """Check that the call runs on the current stream, behind a slow producer, without waiting.

    A kernel on another stream reads its inputs before the producer has written them, or has not
    finished when the stream's next operation reads its output. A launcher that synchronises instead
    holds the host until the producer is done. The judged values are those that the stream's next
    operation sees, not the final memory.
    """
    places = subject.differentiable(trial.args)
    bar, asked = call_bar(subject, trial)
    for _ in range(2):  # a busy host gets a second try before the call is said to wait
        found = subject.candidate.ask(behind_a_producer, places, *asked)
        if found["leaves"]:
            return Outcome("the call leaves another stream current")
        outcome = judged(bar, found["results"])
        if outcome.problem is not None and judged(bar, found["again"]).problem is None:
            problem = f"{outcome.problem}: it does not run on the current stream"
            outcome = replace(outcome, problem=problem)
        held_ms, busy_ms = found["held_ms"], found["busy_ms"]
        if outcome.problem is not None or held_ms <= 0.5 * busy_ms:
            return outcome
    return Outcome(
        f"the call held the host for {held_ms:.0f} ms of the {busy_ms:.0f} ms that the stream was "
        "busy: it synchronises"
    )


def graph_replays(subject: Subject, trial: Trial) -> Outcome:
    """Check that a CUDA graph of the call replays with new values in the same memory.

    Work that a launcher puts on another stream is not captured, and its result is not replayed. A
    call that fails the check ``stream`` is not captured at all, because a capture that breaks can
    take this process's CUDA context with it.
    """
    obeyed = current_stream_is_obeyed(subject, trial)
    if obeyed.problem is not None:
        return replace(obeyed, problem=f"not captured: {obeyed.problem}")
    upstream = None if subject.op.gradient is None else subject.upstream(trial)
    _, asked = call_bar(subject, trial, upstream)
    places = subject.differentiable(trial.args)
    steps = [
        [
            make_values("normal", tensor.shape, tensor.dtype, trial.draw.below(1 << 16)).to(
                tensor.device
            )
            for tensor in at(trial.args, places)
        ]
        for _ in range(3)
    ]
    bars = [
        call_bar(subject, replace(trial, args=tuple(filled(trial.args, places, step))), upstream)[0]
        for step in steps
    ]
    found = subject.candidate.ask(replayed, steps, places, *asked)
    if found["refused"] is not None:
        return Outcome(f"cannot be captured: {found['refused']}")
    outcome = Outcome()
    for bar, results in zip(bars, found["results"], strict=True):
        outcome = judged(bar, results, "replayed ")
        if outcome.problem is not None:
            return outcome
    return outcome


def huge_cases(subject: Subject) -> Result:
    """Check the operator's huge cases (more than 2^31 elements) that fit into the GPU's memory."""
    name = "huge"
    if subject.device.type != "cuda":
        return Result(
            name, Verdict.NOT_JUDGED, "needs a GPU with room for 2^31 elements in float64"
        )
    cases = [case for case in subject.op.cases if "huge" in case.tags]
    if not cases:
        return Result(name, Verdict.SKIPPED, "the operator has no huge case")
    worst, tried = Outcome(), 0
    for case in cases:
        _release(subject)
        try:
            trial = subject.from_case(name, case)
            if trial is None:
                continue
            outcome = _huge_case(subject, trial)
        except (torch.OutOfMemoryError, RemoteError) as error:
            if not is_a(error, torch.OutOfMemoryError):
                raise
            _release(subject)
            return Result(
                name, Verdict.NOT_JUDGED, f"{case.name} does not fit in this GPU's memory"
            )
        tried += 1
        if outcome.problem is not None:
            problem = f"{case.name}: {outcome.problem}"
            return Result(name, Verdict.FAIL, problem, tried, case=(case.name,))
        worst = max(worst, outcome, key=lambda outcome: outcome.share_of_bar)
    _release(subject)
    if tried == 0:
        return Result(name, Verdict.SKIPPED, "the implementation supports no huge case")
    return Result(
        name,
        Verdict.PASS,
        None,
        tried,
        worst.ours_ulp,
        worst.eager_ulp,
        share_of_bar=worst.share_of_bar,
    )


def _release(subject: Subject) -> None:
    """Let both ends give their unused GPU memory back."""
    for end in (subject.reference, subject.candidate):
        end.ask(released)


def _huge_case(subject: Subject, trial: Trial) -> Outcome:
    """Judge a huge case by the usual bar if its float64 copies fit, otherwise against eager in the
    working dtype."""
    eager = subject.expected(*trial.args)
    if 8 * sum(tensor.numel() for tensor in (*tensors_in(trial.args), *eager)) > _MOST_EXACT_BYTES:
        return Outcome(_compare_in_pieces(subject.results(*trial.args), eager))
    return judged(subject.bar(trial.args), subject.results(*trial.args))


def _compare_in_pieces(results: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Compare ours with eager's result, both in the working dtype, 2^26 elements at a time.

    The whole in float64 would not fit. An offset that wraps is off by far more than rounding, so
    elements may differ by 64 eps of eager's value plus the piece's mean magnitude. That bound holds
    for results of a few operations each. A sum of many terms can exceed it and still be right, so a
    case that fits in float64 is judged by the usual bar instead.
    """
    problems = (_difference(*pair) for pair in zip(results, expected, strict=True))
    return next((problem for problem in problems if problem is not None), None)


def _difference(ours: Tensor, eager: Tensor) -> str | None:
    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return f"is {ours.dtype}{list(ours.shape)}, eager gives {eager.dtype}{list(eager.shape)}"
    flat, truth = ours.reshape(-1), eager.reshape(-1)
    for start in range(0, flat.numel(), 1 << 26):
        one, other = (values[start : start + (1 << 26)] for values in (flat, truth))
        if ours.is_floating_point():
            one, other = one.float(), other.float()
            tolerance = 64 * torch.finfo(ours.dtype).eps
            wrong = (one - other).abs() > tolerance * (other.abs() + other.abs().mean())
            wrong |= one.isnan() != other.isnan()
        else:
            wrong = one != other
        if bool(wrong.any()):
            place = int(wrong.nonzero()[0])
            return (
                f"element {start + place} is {one[place].item()}, eager gives {other[place].item()}"
            )
    return None


def _on_a_gpu(subject: Subject) -> tuple[Verdict, str] | None:
    return None if subject.device.type == "cuda" else _NO_GPU


CHECKS = (
    # Work runs on the current stream, and the host does not wait.
    Check("stream", current_stream_is_obeyed, quick=2, full=6, applies=_on_a_gpu, shrink_tries=0),
    # Capture, then replay with other values.
    Check("CUDA graph", graph_replays, quick=2, full=6, applies=_on_a_gpu, shrink_tries=0),
)

"""Checks that need a GPU: streams, CUDA graphs, tensors past 2^31 elements."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fuselab.errors import summary
from fuselab.measure.cuda_graph import captured
from fuselab.op import tensors_in
from fuselab.prove.accuracy import Bar
from fuselab.prove.arguments import at
from fuselab.prove.draw import make_values
from fuselab.prove.result import Result, Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, Results, call_bar, judged

_DELAY_MATMULS = 40  # products of 4096 x 4096 in float32, about 100 ms on an H200
# largest size of a huge case in float64; the bar holds several copies of it
_MOST_EXACT_BYTES = 1 << 32
_NO_GPU = (Verdict.NOT_JUDGED, "needs a GPU; there is none here")


def _delay(square: Tensor, times: int) -> None:
    """Keep the current stream busy with ``times`` matrix products."""
    for _ in range(times):
        torch.mm(square, square)


def current_stream_is_obeyed(subject: Subject, trial: Trial) -> Outcome:
    """Check that the call runs on the current stream, behind a slow producer, without waiting.

    A kernel on another stream reads its inputs before the producer has written them, or has not
    finished when the stream's next operation reads its output. A launcher that synchronises instead
    holds the host until the producer is done.
    """
    places = subject.differentiable(trial.args)
    truth = [tensor.clone() for tensor in at(trial.args, places)]
    bar, results_of = call_bar(subject, trial)

    def run() -> Results:
        return results_of(subject.call)

    stream = torch.cuda.Stream(subject.device)
    for _ in range(2):  # a busy host gets a second try before the call is said to wait
        for tensor in at(trial.args, places):
            tensor.fill_(float("nan"))
        torch.cuda.synchronize(subject.device)
        with torch.cuda.stream(stream):
            square = torch.zeros(4096, 4096, device=subject.device)
            _delay(square, 2)
            # Builds everything and fills the stream's memory with NaN, so that below only launches
            # remain.
            warm = [None if value is None else value.clone() for value in run()]
            del warm
            if torch.cuda.current_stream(subject.device) != stream:
                return Outcome("the call leaves another stream current")
        outcome, held_ms, busy_ms = _behind_a_producer(
            subject, trial, truth, stream, square, run, bar
        )
        if outcome.problem is not None or held_ms <= 0.5 * busy_ms:
            return outcome
    return Outcome(
        f"the call held the host for {held_ms:.0f} ms of the {busy_ms:.0f} ms that the stream was "
        "busy: it synchronises"
    )


def _behind_a_producer(
    subject: Subject,
    trial: Trial,
    truth: Sequence[Tensor],
    stream: torch.cuda.Stream,
    square: Tensor,
    run: Callable[[], Results],
    bar: Bar,
) -> tuple[Outcome, float, float]:
    """Call ``run`` on ``stream`` while the stream still waits for the inputs' values.

    Returns what the stream's next operation saw, for how long the call held the host, and for how
    long the stream was busy, both in ms.
    """
    begin = time.perf_counter()
    with torch.cuda.stream(stream):
        _delay(square, _DELAY_MATMULS)
        places = subject.differentiable(trial.args)
        for tensor, values in zip(at(trial.args, places), truth, strict=True):
            tensor.copy_(values)
        launched = time.perf_counter()
        results = run()
        held = time.perf_counter() - launched
        copies = [None if value is None else value.clone() for value in results]
    torch.cuda.synchronize(subject.device)
    busy = time.perf_counter() - begin
    # The judged values are those that the stream's next operation saw, not the final memory.
    outcome = judged(bar, copies)
    if outcome.problem is not None:
        again = run()
        torch.cuda.synchronize(subject.device)
        if judged(bar, again).problem is None:  # it is right when the stream is idle
            problem = f"{outcome.problem}: it does not run on the current stream"
            outcome = replace(outcome, problem=problem)
    return outcome, held * 1e3, busy * 1e3


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
    _, results_of = call_bar(subject, trial, upstream)
    side = torch.cuda.Stream(subject.device)
    side.wait_stream(torch.cuda.current_stream(subject.device))
    with torch.cuda.stream(side):
        for _ in range(3):
            results_of(subject.call)
    torch.cuda.current_stream(subject.device).wait_stream(side)
    torch.cuda.synchronize(subject.device)
    try:
        graph, results = captured(lambda: results_of(subject.call), subject.device)
    except RuntimeError as error:
        return Outcome(f"cannot be captured: {summary(error, 200)}")
    outcome = Outcome()
    for _ in range(3):
        for tensor in at(trial.args, subject.differentiable(trial.args)):
            seed = trial.draw.below(1 << 16)
            fresh = make_values("normal", tensor.shape, tensor.dtype, seed)
            tensor.copy_(fresh.to(subject.device))
        bar, _ = call_bar(subject, trial, upstream)
        graph.replay()
        torch.cuda.synchronize(subject.device)
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
        torch.cuda.empty_cache()
        try:
            trial = subject.from_case(name, case)
            if trial is None:
                continue
            outcome = _huge_case(subject, trial)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return Result(
                name, Verdict.NOT_JUDGED, f"{case.name} does not fit in this GPU's memory"
            )
        tried += 1
        if outcome.problem is not None:
            problem = f"{case.name}: {outcome.problem}"
            return Result(name, Verdict.FAIL, problem, tried, case=(case.name,))
        worst = max(worst, outcome, key=lambda outcome: outcome.share_of_bar)
    torch.cuda.empty_cache()
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

"""How results of many calls are compared, and which calls some checks leave out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from gallery import honest

from fuselab.op import tensors_in
from fuselab.prove import check_calls, check_group, check_torch
from fuselab.prove.asked_edges import GuardedAllocations
from fuselab.prove.check_calls import _first_difference
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, run_check


def test_the_first_call_that_differs_is_found_in_results_of_any_rank():
    alike = torch.ones(4, 2, 3)
    numbers = torch.tensor([1.0, 1.0, 2.0, 1.0])  # four calls, each with a result of no dimension
    assert _first_difference([alike, None]) is None
    assert _first_difference([alike, numbers]) == 2
    assert _first_difference([torch.full((4,), float("nan"))]) is None
    assert _first_difference([torch.zeros(4, 0)]) is None


def test_a_tensor_without_memory_has_no_edges() -> None:
    """A launcher may compute strides with meta tensors, as that of generalized_box_iou_loss."""
    with GuardedAllocations() as allocations:
        shape = torch.empty(3, 5, device="meta")
        memory = torch.empty(3, 5)
    assert shape.is_meta and len(allocations.watched) == 1
    assert not allocations.written()
    torch.as_strided(memory, (1,), (1,), memory.storage_offset() - 1).zero_()
    assert allocations.written()


def test_opcheck_is_not_asked_about_what_is_kept_of_empty_rows() -> None:
    """The mean of nothing is NaN, which opcheck takes for a fault of the operator."""
    facts = SimpleNamespace(residual_count=1)
    subject: Any = SimpleNamespace(op=facts, expected=lambda *args: torch.zeros(4, 0))
    trial: Any = SimpleNamespace(args=(torch.zeros(4, 0),))
    refused = check_torch.raw_operators_are_sound(subject, trial).refused
    assert refused is not None and "empty row" in refused


def test_large_threads_begin_with_a_size_that_counts() -> None:
    (known,) = (known for known in check_group.CHECKS if known.name == "several large threads")
    subject = Subject.here(
        honest.make_op("late_threads"), "plain", torch.device("cpu"), torch.float16, 0, True
    )
    asked: list[int] = []

    def trial(subject: Subject, trial: Trial) -> Outcome:
        asked.append(sum(one.nbytes for one in tensors_in(trial.args)))
        return Outcome()

    result = run_check(subject, replace(known, trial=trial), until=0.0)
    assert (result.verdict, result.trials, result.planned) == (Verdict.PASS, 1, 4)
    assert asked[0] >= check_calls._LARGE_BYTES


def test_a_late_check_that_tried_nothing_says_that_there_was_no_time() -> None:
    subject = Subject.here(
        honest.make_op("no_time"), "plain", torch.device("cpu"), torch.float32, 0, True
    )
    known = Check("shapes", lambda subject, trial: Outcome(untried=True), quick=8)
    late, whole = (run_check(subject, known, until=until) for until in (0.0, float("inf")))
    assert late.verdict is whole.verdict is Verdict.NOT_JUDGED
    assert late.reason == (
        "no time was left for it: 2 of 8 trials were made, and the question has no meaning for "
        "their inputs"
    )
    assert whole.reason == "the question has no meaning for any input drawn"

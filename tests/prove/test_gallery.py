"""The referee: the right check catches every wrong operator of the gallery; honest ones pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from gallery import (
    honest,
    in_place,
    lookup,
    remainder,
    several_outputs,
    wrong,
    wrong_arguments,
    wrong_calls,
    wrong_declarations,
    wrong_gradients,
    wrong_kinds,
    wrong_memory,
    wrong_options,
    wrong_outputs,
    wrong_patterns,
    wrong_sizes,
    wrong_state,
)
from gallery.wrong import Exhibit

from fuselab.op import FusedOp
from fuselab.prove import accuracy, check_calls, check_group
from fuselab.prove.check import check
from fuselab.prove.process_state import ProcessState
from fuselab.prove.result import CheckReport
from fuselab.runtime.dispatch import public, raw_operator, registration

EXHIBITS = [
    *wrong.EXHIBITS,
    *wrong_gradients.EXHIBITS,
    *wrong_arguments.EXHIBITS,
    *several_outputs.EXHIBITS,
]
# Of these only the check that must catch them is made, and the operator's cases.
NARROW = [
    *wrong_outputs.EXHIBITS,
    *wrong_calls.EXHIBITS,
    *wrong_state.EXHIBITS,
    *wrong_sizes.EXHIBITS,
    *wrong_memory.EXHIBITS,
    *wrong_declarations.EXHIBITS,
    *wrong_kinds.EXHIBITS,
    *wrong_options.EXHIBITS,
    *wrong_patterns.EXHIBITS,
]
OTHERS: dict[str, Callable[[str, str], FusedOp]] = {
    "in_place": in_place.make_op,
    "in_place_sequence": in_place.make_sequence_op,
    "lookup": lookup.make_op,
    "remainder": remainder.make_op,
    "several_outputs": several_outputs.make_op,
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# These take a second each, and show nothing about an operator that another check is about.
SLOW = {"operator", "compile", "compiled gradients", "torch.func", "many calls", "several threads"}
SLOW |= {"several large threads"}
SLOW |= {"held outputs", "leaks", "sizes", "large", "large mixture", "very large"}


@pytest.fixture(autouse=True)
def nothing_left_changed() -> Iterator[None]:
    """Some exhibits change global state on purpose."""
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
    before = ProcessState()
    yield
    before.restore()
    if stream is not None:
        torch.cuda.set_stream(stream)


def run(exhibit: Exhibit, device: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> CheckReport:
    # How failures shrink is tested elsewhere; here a short search and few copies save a minute.
    # That no check breaks on a wrong operator is seen on the CPU, where checks that the exhibit is
    # not about make a quarter of their trials; a GPU takes 5 s for all of them.
    monkeypatch.setattr(accuracy, "COPIES", 4)
    asked = {"cases", exhibit.caught_by}
    others = (
        {known.name for known in check_group.CHECKS} - SLOW - asked if device == "cpu" else set()
    )
    if exhibit.cpu_only and device == "cuda":
        pytest.skip(exhibit.cpu_only)
    wanted = [
        replace(known, shrink_tries=4, quick=known.quick if known.name in asked else quarter)
        for known in check_group.CHECKS
        if known.name in asked | others
        for quarter in [(known.quick + 3) // 4]
    ]
    monkeypatch.setattr(check_group, "CHECKS", tuple(wanted))
    op = exhibit.build(device)
    return check(op, dtype=exhibit.dtype, quick=True, seed=seed, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_wrong_operator_is_caught(
    exhibit: Exhibit, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if exhibit.gpu_only and device == "cpu":
        pytest.skip("there are no streams on a CPU")
    report = run(exhibit, device, monkeypatch, seed=0)
    assert exhibit.caught_by in report.failed_checks(), report
    if exhibit.passes_its_cases:
        assert "cases" not in report.failed_checks()
    (failure, *_) = report.groups[0].failures
    assert failure.reason and failure.case
    assert failure.repeat_command and "--seed 0" in failure.repeat_command


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exhibit", NARROW, ids=lambda exhibit: exhibit.name)
def test_its_own_check_catches_a_wrong_operator(
    exhibit: Exhibit, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if exhibit.cpu_only and device == "cuda":
        pytest.skip(exhibit.cpu_only)
    wanted = [
        replace(known, shrink_tries=0 if known.large else 2)
        for known in check_group.CHECKS
        if known.name in {"cases", exhibit.caught_by}
    ]
    monkeypatch.setattr(check_group, "CHECKS", tuple(wanted))
    monkeypatch.setattr(accuracy, "COPIES", 1 if "large" in exhibit.caught_by else 4)
    report = check(exhibit.build(device), dtype=exhibit.dtype, quick=True, seed=0, device=device)
    assert exhibit.caught_by in report.failed_checks(), report
    assert exhibit.passes_its_cases is ("cases" not in report.failed_checks())
    assert report.groups[0].failures[0].repeat_command


@pytest.mark.parametrize("exhibit", wrong_sizes.ONE_SIZE, ids=lambda exhibit: exhibit.name)
def test_a_full_check_finds_a_size_that_is_wrong(
    exhibit: Exhibit, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sizes,) = (known for known in check_group.CHECKS if known.name == "sizes")
    monkeypatch.setattr(check_group, "CHECKS", (replace(sizes, shrink_tries=2),))
    report = check(exhibit.build("cpu"), dtype=torch.float32, seed=0, device="cpu")
    assert report.failed_checks() == {"sizes"}


@pytest.mark.parametrize("device", DEVICES)
def test_honest_operator_passes(device: str) -> None:
    report = check(
        honest.make_op("honest" if device == "cpu" else "honest_cuda", device),
        seed=0,
        quick=True,
        device=device,
    )
    assert report.passed, [failure for group in report.groups for failure in group.failures]
    assert {group.dtype for group in report.groups} == {"float32", "float16", "bfloat16", "float64"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", OTHERS)
def test_honest_operators_of_other_arguments_pass(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":  # what torch.compile makes there, the operator of the test above shows
        quick = [known for known in check_group.CHECKS if known.name not in SLOW]
        monkeypatch.setattr(check_group, "CHECKS", tuple(quick))
    monkeypatch.setattr(check_calls, "REPEATS", 60)  # the operator of the test above makes them all
    op = OTHERS[kind](f"honest_{kind}_{device}", device)
    report = check(op, seed=0, quick=True, device=device)
    assert report.passed, [failure for group in report.groups for failure in group.failures]
    assert report.groups[0].trials > 150


@pytest.mark.parametrize(
    ("guard", "caught_by"),
    [("bump_versions", "version counters"), ("refuse_overlap", "shared memory")],
)
def test_what_dispatch_guards_is_checked(
    guard: str, caught_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = in_place.make_op(f"without_{guard}")
    users = [user for user in (public, raw_operator, registration) if hasattr(user, guard)]
    assert len(users) == 2
    for user in users:
        monkeypatch.setattr(user, guard, lambda *args: None)
    report = check(op, seed=0, dtype=torch.float32, quick=True, device="cpu")
    assert caught_by in report.failed_checks()

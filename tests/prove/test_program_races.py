"""Programs of one launch that need an order are found, although the interpreter gives them one."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from fuselab.prove import check_group
from fuselab.prove.check import check
from fuselab.prove.program_races import _ATOMIC, _LOAD, _STORE, Launch

PROGRAMS = Path(__file__).parent / "gallery" / "programs"
FIRST, SECOND = (0, 0, 0), (1, 0, 0)
SAID = {
    "clears_first": "adds by an atomic to",
    "adds_without_atomics": "of the same launch loads",
    "honest_atomics": None,
    "honest_own_column": None,
}


def test_every_kernel_of_the_folder_is_expected_here() -> None:
    assert {path.stem for path in PROGRAMS.glob("*.py")} - {"__init__"} == SAID.keys()


@pytest.mark.parametrize("name", SAID)
def test_a_kernel_whose_programs_need_an_order_fails(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gives right results in the interpreter, so that only this check fails."""
    checks = [known for known in check_group.CHECKS if known.name in ("cases", "programs")]
    monkeypatch.setattr(check_group, "CHECKS", tuple(checks))
    report = check(str(PROGRAMS / f"{name}.py"), quick=True, seed=0, device="cpu")
    said = SAID[name]
    assert report.failed_checks() == ({"programs"} if said else set()), report
    (found,) = report.results("programs")
    assert found.trials > 0 and (said or "") in str(found.reason or "")


def launch_of(*accesses: tuple[int, tuple[int, int, int], list[int], list[float]]) -> Launch:
    launch = Launch("kernel")
    for kind, program, addresses, values in accesses:
        pointers = numpy.array(addresses, dtype=numpy.uint64)
        launch.note(kind, program, pointers, True, numpy.array(values, dtype=numpy.float32))
    return launch


@pytest.mark.parametrize(
    ("accesses", "raced"),
    [
        ([(_STORE, FIRST, [0, 4], [1, 2]), (_LOAD, SECOND, [8], [3])], False),
        ([(_STORE, FIRST, [0, 4], [1, 2]), (_LOAD, SECOND, [4], [0])], True),
        ([(_LOAD, SECOND, [4], [0]), (_STORE, FIRST, [0, 4], [1, 2])], True),
        # Its own elements, in place.
        ([(_LOAD, FIRST, [4], [0]), (_STORE, FIRST, [4], [1])], False),
        # All store the same number, and -0.0 is another one than 0.0.
        ([(_STORE, FIRST, [4], [1]), (_STORE, SECOND, [4], [1])], False),
        ([(_STORE, FIRST, [4], [0.0]), (_STORE, SECOND, [4], [-0.0])], True),
        ([(_ATOMIC, FIRST, [4], [1]), (_ATOMIC, SECOND, [4], [2])], False),
        ([(_STORE, FIRST, [4], [1]), (_ATOMIC, SECOND, [4], [1])], True),
        ([(_LOAD, FIRST, [4], [1]), (_LOAD, SECOND, [4], [1])], False),
    ],
)
def test_what_is_a_race(accesses: list[object], raced: bool) -> None:
    launch = launch_of(*accesses)  # type: ignore[arg-type]
    assert (launch.race() is not None) is raced
    launch.is_ordered = True  # by a counter or a lock
    assert launch.race() is None


def test_masked_elements_are_not_used() -> None:
    launch = launch_of((_STORE, FIRST, [4], [1]))
    pointers, mask = numpy.array([4, 8], dtype=numpy.uint64), numpy.array([False, True])
    launch.note(_LOAD, SECOND, pointers, mask, numpy.zeros(2, dtype=numpy.float32))
    assert launch.race() is None
    assert Launch("kernel").race() is None

"""The judge stands outside: whatever a candidate does to its own process, the verdict is FAIL."""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gallery import honest

from fuselab.cli.main import run
from fuselab.errors import TargetError
from fuselab.prove import accuracy, check_group, processes
from fuselab.prove.check import check
from fuselab.prove.check_group import run_group
from fuselab.prove.held import results
from fuselab.prove.processes import Process
from fuselab.prove.result import Group, Verdict
from fuselab.prove.rows import Ends
from fuselab.prove.subject import Subject

ATTACKS = Path(__file__).parent / "gallery" / "attacks"
CPU = torch.device("cpu")

# What the failure of each attack says, and the check whose failure says it.
SAID = {
    "exits": ("cases", r"ended its process \(exit status 0\) without an answer"),
    "leaves": ("cases", "raised SystemExit: 0"),
    "interrupts": ("cases", "raised Quiet: nothing happened"),
    "reads_nowhere": ("cases", "ended its process by SIGSEGV"),
    "aborts": ("cases", "ended its process by SIGABRT"),
    "loops": ("cases", "did not end within"),
    "prints_a_verdict": ("cases", r"writes to standard output: 'PASS \(313 trials, seed 0\)"),
    "patched_comparison": ("cases", "is off by"),
    "patched_clock": ("cases", "is off by"),
    "looks_for_the_answer": ("cases", "is off by"),
    "other_reference": ("cases", "is off by"),
    "patched_functional": ("import", "its import replaces torch.nn.functional.silu"),
    "patched_body": ("import", "its import replaces the body of torch.nn.functional.silu"),
    "patched_by_its_draw": ("shapes", "declares replaces torch.nn.functional.silu"),
    "own_kernel_of_torch": ("import", "its import replaces the kernel of aten/silu/CPU"),
    "answers_itself": ("cases", "the call"),
    "forks": ("cases", "answers that nobody asked for"),
    # Landlock refuses it. Without Landlock the kernel ends the worker with its parent, before or
    # after it has answered.
    "kills_its_parent": ("cases", "raised PermissionError|without an answer|is off by"),
    "puts_its_input_back": ("guards", "puts back what was there.* by SIGSEGV"),
    "reads_past_the_page": ("guards", "reads beyond it: .* by SIGSEGV"),
    "tensor_that_agrees": ("cases", "returned an Agreeing where a Tensor was expected"),
}
ON_IMPORT = {
    "exits_on_import": "its import ended its process (exit status 0) without an answer",
    "leaves_on_import": "leaves_on_import.py:5: SystemExit: 0",
}


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the checks of the cases, of shapes and of guards, with few trials and few copies."""
    monkeypatch.setattr(accuracy, "COPIES", 2)
    some = [
        replace(known, quick=4, shrink_tries=3)
        for known in check_group.CHECKS
        if known.name in ("cases", "shapes", "guards")
    ]
    monkeypatch.setattr(check_group, "CHECKS", tuple(some))


def test_every_attack_is_expected_here() -> None:
    found = {path.stem for path in ATTACKS.glob("*.py")} - {"__init__"}
    assert found == SAID.keys() | ON_IMPORT.keys()


@pytest.mark.usefixtures("few_checks")
@pytest.mark.parametrize("name", SAID)
def test_an_attack_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fails with the case named; a loop is given a second for its first call."""
    limit_s = 0.2 if name == "loops" else 60.0
    where, said = SAID[name]
    if where in ("cases", "guards"):
        only = tuple(known for known in check_group.CHECKS if known.name == where)
        monkeypatch.setattr(check_group, "CHECKS", only)
    report = check(
        str(ATTACKS / f"{name}.py"),
        seed=0,
        dtype=torch.float32,
        quick=True,
        device="cpu",
        call_limit_s=limit_s,
    )
    (failure,) = report.results(where)
    assert failure.verdict is Verdict.FAIL
    assert re.search(said, str(failure.reason))
    if where == "cases":
        # The second answer of a process that forks may arrive during the second case.
        assert failure.case[0] == "16x64" or name == "forks"
        assert f"--case cases@{failure.case[0]}" in str(failure.repeat_command)
        assert failure.case[1].startswith("input: float32[")


@pytest.mark.parametrize("name", ON_IMPORT)
def test_an_import_that_ends_its_process_is_a_wrong_call(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ATTACKS / f"{name}.py"
    with pytest.raises(TargetError) as refused:
        check(str(path), seed=0, quick=True, device="cpu")
    assert str(refused.value).startswith(str(path)) and ON_IMPORT[name] in str(refused.value)
    assert run(["check", str(path), "--quick", "--device", "cpu"]) == 2
    assert ON_IMPORT[name] in capsys.readouterr().err


def test_an_import_has_its_limit_of_the_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LEAST_IMPORT_LIMIT_S", 0.1)
    path = tmp_path / "never_imported.py"
    path.write_text("while True:\n    pass\n")
    with (
        Process(str(path), "candidate", CPU, limit_s=0.05) as process,
        pytest.raises(TargetError, match=r"its import took longer than 0\.25 s"),
    ):
        process.start()


@pytest.mark.usefixtures("few_checks")
def test_the_command_never_imports_the_file(tmp_path: Path) -> None:
    """The file notes every process that imports it."""
    noted = tmp_path / "imports"
    path = tmp_path / "noted.py"
    note = f"import os\n\nopen({str(noted)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    path.write_text(Path(honest.__file__).read_text() + note + "\nOP = make_op('noted')\n")
    before = set(sys.modules)
    assert check(str(path), seed=0, dtype=torch.float32, quick=True, device="cpu").passed
    importers = [int(line) for line in noted.read_text().split()]
    assert len(importers) == len(set(importers)) == 2 and os.getpid() not in importers
    assert not [name for name in set(sys.modules) - before if "noted" in name]


def honest_file(folder: Path, name: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(f"from gallery import honest\n\nOP = honest.make_op({name!r})\n")
    return str(path)


def figures(group: Group) -> list[tuple[str, Verdict, float, int]]:
    return [
        (result.check, result.verdict, result.share_of_bar, result.trials)
        for result in group.results
    ]


def test_threads_may_share_a_process(tmp_path: Path) -> None:
    """On a GPU rows run at the same time, and those of the CPU share the reference's process."""
    with Ends(honest_file(tmp_path, "shared")) as ends, ThreadPoolExecutor(4) as pool:
        reference = ends.reference(CPU)
        inputs = [torch.full((3, 5), float(number)) for number in range(40)]
        found = pool.map(lambda input: reference.ask(results, input, input[0], 0.5), inputs)
        for input, (output,) in zip(inputs, found, strict=True):
            assert torch.equal(output, honest.reference(input, input[0], 0.5))


@pytest.mark.usefixtures("few_checks")
def test_a_row_is_the_same_in_processes_as_in_this_one(tmp_path: Path) -> None:
    inside = Subject.here(honest.make_op("same_row"), "plain", CPU, torch.float16, 2, True)
    with Ends(honest_file(tmp_path, "same_row")) as ends:
        outside = replace(
            inside, reference=ends.reference(CPU), candidate=ends.candidate(CPU, "plain")
        )
        group = run_group(outside, None)
    assert figures(group) == figures(run_group(inside, None))
    assert group.verdict is Verdict.PASS and group.share_of_bar > 0


FORKS_AWAY = """
import os
import time

from gallery import honest


def forward(input, bias, scale):
    if os.fork() == 0:
        os.setsid()
        open({!r}, "a").write(f"{{os.getpid()}} ")
        time.sleep(600)
        os._exit(0)
    return honest.forward(input, bias, scale)


OP = honest.make_op("forks_away", forward=forward)
"""


@pytest.mark.usefixtures("few_checks")
def test_what_left_the_session_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, path = tmp_path / "left", tmp_path / "forks_away.py"
    path.write_text(FORKS_AWAY.format(str(noted)))
    monkeypatch.setattr(check_group, "CHECKS", check_group.CHECKS[:1])
    check(str(path), dtype=torch.float32, quick=True, seed=0, device="cpu")
    left = [int(pid) for pid in noted.read_text().split()]
    assert left and not any(Path(f"/proc/{pid}").exists() for pid in left)

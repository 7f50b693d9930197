"""Triton implementations without a GPU: checked under the interpreter, in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fuselab.op import FusedOp
from fuselab.prove.load import load_op, spec_of
from fuselab.prove.result import Group, Result, Verdict, group_facts, group_from_facts

TIME_LIMIT_S = 3600


def interpreted_groups(
    op: FusedOp,
    implementation: str,
    dtypes: Sequence[torch.dtype],
    quick: bool,
    seed: int,
    case: str | None,
) -> list[Group]:
    """One group per dtype. bfloat16 is not judged: the interpreter's stores truncate instead of
    rounding to nearest."""
    judged = [dtype for dtype in dtypes if dtype != torch.bfloat16]
    spec = spec_of(op)
    found: dict[str, Group] = {}
    if judged and spec is not None:
        request = {
            "spec": spec,
            "implementation": implementation,
            "dtypes": [_name(dtype) for dtype in judged],
            "quick": quick,
            "seed": seed,
            "case": case,
        }
        found = {group.dtype: group for group in _ask_child(request)}
    groups = []
    for dtype in dtypes:
        reason = "the child process gave no answer"
        if dtype == torch.bfloat16:
            reason = "the interpreter's bfloat16 stores truncate; judged on a GPU"
        elif spec is None:
            reason = (
                "made inside a function: the interpreter's process cannot import it from a file"
            )
        unjudged = Group(
            implementation,
            _name(dtype),
            "interpreter",
            (Result("interpreter", Verdict.NOT_JUDGED, reason),),
        )
        groups.append(found.get(_name(dtype), unjudged))
    return groups


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ask_child(request: dict[str, object]) -> list[Group]:
    """Groups as the child writes them; a child that dies is a failure that says how."""
    with tempfile.TemporaryDirectory(prefix="fuselab-check-") as folder:
        answer = Path(folder) / "groups.json"
        child = subprocess.run(
            [sys.executable, "-m", "fuselab.prove.interpreted", str(answer)],
            input=json.dumps(request),
            text=True,
            capture_output=True,
            timeout=TIME_LIMIT_S,
            env=_environment(),
        )
        if child.returncode == 0 and answer.is_file():
            return [group_from_facts(facts) for facts in json.loads(answer.read_text())]
    last = [line for line in child.stderr.strip().splitlines() if line.strip()]
    reason = f"the interpreter's process ended with status {child.returncode}"
    result = Result("interpreter", Verdict.FAIL, reason, case=tuple(last[-6:]))
    names = request["dtypes"]
    assert isinstance(names, list)
    return [
        Group(str(request["implementation"]), str(name), "interpreter", (result,)) for name in names
    ]


def _environment() -> dict[str, str]:
    """This process's environment, its import path included, with the interpreter switched on."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}


def _answer(request: dict[str, object], answer: Path) -> None:
    """The child's side: load the operator anew, let its Triton code run on the CPU, check it."""
    from fuselab.prove.check import run_groups

    op = load_op(str(request["spec"]))
    name = str(request["implementation"])
    interpreted = replace(op.implementations[name], device="cpu")
    op = replace(op, implementations={name: interpreted}, prefer=None)
    names = request["dtypes"]
    assert isinstance(names, list)
    case = request["case"]
    groups = run_groups(
        op,
        name,
        torch.device("cpu"),
        [getattr(torch, dtype) for dtype in names],
        quick=bool(request["quick"]),
        seed=int(str(request["seed"])),
        case=None if case is None else str(case),
        where="interpreter",
        spec=str(request["spec"]),
    )
    answer.write_text(json.dumps([group_facts(group) for group in groups]))


if __name__ == "__main__":
    _answer(json.load(sys.stdin), Path(sys.argv[1]))

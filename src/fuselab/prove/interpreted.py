"""The check of Triton implementations without a GPU, under the interpreter in a child process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fuselab.errors import TargetError
from fuselab.prove.check_group import run_group
from fuselab.prove.load import load_op
from fuselab.prove.result import Group, Result, Verdict, group_facts, group_from_facts
from fuselab.prove.subject import Subject
from fuselab.runtime import interpreter

TIME_LIMIT_S = 3600.0


def interpreted_groups(
    spec: str | None,
    implementation: str,
    dtypes: Sequence[torch.dtype],
    quick: bool,
    seed: int,
    case: str | None,
    budget_s: float | None = None,
) -> list[Group]:
    """Check a Triton implementation under the interpreter and return one group per dtype.

    bfloat16 is not judged, because the interpreter's stores truncate instead of rounding to
    nearest. ``spec`` is where the child finds the operator; if it is None, nothing is judged. A
    child that dies is a failure whose reason says how it died.
    """
    groups = []
    for number, dtype in enumerate(dtypes):
        name = str(dtype).removeprefix("torch.")
        if dtype == torch.bfloat16:
            result = _not_judged("the interpreter's bfloat16 stores truncate; judged on a GPU")
        elif spec is None:
            result = _not_judged("made inside a function: the interpreter cannot import it")
        else:
            try:
                facts = interpreter.run(
                    "fuselab.prove.interpreted:answer",
                    spec,
                    implementation,
                    dtype,
                    quick=quick,
                    seed=seed,
                    case=case,
                    first=number == 0,
                    budget_s=budget_s,
                    timeout_s=TIME_LIMIT_S,
                )
                groups.append(group_from_facts(facts))
                continue
            except TargetError as error:
                result = Result("interpreter", Verdict.FAIL, str(error))
        groups.append(Group(implementation, name, "interpreter", (result,)))
    return groups


def _not_judged(reason: str) -> Result:
    return Result("interpreter", Verdict.NOT_JUDGED, reason)


def answer(
    spec: str,
    implementation: str,
    dtype: torch.dtype,
    quick: bool,
    seed: int,
    case: str | None,
    first: bool,
    budget_s: float | None = None,
) -> dict[str, Any]:
    """Load the operator in the child process, make its Triton code run on the CPU, and check it."""
    op = load_op(spec)
    interpreted = replace(op.implementations[implementation], device="cpu")
    op = replace(op, implementations={implementation: interpreted}, configs={}, prefer=None)
    # numpy, on which the interpreter runs, warns of every overflow; the checks overflow on purpose.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    subject = Subject(
        op,
        implementation,
        torch.device("cpu"),
        dtype,
        seed,
        quick,
        interpreted=True,
        first=first,
        spec=spec,
        budget_s=budget_s,
    )
    return group_facts(run_group(subject, case))

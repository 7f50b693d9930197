"""The check of Triton implementations without a GPU, under the interpreter in a child process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
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


def interpreted_group(subject: Subject, importable: bool, case: str | None) -> Group:
    """Check a Triton implementation under the interpreter.

    bfloat16 is not judged, because the interpreter's stores truncate instead of rounding to
    nearest; nor is an operator that is not ``importable`` by the child from the subject's ``spec``.
    A child that dies is a failure whose reason says how it died.
    """
    if subject.dtype == torch.bfloat16:
        result = _not_judged("the interpreter's bfloat16 stores truncate; judged on a GPU")
    elif not importable:
        result = _not_judged("made inside a function: the interpreter cannot import it")
    else:
        answer = "fuselab.prove.interpreted:checked"
        try:
            return group_from_facts(
                interpreter.run(answer, subject.settings(), case, timeout_s=TIME_LIMIT_S)
            )
        except TargetError as error:
            result = Result("interpreter", Verdict.FAIL, str(error))
    return Group(subject.implementation, subject.dtype_name, "interpreter", (result,))


def _not_judged(reason: str) -> Result:
    return Result("interpreter", Verdict.NOT_JUDGED, reason)


def checked(settings: Mapping[str, Any], case: str | None) -> dict[str, Any]:
    """Load the operator in the child process, make its Triton code run on the CPU, and check it."""
    op, name = load_op(settings["spec"]), settings["implementation"]
    on_cpu = {name: replace(op.implementations[name], device="cpu")}
    op = replace(op, implementations=on_cpu, configs={}, prefer=None)
    # numpy, on which the interpreter runs, warns of every overflow; the checks overflow on purpose.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    return group_facts(run_group(Subject.of_settings(op, settings), case))

"""``fuselab.check``: every check of every implementation and dtype of one operator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fuselab.device.select import select
from fuselab.errors import UnknownNameError
from fuselab.op import FusedOp
from fuselab.prove import (
    check_build,
    check_device,
    check_gradients,
    check_memory,
    check_torch,
    check_values,
)
from fuselab.prove.interpreted import interpreted_groups
from fuselab.prove.load import load_op, spec_of
from fuselab.prove.result import CheckReport, Group, Result, Verdict
from fuselab.prove.subject import Subject
from fuselab.prove.trials import Check, run_check
from fuselab.runtime import fallback

CHECKS: tuple[Check, ...] = (
    *check_memory.STATE_CHECKS,  # before anything else has called the implementation
    *check_values.CHECKS,
    *check_memory.CHECKS,
    *check_gradients.CHECKS,
    *check_torch.CHECKS,
    *check_device.CHECKS,
)

Progress = Callable[[str], None]


def check(
    op: FusedOp | str,
    implementation: str | None = None,
    dtype: torch.dtype | None = None,
    quick: bool = False,
    seed: int = 0,
    device: str | torch.device | None = None,
    case: str | None = None,
    progress: Progress = lambda line: None,
) -> CheckReport:
    """Check an operator against its reference in float64, and against everything else that can be
    wrong with a kernel. ``fuselab.prove.accuracy`` says what the bar is.

    Args:
        op: a FusedOp, or what ``load_op`` takes (a library name, a file, a folder).
        implementation, dtype: one of the operator's; all by default.
        quick: fewer trials, and what does not depend on the dtype once only.
        seed: equal seeds try equal inputs and give equal figures.
        device: as ``--device``. A CPU implementation runs on the CPU whatever it says; without a
            GPU, Triton runs under the interpreter and CUDA C++ is compiled only.
        case: ``CHECK@CASE`` as a failure prints it: that one trial alone.
        progress: called with one line per group.

    Raises:
        UnknownNameError, TargetError: nothing of that name; says what there is.
        DeviceError: the device is not there.
    """
    given = op if isinstance(op, str) else None
    op = load_op(op) if isinstance(op, str) else op
    found = given or spec_of(op)
    spec = found or op.name
    place = select(str(device) if device is not None else "auto")
    if implementation is not None and implementation not in op.implementations:
        raise UnknownNameError("implementation", implementation, op.implementations)
    if case is not None:
        _find(case)
    dtypes = list(op.dtypes) if dtype is None else [dtype]
    groups: list[Group] = []
    for name in op.implementations if implementation is None else (implementation,):
        runs_on = op.implementations[name].device
        progress(f"{op.name}: {name}")
        if runs_on == "cpu" or place.type == "cuda":
            where = place if runs_on == "cuda" else torch.device("cpu")
            for number, wanted in enumerate(dtypes):
                subject = Subject(
                    op, name, where, wanted, seed, quick, first=number == 0, spec=spec
                )
                groups.append(run_group(subject, case))
        elif is_triton(name):
            groups += interpreted_groups(found, name, dtypes, quick, seed, case)
        else:
            groups.append(check_build.compiled_group(op, name, quick))
    return CheckReport(op.name, seed, quick, str(place), tuple(groups))


def is_triton(implementation: str) -> bool:
    """Whether an implementation runs under Triton's interpreter; its key says so."""
    return implementation.startswith("triton")


def run_group(subject: Subject, case: str | None) -> Group:
    """All checks of one implementation and dtype, in this process; or the one trial ``case``."""
    results: list[Result] = []
    for known in CHECKS if case is None else (_find(case),):
        if any("CUDA error" in (result.reason or "") for result in results):
            reason = "an earlier kernel broke the CUDA context"
            results.append(Result(known.name, Verdict.NOT_JUDGED, reason))
        elif known.once and subject.quick and not subject.first and case is None:
            reason = "with --quick made in the first dtype only"
            results.append(Result(known.name, Verdict.SKIPPED, reason))
        else:
            results.append(_run(subject, known, case))
    if case is None and not subject.quick:
        results.append(check_device.huge_cases(subject))
    where = "interpreter" if subject.interpreted else subject.device.type
    return Group(subject.implementation, subject.dtype_name, where, tuple(results))


def _run(subject: Subject, known: Check, case: str | None) -> Result:
    fallback.forget()
    try:
        with fallback.strict():
            return run_check(subject, known, None if case is None else case.partition("@")[2])
    except torch.OutOfMemoryError:
        return Result(known.name, Verdict.NOT_JUDGED, "the device ran out of memory")


def _find(case: str) -> Check:
    names = {known.name.replace(" ", "-"): known for known in CHECKS}
    wanted = case.partition("@")[0]
    if wanted not in names:
        raise UnknownNameError("check", wanted, names)
    return names[wanted]

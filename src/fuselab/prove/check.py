"""``fuselab.check``: every check of every implementation and dtype of one operator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from fuselab.composition import Composition
from fuselab.device.select import select
from fuselab.errors import ArgumentError, UnknownNameError
from fuselab.op import FusedOp, dtype_name
from fuselab.prove import check_build
from fuselab.prove.check_composition import composition_groups
from fuselab.prove.check_group import check_of, run_group
from fuselab.prove.check_processes import groups_in_processes
from fuselab.prove.interpreted import interpreted_group
from fuselab.prove.load import load, spec_of
from fuselab.prove.result import CheckReport, Group
from fuselab.prove.subject import Subject
from fuselab.runtime.cuda_source import device_arch

Progress = Callable[[str], None]


def check(
    op: FusedOp | Composition | str,
    implementation: str | None = None,
    dtype: torch.dtype | None = None,
    quick: bool = False,
    seed: int = 0,
    device: str | torch.device | None = None,
    case: str | None = None,
    budget_s: float | None = None,
    progress: Progress = lambda line: None,
) -> CheckReport:
    """Check an operator against its reference in float64, and for every other known fault of a
    kernel.

    ``fuselab.prove.accuracy`` defines the bar for values.

    Args:
        op: a FusedOp, or a string for ``load_op`` (a library name, a file, a folder). Of a
            composition every operator is checked, then the function as a whole.
        implementation, dtype: one of the operator's; all by default.
        quick: make fewer trials, try two names of each choice between names (activations), and make
            checks that do not depend on the dtype only once.
        seed: equal seeds try equal inputs in the same order, and give equal figures unless the time
            ends first.
        device: as ``--device``. A CPU implementation always runs on the CPU. Without a GPU, Triton
            runs under the interpreter and CUDA C++ is only compiled.
        case: ``CHECK@CASE`` as a failure prints it: only that trial is run, and nothing is built
            beside it.
        budget_s: the time in seconds for one implementation and dtype, by default 20 s when quick
            and otherwise 20 minutes. When it ends, each check still makes a quarter of its trials,
            and the report is ``cut_short``.
        progress: called with a line for each implementation, and one more where it is interpreted.

    On a GPU each implementation and dtype is checked in its own process, if there are several and
    another process can import the operator.

    Raises:
        UnknownNameError: the operator has no such implementation or dtype, or the library no such
            operator; the message lists the known names.
        TargetError: the file or folder holds no operator that can be loaded.
        ArgumentError: ``case`` names no trial, or the budget is not positive.
        DeviceError: the device is not there.
    """
    given = op if isinstance(op, str) else None
    op = load(op) if isinstance(op, str) else op
    if isinstance(op, Composition):
        return _check_composition(
            op, implementation, dtype, quick, seed, device, case, budget_s, progress, given
        )
    found = given or spec_of(op)
    spec = found or op.name
    place = select(str(device) if device is not None else "auto")
    if implementation is not None and implementation not in op.implementations:
        raise UnknownNameError("implementation", implementation, op.implementations)
    if dtype is not None and dtype not in op.dtypes:
        raise UnknownNameError("dtype", dtype_name(dtype), map(dtype_name, op.dtypes))
    if case is not None:
        check_of(case)
    if budget_s is not None and not budget_s > 0:
        raise ArgumentError(f"the budget is {budget_s} s; it must be above 0.")
    dtypes = list(op.dtypes) if dtype is None else [dtype]
    rows: list[Group | Subject] = []
    for name in op.implementations if implementation is None else (implementation,):
        progress(f"{op.name}: {name}")
        runs_here = op.implementations[name].device == "cpu" or place.type == "cuda"
        if not (runs_here or is_triton(name)):
            # ``case`` asks for one trial, which runs kernels; compiling would not answer it.
            rows.append(check_build.compiled_group(op, name, quick, build=case is None))
            continue
        subjects = [
            Subject(
                op,
                name,
                place if op.implementations[name].device == "cuda" else torch.device("cpu"),
                wanted,
                seed,
                quick,
                interpreted=not runs_here,
                first=number == 0,
                spec=spec,
                budget_s=budget_s,
            )
            for number, wanted in enumerate(dtypes)
        ]
        if runs_here:
            rows += subjects
        else:
            progress(f"{name} runs in Triton's interpreter: with --quick, about a minute per dtype")
            rows += [interpreted_group(subject, found is not None, case) for subject in subjects]
    subjects = [row for row in rows if isinstance(row, Subject)]
    checked = iter(_run_groups(subjects, found is not None, case))
    groups = tuple(next(checked) if isinstance(row, Subject) else row for row in rows)
    return CheckReport(op.name, seed, quick, str(place), groups)


def _check_composition(
    composition: Composition,
    implementation: str | None,
    dtype: torch.dtype | None,
    quick: bool,
    seed: int,
    device: str | torch.device | None,
    case: str | None,
    budget_s: float | None,
    progress: Progress,
    given: str | None,
) -> CheckReport:
    if case is not None:
        raise ArgumentError("a case is one operator's; name the operator's own folder.")
    place = select(str(device) if device is not None else "auto")
    groups: list[Group] = []
    for op in composition.operators:
        report = check(
            op, implementation, dtype, quick, seed, place, budget_s=budget_s, progress=progress
        )
        groups += [
            replace(group, implementation=f"{op.short_name} {group.implementation}")
            for group in report.groups
        ]
    progress(f"{composition.name}: the whole")
    dtypes = list(composition.dtypes) if dtype is None else [dtype]
    spec = given or composition.name
    groups += composition_groups(composition, dtypes, place, quick, seed, budget_s, spec)
    return CheckReport(composition.name, seed, quick, str(place), tuple(groups))


def is_triton(implementation: str) -> bool:
    """Return whether an implementation can run under Triton's interpreter, judged by its name."""
    return implementation.startswith("triton")


def _run_groups(subjects: list[Subject], importable: bool, case: str | None) -> list[Group]:
    """Check the subjects and return their groups in order.

    On a GPU, if there are several subjects, each one runs in its own process.
    """
    on_gpu = [subject for subject in subjects if subject.device.type == "cuda"]
    if not on_gpu or len(subjects) == 1 or not importable or case is not None:
        return [run_group(subject, case) for subject in subjects]
    arch = device_arch(on_gpu[0].device.index or 0)
    for name in dict.fromkeys(subject.implementation for subject in on_gpu):
        ahead = threading.Thread(
            target=check_build.compile_ahead, args=(on_gpu[0].op, name, arch), daemon=True
        )
        ahead.start()
    return groups_in_processes(subjects)

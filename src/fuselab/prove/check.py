"""``fuselab.check``: every check of every implementation and dtype of one operator."""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fuselab.composition import Composition
from fuselab.device.select import select
from fuselab.errors import ArgumentError, TargetError, UnknownNameError
from fuselab.op import FusedOp, dtype_name
from fuselab.prove import asked_inputs, check_build
from fuselab.prove.check_composition import Whole, composition_groups
from fuselab.prove.check_group import BUDGET_S, check_of, run_group
from fuselab.prove.facts import Facts
from fuselab.prove.held import CandidateError, End, RemoteError
from fuselab.prove.load import refuse_unknown, spec_of
from fuselab.prove.processes import CALL_LIMIT_S, Process
from fuselab.prove.result import CheckReport, Group, Result, Verdict
from fuselab.prove.row_apart import RowApart, huge_room, with_import
from fuselab.prove.rows import Ends, rows_at_a_time
from fuselab.prove.subject import Subject
from fuselab.runtime.cuda_source import device_arch

Progress = Callable[[str], None]
Row = Group | Subject | RowApart  # judged, to judge in turn, to judge beside others

# Seconds for rows that --quick judges one after the other. The start of their processes and the
# trials that are made in any case come on top.
QUICK_LANE_S = 40.0
_LEAST_LANE_S = 10.0  # of each operator of a composition, which share that time


@dataclass(frozen=True)
class Asked:
    """Hold what a check was asked for; see ``check``."""

    implementation: str | None
    dtype: torch.dtype | None
    quick: bool
    seed: int
    place: torch.device
    case: str | None
    budget_s: float | None
    call_limit_s: float
    progress: Progress
    operators: int = 1  # that are checked one after the other


def check(
    op: FusedOp | Composition | str,
    implementation: str | None = None,
    dtype: torch.dtype | None = None,
    quick: bool = False,
    seed: int | None = None,
    device: str | torch.device | None = None,
    case: str | None = None,
    budget_s: float | None = None,
    progress: Progress = lambda line: None,
    call_limit_s: float = CALL_LIMIT_S,
) -> CheckReport:
    """Check an operator against its reference in float64, and for every other known fault of a
    kernel.

    ``fuselab.prove.accuracy`` defines the bar for values. An operator given by a string is never
    imported here: one process answers for its declaration, another runs the implementation, and
    this one judges what comes back (docs/threat_model.md).

    Args:
        op: a FusedOp, or a string for ``load_op`` (a library name, a file, a folder). Of a
            composition every operator is checked, then the function as a whole.
        implementation, dtype: one of the operator's; all by default.
        quick: make fewer trials, try two names of each choice between names (activations), and make
            checks that do not depend on the dtype only once.
        seed: equal seeds try equal inputs in the same order, and give equal figures unless the time
            ends first. None draws one, which the report and each failure's command name, or is 0
            where a ``case`` is repeated.
        device: as ``--device``. A CPU implementation always runs on the CPU. Without a GPU, Triton
            runs under the interpreter and CUDA C++ is only compiled.
        case: ``CHECK@CASE`` as a failure prints it: only that trial is run, and nothing is built
            beside it.
        budget_s: the time in seconds for one implementation and dtype. By default those that are
            judged one after the other share 40 s when quick (on a GPU, where they are judged side
            by side, each has 20 s), and each has 20 minutes otherwise. When it ends, each check
            still makes a quarter of its trials (one under the interpreter when quick), and the
            report is ``cut_short``.
        progress: called with a line for each implementation, and one more where it is interpreted.
        call_limit_s: the time in seconds for one call in another process, the first of each kind
            five times as long. A call that does not end fails.

    With a GPU each implementation and dtype has processes of its own, which judge it beside the
    others, if there are several and another process can import the operator.

    Raises:
        UnknownNameError: the operator has no such implementation or dtype, or the library no such
            operator; the message lists the known names.
        TargetError: the file or folder holds no operator that can be loaded.
        ArgumentError: ``case`` names no trial, or the budget or the limit is not positive.
        DeviceError: the device is not there.
    """
    place = select(str(device) if device is not None else "auto")
    for name, seconds in (("budget", budget_s), ("limit of a call", call_limit_s)):
        if seconds is not None and not seconds > 0:
            raise ArgumentError(f"the {name} is {seconds} s; it must be above 0.")
    if seed is None:
        seed = 0 if case is not None else random.SystemRandom().randrange(1 << 16)
    asked = Asked(implementation, dtype, quick, seed, place, case, budget_s, call_limit_s, progress)
    if isinstance(op, FusedOp):
        with Ends(spec_of(op), op, call_limit_s) as ends:
            return _check_operator(asked, ends)
    if isinstance(op, Composition):
        held = {one.short_name: one for one in op.operators}
        return _check_composition(
            asked,
            Whole.here(op, place),
            lambda name: Ends(spec_of(held[name]), held[name], call_limit_s),
            op.name,
        )
    refuse_unknown(op)
    with Ends(op, None, call_limit_s) as ends:
        cpu = torch.device("cpu")
        if not ends.is_composition(cpu):
            return _check_operator(asked, ends)
        with Process(op, "candidate", place, limit_s=call_limit_s, patient=True) as candidate:
            whole = Whole.of_ends(ends.reference(place), candidate, place)
            folder = Path(op)
            return _check_composition(
                asked, whole, lambda name: Ends(str(folder / name), None, call_limit_s), op
            )


def _check_operator(asked: Asked, ends: Ends) -> CheckReport:
    with _errors_named(ends.spec):
        plain = ends.reference(torch.device("cpu")).ask(asked_inputs.operator_facts)
    facts = Facts.of_plain(plain)
    implementation, dtype = asked.implementation, asked.dtype
    if implementation is not None and implementation not in facts.implementations:
        raise UnknownNameError("implementation", implementation, facts.implementations)
    if dtype is not None and dtype not in facts.dtypes:
        raise UnknownNameError("dtype", dtype_name(dtype), map(dtype_name, facts.dtypes))
    if asked.case is not None:
        check_of(asked.case)
    dtypes = list(facts.dtypes) if dtype is None else [dtype]
    rows: list[Row] = []
    for name in facts.implementations if implementation is None else (implementation,):
        asked.progress(f"{facts.name}: {name}")
        runs_here = facts.implementations[name] == "cpu" or asked.place.type == "cuda"
        if not (runs_here or is_triton(name)):
            # ``case`` asks for one trial, which runs kernels; compiling would not answer it.
            candidate = ends.candidate(torch.device("cpu"), name)
            rows.append(
                check_build.compiled_group(candidate, name, asked.quick, asked.case is None)
            )
        elif runs_here:
            rows += _subjects(asked, ends, facts, name, dtypes)
        else:
            told = interpreted_time(asked.quick, asked.budget_s)
            asked.progress(f"{name} runs in Triton's interpreter: {told}")
            rows += _interpreted(asked, ends, facts, name, dtypes)
    groups = [with_import(group, ends.replaced) for group in _judged(asked, ends, rows)]
    return CheckReport(facts.name, asked.seed, asked.quick, str(asked.place), tuple(groups))


def interpreted_time(quick: bool, budget_s: float | None) -> str:
    """Return in a few words how long a dtype takes in Triton's interpreter."""
    if budget_s is not None:
        return f"about {budget_s:g} s per dtype"
    if quick:
        return "about a minute per dtype"
    return f"up to {BUDGET_S / 60:g} minutes per dtype; with --quick, about one"


@contextlib.contextmanager
def _errors_named(spec: str | None):  # type: ignore[no-untyped-def]
    """Turn an error of the reference's process into a TargetError that names the file."""
    try:
        yield
    except (RemoteError, CandidateError) as error:
        raise TargetError(f"{spec}: {error}") from error


def _subjects(
    asked: Asked, ends: Ends, facts: Facts, name: str, dtypes: Sequence[torch.dtype]
) -> list[Row]:
    """Return the rows of an implementation that runs here, one per dtype."""
    on_gpu = facts.implementations[name] == "cuda"
    device = asked.place if on_gpu else torch.device("cpu")
    several = len(dtypes) > 1 or (asked.implementation is None and len(facts.implementations) > 1)
    if asked.place.type == "cuda" and several and ends.spec is not None and asked.case is None:
        return [
            RowApart(
                facts,
                ends.spec,
                name,
                device,
                wanted,
                asked.seed,
                asked.quick,
                number == 0,
                asked.budget_s,
                asked.call_limit_s,
            )
            for number, wanted in enumerate(dtypes)
        ]
    return [
        _subject(
            asked,
            ends,
            facts,
            name,
            wanted,
            number == 0,
            ends.reference(device),
            ends.candidate(device, name),
        )
        for number, wanted in enumerate(dtypes)
    ]


def _interpreted(
    asked: Asked, ends: Ends, facts: Facts, name: str, dtypes: Sequence[torch.dtype]
) -> list[Row]:
    """Return the rows of a Triton implementation under the interpreter.

    bfloat16 is not judged, because the interpreter's stores truncate instead of rounding to
    nearest; nor is an operator that no other process can import.
    """
    rows: list[Row] = []
    cpu = torch.device("cpu")
    for number, wanted in enumerate(dtypes):
        reason = None
        if wanted == torch.bfloat16:
            reason = "the interpreter's bfloat16 stores truncate; judged on a GPU"
        elif ends.spec is None:
            reason = "made inside a function: the interpreter cannot import it"
        if reason is not None:
            result = Result("interpreter", Verdict.NOT_JUDGED, reason)
            rows.append(Group(name, dtype_name(wanted), "interpreter", (result,)))
            continue
        reference = ends.reference(cpu, interpreted=name)
        candidate = ends.candidate(cpu, name, interpreted=True)
        subject = _subject(
            asked, ends, facts, name, wanted, number == 0, reference, candidate, interpreted=True
        )
        rows.append(replace(subject, device=cpu))
    return rows


def _subject(
    asked: Asked,
    ends: Ends,
    facts: Facts,
    name: str,
    dtype: torch.dtype,
    first: bool,
    reference: End,
    candidate: End,
    interpreted: bool = False,
) -> Subject:
    return Subject(
        facts,
        reference,
        candidate,
        name,
        asked.place if facts.implementations[name] == "cuda" else torch.device("cpu"),
        dtype,
        asked.seed,
        asked.quick,
        interpreted,
        first,
        ends.spec or facts.name,
        asked.budget_s,
    )


def _judged(asked: Asked, ends: Ends, rows: Sequence[Row]) -> list[Group]:
    """Judge the rows: beside each other those that are judged apart, then the others."""
    apart = [row for row in rows if isinstance(row, RowApart)]
    if not apart:
        return _in_lanes(asked, ends, rows)
    on_gpu = {row.implementation: row.device for row in apart if row.device.type == "cuda"}
    arch = device_arch(asked.place.index or 0)
    for name, device in on_gpu.items():
        ahead = ends.candidate(device, name)
        threading.Thread(target=check_build.compile_ahead, args=(ahead, arch), daemon=True).start()
    with (
        tempfile.TemporaryDirectory(prefix="fuselab-room-") as folder,
        ThreadPoolExecutor(min(len(apart), rows_at_a_time())) as pool,
    ):
        room = huge_room(Path(folder), asked.place)
        found = iter(list(pool.map(lambda row: row.group(room), apart)))
    return _in_lanes(
        asked, ends, [next(found) if isinstance(row, RowApart) else row for row in rows]
    )


def _in_lanes(asked: Asked, ends: Ends, rows: Sequence[Row]) -> list[Group]:
    """Judge rows one after the other; those in Triton's interpreter, which has one thread, beside
    the others, unless this process holds the operator."""
    lane_s = QUICK_LANE_S
    if asked.operators > 1:
        lane_s = max(QUICK_LANE_S / asked.operators, _LEAST_LANE_S)

    def judged(places: Sequence[int]) -> dict[int, Group]:
        found: dict[int, Group] = {}
        until = time.monotonic() + lane_s
        for number, place in enumerate(places):
            row = rows[place]
            if asked.quick and asked.budget_s is None and isinstance(row, Subject):
                # What earlier rows left over is shared by this one and those after it. A first
                # dtype has more checks.
                left = max(until - time.monotonic(), 0.0)
                shares = [_share(rows[one]) for one in places[number:]]
                row = replace(row, budget_s=left * shares[0] / sum(shares))
            found[place] = _row(row, asked.case)
        return found

    interpreted = [
        place for place, row in enumerate(rows) if isinstance(row, Subject) and row.interpreted
    ]
    others = [place for place in range(len(rows)) if place not in interpreted]
    lanes = [lane for lane in (interpreted, others) if lane]
    if ends.op is not None or len(lanes) < 2:
        found = judged(range(len(rows)))
    else:
        with ThreadPoolExecutor(len(lanes)) as pool:
            found = {place: one for lane in pool.map(judged, lanes) for place, one in lane.items()}
    return [found[place] for place in range(len(rows))]


def _share(row: Row) -> int:
    """Return a row's share of the time of --quick; a group has been judged."""
    if not isinstance(row, Subject):
        return 0
    return 2 if row.first else 1


def _row(row: Row, case: str | None) -> Group:
    """Return a row's group, and end the candidate's process."""
    if isinstance(row, Group):
        return row
    assert isinstance(row, Subject)
    try:
        return run_group(row, case)
    finally:
        row.candidate.renew()


def _check_composition(
    asked: Asked, whole: Whole, ends_of: Callable[[str], Ends], spec: str
) -> CheckReport:
    if asked.case is not None:
        raise ArgumentError("a case is one operator's; name the operator's own folder.")
    groups: list[Group] = []
    shared = replace(asked, operators=len(whole.operators))
    for name in whole.operators:
        with ends_of(name) as ends:
            report = _check_operator(shared, ends)
        groups += [
            replace(group, implementation=f"{name} {group.implementation}")
            for group in report.groups
        ]
    asked.progress(f"{whole.name}: the whole")
    dtypes = list(whole.dtypes) if asked.dtype is None else [asked.dtype]
    groups += composition_groups(whole, dtypes, asked.quick, asked.seed, asked.budget_s, spec)
    return CheckReport(whole.name, asked.seed, asked.quick, str(asked.place), tuple(groups))


def is_triton(implementation: str) -> bool:
    """Return whether an implementation can run under Triton's interpreter, judged by its name."""
    return implementation.startswith("triton")

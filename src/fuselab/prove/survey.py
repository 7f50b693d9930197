"""``fuselab bench --survey``: where ``auto`` wins and where it loses, over an operator's space.

Each point is timed as a case of ``bench`` is, right before fast, interleaved, on the device and on
the host. On CUDA the calls are captured in graphs, so that no launch gap counts. torch.compile
compiles the reference once with dynamic shapes for all points. With ``worst``, the points where
``auto`` is slower, or may be, are timed again in fresh rounds beside code that torch.compile makes
for their shapes alone; those times are then the ones that count.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fuselab
from fuselab.composition import Composition
from fuselab.device.ceiling import Ceilings, measured_ceilings
from fuselab.device.environment import describe
from fuselab.device.select import select as select_device
from fuselab.errors import ArgumentError, UnknownNameError, summary
from fuselab.measure.machine_state import waiting_share
from fuselab.measure.verdict import LOOKS
from fuselab.op import FusedOp, dtype_name
from fuselab.prove.bench import check_some_run, give_memory_back, notes_on_process
from fuselab.prove.bench_against import ENVIRONMENT
from fuselab.prove.bench_providers import Provider, select
from fuselab.prove.bench_result import Group
from fuselab.prove.bench_run import Run
from fuselab.prove.bench_work import CaseArguments, Work
from fuselab.prove.survey_ahead import compile_ahead
from fuselab.prove.survey_result import Survey, Surveyed, survey_from
from fuselab.prove.survey_space import Space, SurveyPoint, point_of
from fuselab.report import files
from fuselab.runtime import dispatch, fallback, surveyed_choice

POINTS = 40
BUDGET_S = 0.4
FILE = "survey.json"
_AGAIN_BUDGET = 3  # times the budget of a point that is timed again
_AGAIN_SEED = 1_000_003  # its rounds have another order
# Every activation, dtype, layout and number of dimensions compiles anew; beyond a limit
# torch.compile would run eagerly.
_RECOMPILATIONS = 100_000
_SOURCES = ("*.py", "*.cpp", "*.cu", "*.h")
_ROOMS = ("measure", "ops", "prove", "runtime")


def survey(
    subject: FusedOp | Composition,
    *,
    points: int = POINTS,
    only: Sequence[int] | None = None,
    seed: int = 0,
    backward: bool = False,
    worst: bool = False,
    providers: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | str = "auto",
    budget_s: float | None = None,
    folder: Path | None = None,
    named: str | None = None,
    ahead: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Survey:
    """Time ``auto`` and every implementation beside eager and torch.compile at points drawn from
    the operator's space; of a composition, its function ``fused``.

    Args:
        points: how many, those with the numbers from 0; ``only`` gives numbers instead.
        seed: of the points, and of the order of the rounds.
        backward: time forward+backward too.
        worst: time the points where ``auto`` is slower, or may be, again.
        providers: names of those to time beside eager; the default is torch.compile, the
            implementations for this device, and ``auto``, which is always among them.
        dtypes: the default is all of ``op.dtypes``, without float64 where there are others.
        budget_s: seconds for a point and phase; default 0.4, and three times that where a point is
            timed again.
        folder: keeps the survey in ``survey.json``, written after every point; one that is there is
            continued.
        named: how commands name the operator; the default is its name.
        ahead: so many processes compile for the points before the first is timed; they load the
            operator by ``named``.
        progress: called with a line before each point.

    Raises:
        ArgumentError: ``points`` or the budget is not above 0, a number is negative, ``backward``
            is asked of an operator without a gradient, or the folder holds another survey.
        UnknownNameError: ``op`` does not have a provider or dtype.
        DeviceError: the device is not there, or no provider runs on it.
        OutputError: the folder cannot be written to.
    """
    op = subject.as_operator() if isinstance(subject, Composition) else subject
    judged = "fused" if isinstance(subject, Composition) else "auto"
    where = device if isinstance(device, torch.device) else select_device(device)
    numbers = _numbers(points, only)
    budget_s = BUDGET_S if budget_s is None else budget_s
    _refuse(op, budget_s, backward, dtypes)
    check_some_run(op, providers, where)
    chosen = _providers(op, providers, where, judged)
    space = Space.of(op, where, dtypes)
    found = Survey(
        operator=op.name,
        named=named or op.name,
        subject=judged,
        environment=describe(where),
        made_of=_made_of(op, where, seed, backward, providers, dtypes, space),
        points=[],
        notes=(),
    )
    phases = ("forward", "forward+backward") if backward else ("forward",)
    fallback.forget()

    def done(surveyed: Surveyed) -> None:
        nonlocal found
        notes = notes_on_process(where, waited())
        found = replace(found.with_point(surveyed), notes=notes)
        if folder is not None:
            files.write_json(folder / FILE, found.to_json())

    with _place(folder), waiting_share() as waited:
        if folder is not None:
            found = _continued(folder, found)
        timing = _Timing(op, judged, where, chosen, measured_ceilings(where), budget_s, seed)
        kept = {point.index for point in found.points}
        left = [number for number in numbers if number not in kept]
        if ahead and named is not None:
            asked = {
                "named": named,
                "seed": seed,
                "backward": backward,
                "providers": providers,
                "dtypes": [dtype_name(dtype) for dtype in dtypes] if dtypes else None,
                "device": str(where),
            }
            compile_ahead(asked, left, ahead, progress)
        with _compiling_once():
            for number in left:
                point = point_of(op, space, seed, number)
                progress(f"{op.short_name}: point {number}, {point.title}")
                done(timing.surveyed(point, phases))
        for surveyed in found.points if worst else ():
            again = timing.again(surveyed, space, progress)
            if again is not None:
                done(again)
    return found


def calls_of(
    subject: FusedOp | Composition,
    numbers: Sequence[int],
    seed: int,
    phases: Sequence[str],
    providers: Sequence[str] | None,
    dtypes: Sequence[torch.dtype] | None,
    device: torch.device,
) -> Iterator[Callable[[], Any]]:
    """Yield a call of every provider at every point and phase, as they are timed; points that the
    operator refuses have none."""
    op = subject.as_operator() if isinstance(subject, Composition) else subject
    judged = "fused" if isinstance(subject, Composition) else "auto"
    chosen = _providers(op, providers, device, judged)
    space = Space.of(op, device, dtypes)
    timing = _Timing(op, judged, device, chosen, measured_ceilings(device), BUDGET_S, seed)
    with _compiling_once():
        for number in numbers:
            point = point_of(op, space, seed, number)
            made = CaseArguments(op, point.case, device, point.dtype)
            for phase in phases:
                try:
                    work = Work(op, point.case, device, point.dtype, phase, made)
                except Exception:  # the reference may raise anything
                    break
                run = timing.run(work, again=False)
                run.prepare()
                yield from (calls.timed for calls in run.calls.values())
                del work, run
                give_memory_back(device)


class _Timing:
    """The timing of one operator's points on one device."""

    def __init__(
        self,
        op: FusedOp,
        subject: str,
        device: torch.device,
        providers: Sequence[Provider],
        ceilings: Ceilings,
        budget_s: float,
        seed: int,
    ) -> None:
        self.op, self.subject, self.device, self.ceilings = op, subject, device, ceilings
        self.budget_s, self.seed = budget_s, seed
        self.static = providers
        self.dynamic = [_dynamic(op) if one.name == "compile" else one for one in providers]

    def surveyed(self, point: SurveyPoint, phases: Sequence[str]) -> Surveyed:
        """Time a point in every phase; where the operator refuses the call, say why."""
        facts = point.index, point.case.name, dtype_name(point.dtype), point.moved_bytes
        made = CaseArguments(self.op, point.case, self.device, point.dtype)
        groups, takes = [], {}
        like: tuple[str, Sequence[int]] = ("", ())
        for phase in phases:
            try:
                work = Work(self.op, point.case, self.device, point.dtype, phase, made)
            except Exception as error:  # the reference may raise anything
                return Surveyed(*facts, refused=summary(error))
            like = (
                surveyed_choice.form_of(work.args),
                tuple(surveyed_choice.sizes_of(work.args)),
            )
            if self.subject == "auto":
                takes[phase] = dispatch.choose(self.op, work.args)
            groups.append(self._group(work, again=False))
            del work
            give_memory_back(self.device)
        return Surveyed(*facts, tuple(groups), (), takes, *like)

    def again(
        self, surveyed: Surveyed, space: Space, progress: Callable[[str], None]
    ) -> Surveyed | None:
        """Time those phases of a point again in which ``auto`` may be slower; None if there are
        none."""
        judged = [one for one in surveyed.judged(self.subject) if one.may_lose and not one.is_again]
        if not judged:
            return None
        point = point_of(self.op, space, self.seed, surveyed.index)
        made = CaseArguments(self.op, point.case, self.device, point.dtype)
        groups = []
        for phase in (one.group.phase for one in judged):
            progress(f"{self.op.short_name}: point {point.index} again, {point.title}, {phase}")
            work = Work(self.op, point.case, self.device, point.dtype, phase, made)
            groups.append(self._group(work, again=True))
            del work
            give_memory_back(self.device)
        return replace(surveyed, again=(*surveyed.again, *groups))

    def run(self, work: Work, again: bool) -> Run:
        """Return the run that times a call of the point; with ``again``, longer, by another seed
        and beside code that torch.compile makes for its shapes alone."""
        return Run(
            work,
            self.static if again else self.dynamic,
            self.ceilings,
            self.budget_s * (_AGAIN_BUDGET if again else 1),
            self.seed + (_AGAIN_SEED if again else 0),
            energy=False,
            captured=self.device.type == "cuda",
            fewest=LOOKS[0],
        )

    def _group(self, work: Work, again: bool) -> Group:
        run = self.run(work, again)
        with fallback.strict(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._inductor")  # advice on a reference
            if again:
                group = run.group()
            else:
                run.prepare()
                group = run.timed()
        self.ceilings = run.ceilings
        return group


def _refuse(
    op: FusedOp, budget_s: float, backward: bool, dtypes: Sequence[torch.dtype] | None
) -> None:
    """Raise ArgumentError or UnknownNameError for what the operator or a survey cannot do."""
    if budget_s <= 0:
        raise ArgumentError(f"the budget is {budget_s} s; it must be above 0.")
    if backward and op.gradient is None:
        raise ArgumentError(f"{op.short_name} defines no gradient; leave out the backward.")
    for dtype in dtypes or ():
        if dtype not in op.dtypes:
            raise UnknownNameError("dtype", dtype_name(dtype), map(dtype_name, op.dtypes))


def _numbers(points: int, only: Sequence[int] | None) -> Sequence[int]:
    if only is None:
        if points < 1:
            raise ArgumentError(f"a survey of {points} points has nothing to time; ask for 1.")
        return range(points)
    for number in only:
        if number < 0:
            raise ArgumentError(f"there is no point {number}; points are numbered from 0.")
    return sorted(set(only))


def _providers(
    op: FusedOp, names: Sequence[str] | None, device: torch.device, subject: str
) -> Sequence[Provider]:
    """Return the providers to time, the subject among them; it is none of its own peers."""
    if names is None:
        ours = (name for name, one in op.implementations.items() if one.device == device.type)
        names = ["compile", *ours]
    return [
        replace(one, kind="auto") if one.name == subject else one
        for one in select(op, [*names, subject])
    ]


def _dynamic(op: FusedOp) -> Provider:
    """Return torch.compile with dynamic shapes; all points call the same compiled function."""
    compiled = torch.compile(op.drawing or op.reference, dynamic=True)
    compared = op.drawing is None
    return Provider("compile", "compile", lambda args: (compiled, args), is_compared=compared)


@contextmanager
def _compiling_once() -> Iterator[None]:
    """Let torch.compile keep as many graphs as the points need, and forget them afterwards."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        recompile_limit=_RECOMPILATIONS, accumulated_recompile_limit=_RECOMPILATIONS
    ):
        yield
    torch._dynamo.reset()


@contextmanager
def _place(folder: Path | None) -> Iterator[None]:
    if folder is None:
        yield
        return
    with files.folder_for_results(folder):
        yield


def _made_of(
    op: FusedOp,
    device: torch.device,
    seed: int,
    backward: bool,
    providers: Sequence[str] | None,
    dtypes: Sequence[torch.dtype] | None,
    space: Space,
) -> dict[str, Any]:
    environment = describe(device)
    return {
        "operator": op.name,
        "seed": seed,
        "backward": backward,
        "dtypes": [dtype_name(dtype) for dtype in space.dtypes],
        "asked_dtypes": [dtype_name(dtype) for dtype in dtypes] if dtypes else None,
        "asked_providers": list(providers) if providers is not None else None,
        "most_bytes": int(space.most_bytes),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        **{key: environment[key] for key in ENVIRONMENT},
        "sources": _sources(op),
    }


def _sources(op: FusedOp) -> str:
    """Return a hash of the files that decide a time: those of the rooms that hold, run and time
    operators, and of the folder of one from elsewhere."""
    package = Path(fuselab.__file__).parent
    folders = [package / room for room in _ROOMS]
    own = Path(inspect.getfile(inspect.unwrap(op.reference)))
    inside = own.is_relative_to(package)
    found = [] if inside else [own, *(one for kind in _SOURCES for one in own.parent.glob(kind))]
    found += [one for folder in folders for kind in _SOURCES for one in folder.rglob(kind)]
    digest = hashlib.sha256()
    for file in sorted(set(found)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _continued(folder: Path, fresh: Survey) -> Survey:
    """Return the survey in a folder, or ``fresh`` where there is none. Raises ArgumentError for one
    that was made of something else."""
    file = folder / FILE
    if not file.exists():
        return fresh
    try:
        payload = json.loads(file.read_text(encoding="utf-8"))
        kept = survey_from(payload)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"{file} is no survey that can be continued ({type(error).__name__}); give another "
            "folder."
        ) from error
    for key, now in fresh.made_of.items():
        then = kept.made_of.get(key)
        if then != now:
            raise ArgumentError(
                f"{folder} holds a survey made with {key.replace('_', ' ')} {_said(then)}, not "
                f"{_said(now)}; give another folder."
            )
    return replace(fresh, points=kept.points)


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

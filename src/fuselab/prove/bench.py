"""``fuselab.bench``: how fast every provider of an operator is, and how far from the ceiling."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fuselab.device.ceiling import measured_ceilings
from fuselab.device.environment import describe
from fuselab.device.select import select as select_device
from fuselab.errors import ArgumentError, DeviceError, FuselabError, UnknownNameError
from fuselab.measure.fresh import allocation_is_pinned
from fuselab.measure.machine_state import waiting_share
from fuselab.op import Case, FusedOp, dtype_name
from fuselab.prove.bench_providers import select
from fuselab.prove.bench_result import Bench
from fuselab.prove.bench_run import Run
from fuselab.prove.bench_work import PHASES, SEED, CaseArguments, Work
from fuselab.report.busy_text import busy_sentence
from fuselab.runtime import fallback

BUDGET_S = 3.0
QUICK_BUDGET_S = 0.6
QUICK_CASES = 3
# A case needs about ten times its bytes: inputs, a second set, float64 copies and their
# intermediates. With a backward it needs more, because what every provider saved for its backward
# is alive at the same time.
MEMORY_FACTOR = 10
MEMORY_FACTOR_BACKWARD = 20


def bench(
    op: FusedOp,
    *,
    providers: Sequence[str] | None = None,
    cases: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    backward: bool = False,
    device: torch.device | str = "auto",
    budget_s: float | None = None,
    quick: bool = False,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Bench:
    """Time every provider of ``op`` on its cases: cold-cache device time, interleaved, verified.

    ``cases`` are names; the default is those tagged ``bench`` that fit this device, and three of
    them with ``quick``. ``dtypes`` defaults to the first of ``op.dtypes``. ``backward`` adds the
    backward alone and forward+backward. ``budget_s`` is the time in seconds for one case and phase
    (default 3, with ``quick`` 0.6); a verdict that needs more rounds than that is UNCLEAR. Energy
    is measured on CUDA, unless ``quick``. ``progress`` is called with a line of text before each
    group.

    On the CPU, memory allocation biases timings unless the process was started with the allocator's
    thresholds pinned (``fuselab.measure.fresh``). The command line pins them; a result measured
    without them says so in its notes.

    Raises UnknownNameError for a provider, case or dtype that ``op`` does not have; DeviceError if
    the device is not there, or everything asked for beside eager runs on another one; ArgumentError
    if ``backward`` is asked of an operator without a gradient, or the budget is not above 0.
    """
    where = device if isinstance(device, torch.device) else select_device(device)
    chosen = select(op, providers)
    check_some_run(op, providers, where)
    if backward and op.gradient is None:
        raise ArgumentError(f"{op.short_name} defines no gradient; leave out the backward.")
    budget_s = budget_s if budget_s is not None else QUICK_BUDGET_S if quick else BUDGET_S
    if budget_s <= 0:
        raise ArgumentError(f"the budget is {budget_s} s; it must be above 0.")
    dtypes = tuple(dtypes or op.dtypes[:1])
    for dtype in dtypes:
        if dtype not in op.dtypes:
            raise UnknownNameError("dtype", dtype_name(dtype), map(dtype_name, op.dtypes))
    memory_factor = MEMORY_FACTOR_BACKWARD if backward else MEMORY_FACTOR
    skipped: list[str] = []
    groups = []
    ceilings = measured_ceilings(where)
    # an implementation that failed to build earlier must fail here, not fall back
    fallback.forget()
    with waiting_share() as waited:
        for dtype in dtypes:
            for case in fitting_cases(op, cases, where, dtype, quick, memory_factor, skipped):
                made = CaseArguments(op, case, where, dtype)
                for phase in PHASES if backward else PHASES[:1]:
                    progress(f"{op.short_name}: {case.name}, {dtype_name(dtype)}, {phase}")
                    with fallback.strict():
                        work = Work(op, case, where, dtype, phase, made)
                        run = Run(work, chosen, ceilings, budget_s, seed, energy=not quick)
                        groups.append(run.group())
                    ceilings = run.ceilings
                    del work, run
                    give_memory_back(where)
                del made
    return Bench(
        operator=op.name,
        environment=describe(where),
        settings={
            "providers": providers,
            "cases": cases,
            "dtypes": [dtype_name(dtype) for dtype in dtypes],
            "backward": backward,
            "quick": quick,
            "budget_s": budget_s,
            "seed": seed,
        },
        ceilings=asdict(ceilings),
        groups=groups,
        skipped=skipped,
        notes=notes_on_process(where, waited()),
    )


def check_some_run(op: FusedOp, asked: Sequence[str] | None, device: torch.device) -> None:
    """Raise DeviceError if every provider asked for, beside eager, runs on other devices."""
    wanted = set(asked or ()) - {"eager"}
    devices = {op.implementations[name].device for name in wanted & set(op.implementations)}
    if wanted and wanted <= set(op.implementations) and device.type not in devices:
        raise DeviceError(
            f"{', '.join(sorted(wanted))} of {op.short_name} would run on "
            f"{', '.join(sorted(devices))}, and the device is {device}; ask for others, such as "
            "auto."
        )


def give_memory_back(device: torch.device) -> None:
    """Free a case's tensors, which its calls and its bar hold in reference cycles.

    On CUDA, also free their cached blocks, because no other size reuses them and the next case may
    need all of the memory.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def notes_on_process(device: torch.device, waited_share: float) -> list[str]:
    """Return notes about this process and machine that a reader of CPU times must know, after
    timings in which the process waited for a core for ``waited_share`` of its time."""
    notes = []
    if device.type == "cpu" and not allocation_is_pinned():
        notes.append(
            "allocation was not pinned, so page faults of fresh memory are part of the times; "
            "`fuselab bench` pins it, in Python start with "
            "MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296."
        )
    busy = busy_sentence(waited_share) if device.type == "cpu" else None
    return [*notes, f"{busy}."] if busy is not None else notes


def fitting_cases(
    op: FusedOp,
    names: Sequence[str] | None,
    device: torch.device,
    dtype: torch.dtype,
    quick: bool,
    memory_factor: int,
    skipped: list[str],
) -> list[Case]:
    """Return the cases to time; each case that does not fit into memory adds a line to
    ``skipped``."""
    known = {case.name: case for case in op.cases}
    for name in names or ():
        if name not in known:
            raise UnknownNameError("case", name, known)
    if names is not None:
        wanted = [known[name] for name in names]
    else:
        wanted = [case for case in op.cases if "bench" in case.tags] or [op.cases[0]]
    fitting = []
    for case in wanted:
        reason = _no_room(op, case, device, dtype, memory_factor)
        if reason is None:
            fitting.append(case)
        else:
            skipped.append(f"{case.name}, {dtype_name(dtype)}: {reason}")
    if quick and names is None and len(fitting) > QUICK_CASES:
        step = (len(fitting) - 1) / (QUICK_CASES - 1)
        fitting = [fitting[round(index * step)] for index in range(QUICK_CASES)]
    return fitting


def _no_room(
    op: FusedOp, case: Case, device: torch.device, dtype: torch.dtype, memory_factor: int
) -> str | None:
    if "huge" in case.tags and device.type != "cuda":
        return "a huge case, timed on CUDA only"
    generator = torch.Generator().manual_seed(SEED)
    try:
        with FakeTensorMode():
            needed = op.cost(*op.bind(case.make(device, dtype, generator))).bytes_moved
    except FuselabError:
        raise
    # if making the case reads tensor values, its size is unknown before it is made
    except Exception:
        return None
    room = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    )
    if memory_factor * needed <= room:
        return None
    return (
        f"needs about {memory_factor * needed / 2**30:.1f} GiB to be timed and verified, "
        f"{room / 2**30:.1f} GiB are free for it"
    )

"""One kernel under NVIDIA Nsight Compute: its counters as a few figures, and what they advise.

``ncu`` runs a child process that makes one step of a TARGET, replays the kernel asked for, and
keeps its report file. The file's raw page, printed as CSV in base units, is read here; NVIDIA
documents the names of the metrics. ``profile`` puts its own count of the bytes beside the counters.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from pathlib import Path

from fuselab.errors import DeviceError, MissingDependencyError, TargetError
from fuselab.inspect.targets import Target
from fuselab.inspect.user_code import plain
from fuselab.measure.fresh import child_environment

TIMEOUT_S = 600.0
STALLS = 4  # the reasons for waiting that are shown, the longest first

_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
_LIMITS = {
    "launch__occupancy_limit_registers": "registers",
    "launch__occupancy_limit_shared_mem": "shared memory",
    "launch__occupancy_limit_warps": "warps",
    "launch__occupancy_limit_blocks": "blocks",
}


@dataclass(frozen=True)
class Limit:
    """How many blocks of the kernel one resource lets reside on a multiprocessor."""

    resource: str
    blocks: int


@dataclass(frozen=True)
class Hint:
    """Advice from the counters, with how to follow it in each language."""

    seen: str
    triton: str
    cuda: str


@dataclass(frozen=True)
class KernelReport:
    """The counters of one launch. Shares are of the device's peak, between 0 and 1; None means that
    the report has no such counter.

    ``waves`` is the grid over what the device holds at once; ``tail_share`` is the share of the
    last wave's places that stay empty. ``occupancy_asked`` is what the resources allow,
    ``occupancy_reached`` what was measured. ``sectors`` are 32-byte sectors per request of a warp:
    4 is ideal for 4-byte elements. ``active_threads`` of 32 is what padding and divergence leave.
    ``stalls`` are the cycles that a warp waits for each reason per instruction that it issues.
    """

    name: str
    us: float | None
    grid: int | None
    block: int | None
    dram_share: float | None
    l2_share: float | None
    sm_share: float | None
    bytes_read: float | None
    bytes_written: float | None
    multiprocessors: int | None
    waves: float | None
    tail_share: float | None
    occupancy_asked: float | None
    occupancy_reached: float | None
    limits: tuple[Limit, ...]
    registers: int | None
    shared_bytes: float | None
    load_sectors: float | None
    store_sectors: float | None
    bank_conflicts: float | None
    active_threads: float | None
    stalls: tuple[tuple[str, float], ...]
    hints: tuple[Hint, ...] = field(default=())


# --- running ncu ---------------------------------------------------------------------------------


def path_of_ncu() -> Path:
    """Return the path of ncu. Raises MissingDependencyError."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    folders += [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin", "/usr/local/cuda/bin"]
    found = shutil.which("ncu", path=os.pathsep.join(folders))
    if found is None:
        raise MissingDependencyError(
            "ncu is in none of the PATH and CUDA_HOME: install NVIDIA Nsight Compute (it comes "
            "with the CUDA toolkit); 'fuselab asm' tells registers, occupancy and coalescing "
            "without it."
        )
    return Path(found)


def profile_kernel(
    target: Target, kernel: str, report: Path, *, backward: bool = False
) -> list[KernelReport]:
    """Run one step of a TARGET under ncu and return a report of each different kernel that matches.

    ``kernel`` is a regular expression that its name contains. The .ncu-rep is kept at ``report``.
    Raises DeviceError without an NVIDIA GPU, MissingDependencyError without ncu, TargetError if no
    kernel matches or ncu fails, for example where the driver keeps the counters to administrators.
    """
    if target.device.type != "cuda":
        raise DeviceError("--ncu reads the counters of an NVIDIA GPU, and the target runs on none.")
    ncu = str(path_of_ncu())
    words = [target.spec, str(target.device), target.data or "", "1" if backward else ""]
    child = [sys.executable, "-m", "fuselab.inspect.ncu_runner", *words]
    said = _run(
        [
            ncu,
            "--set=full",
            "--clock-control=none",
            "--profile-from-start=off",
            "--target-processes=all",
            "--kernel-name-base=demangled",
            f"--kernel-name=regex:.*({kernel}).*",
            "--force-overwrite",
            f"--export={report}",
            *child,
        ]
    )
    if not report.is_file():
        raise TargetError(_why_nothing(kernel, said))
    printed = _run([ncu, "--import", str(report), "--page=raw", "--csv", "--print-units=base"])
    return read_raw_page(printed)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command,
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TargetError(f"ncu took longer than {TIMEOUT_S:.0f} s; name fewer kernels.") from error
    return done.stdout


def _why_nothing(kernel: str, said: str) -> str:
    if "ERR_NVGPUCTRPERM" in said:
        return (
            "the driver keeps its counters to administrators (ERR_NVGPUCTRPERM): run as root, or "
            "load the driver with NVreg_RestrictProfilingToAdminUsers=0."
        )
    errors = [line for line in said.splitlines() if line.startswith("==ERROR==")]
    if errors:
        return f"ncu failed: {plain(errors[0].removeprefix('==ERROR=='))}"
    return (
        f"no kernel of the step matches '{plain(kernel)}'; the table 'By kernel' of fuselab "
        "profile has their names."
    )


# --- reading the raw page ------------------------------------------------------------------------


def read_raw_page(text: str) -> list[KernelReport]:
    """Return a report per different kernel of a raw page that ncu printed as CSV in base units.

    The first line names the columns, the second their units, and each further line is one launch.
    Of launches of one kernel with one grid and block the first is taken. Raises TargetError for
    another text.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    if len(rows) < 3 or "Kernel Name" not in rows[0]:
        first = next((line for line in text.splitlines() if line.strip()), "nothing")
        raise TargetError(f"ncu printed no raw page of a report, but: {plain(first, 120)}.")
    names, units, *launches = rows
    found: dict[tuple[object, ...], KernelReport] = {}
    for launch in launches:
        values = _values(names, units, launch)
        report = _report(dict(zip(names, launch, strict=False)).get("Kernel Name", ""), values)
        found.setdefault((report.name, report.grid, report.block), report)
    return list(found.values())


_TO_BASE = {"us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}
_TO_BASE |= {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Kbyte/block": 1e3, "byte/block": 1.0}


def _values(names: Sequence[str], units: Sequence[str], launch: Sequence[str]) -> dict[str, float]:
    """Return the numbers of a launch: times in nanoseconds, sizes in bytes."""
    found = {}
    for name, unit, text in zip(names, units, launch, strict=False):
        try:
            found[name] = float(text.replace(",", "")) * _TO_BASE.get(unit, 1.0)
        except ValueError:  # text, n/a or empty
            continue
    return found


def _report(name: str, values: Mapping[str, float]) -> KernelReport:
    def first(*metrics: str) -> float | None:
        return next((values[metric] for metric in metrics if metric in values), None)

    def whole(*metrics: str) -> int | None:
        value = first(*metrics)
        return None if value is None else round(value)

    def percent(*metrics: str) -> float | None:
        value = first(*metrics)
        return None if value is None else value / 100

    def ratio(over: str, under: str) -> float | None:
        above, below = first(over), first(under)
        return above / below if above is not None and below else None

    peak = "pct_of_peak_sustained_elapsed"
    ns = first("gpu__time_duration.sum", "gpu__time_duration_measured_user")
    waves = first("launch__waves_per_multiprocessor")
    limits = tuple(
        Limit(resource, round(values[metric]))
        for metric, resource in _LIMITS.items()
        if metric in values
    )
    shared = first("launch__shared_mem_per_block")
    if shared is None:
        parts = [first(f"launch__shared_mem_per_block_{kind}") for kind in ("static", "dynamic")]
        shared = sum(part for part in parts if part is not None) if any(parts) else None
    conflicts = [
        first(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{kind}.sum")
        for kind in ("ld", "st")
    ]
    memory = "l1tex__t_{}_pipe_lsu_mem_global_op_{}.sum"
    stalls = sorted(
        ((found[1], value) for key, value in values.items() if (found := _STALL.fullmatch(key))),
        key=lambda stall: -stall[1],
    )
    report = KernelReport(
        name=plain(name),
        us=None if ns is None else ns / 1e3,
        grid=whole("launch__grid_size"),
        block=whole("launch__block_size"),
        dram_share=percent(f"gpu__dram_throughput.avg.{peak}", f"dram__throughput.avg.{peak}"),
        l2_share=percent(f"lts__throughput.avg.{peak}", f"lts__t_sectors.avg.{peak}"),
        sm_share=percent(f"sm__throughput.avg.{peak}"),
        bytes_read=first("dram__bytes_read.sum"),
        bytes_written=first("dram__bytes_write.sum"),
        multiprocessors=whole("device__attribute_multiprocessor_count", "launch__sm_count"),
        waves=waves,
        tail_share=None if not waves else (ceil(waves) - waves) / ceil(waves),
        occupancy_asked=percent("sm__maximum_warps_per_active_cycle_pct"),
        occupancy_reached=percent("sm__warps_active.avg.pct_of_peak_sustained_active"),
        limits=limits,
        registers=whole("launch__registers_per_thread"),
        shared_bytes=shared,
        load_sectors=ratio(memory.format("sectors", "ld"), memory.format("requests", "ld")),
        store_sectors=ratio(memory.format("sectors", "st"), memory.format("requests", "st")),
        bank_conflicts=sum(c for c in conflicts if c is not None)
        if any(c is not None for c in conflicts)
        else None,
        active_threads=first("smsp__thread_inst_executed_per_inst_executed.ratio"),
        stalls=tuple(stalls[:STALLS]),
    )
    return _with_hints(report)


# --- what it advises -----------------------------------------------------------------------------

BUSY = 0.8  # a unit above this share of its peak is what holds the kernel
IDLE = 0.6  # below this share of every unit nothing holds it but waiting
TAIL = 0.2  # a tail that costs less is not worth a word
GAP = 0.15  # occupancy reached this much below what is asked for
SECTORS = 8.0  # twice what 4-byte elements need
CONFLICTS = 1000
ACTIVE = 28.0  # of the 32 threads of a warp


def _with_hints(report: KernelReport) -> KernelReport:
    hints = [hint for rule in _RULES if (hint := rule(report)) is not None]
    return KernelReport(**{**vars(report), "hints": tuple(hints)})


def _at_its_limit(report: KernelReport) -> Hint | None:
    units = {
        "DRAM": report.dram_share,
        "L2": report.l2_share,
        "the multiprocessors": report.sm_share,
    }
    busy = {name: share for name, share in units.items() if share is not None and share >= BUSY}
    if not busy:
        return None
    name = max(busy, key=lambda unit: busy[unit])
    return Hint(
        f"{name} runs at {busy[name]:.0%} of its peak: the kernel is as fast as its work allows",
        "move or compute less: fuse it with its neighbours, or store in 16 bits",
        "move or compute less: fuse it with its neighbours, or store in 16 bits",
    )


def _waiting(report: KernelReport) -> Hint | None:
    shares = [s for s in (report.dram_share, report.l2_share, report.sm_share) if s is not None]
    if not shares or max(shares) >= IDLE or not report.stalls:
        return None
    reason, cycles = report.stalls[0]
    if reason in ("long_scoreboard", "lg_throttle"):
        return Hint(
            f"no unit is above {max(shares):.0%}: warps wait {cycles:.3g} cycles per instruction "
            "for global memory",
            "give each program more independent loads: num_stages, a larger block, or more warps",
            "load 16 bytes per thread, issue several loads before the first use, or use cp.async",
        )
    if reason in ("barrier", "membar"):
        return Hint(
            f"warps wait {cycles:.3g} cycles per instruction at barriers",
            "use fewer warps per program, so that a reduction crosses fewer of them",
            "reduce inside a warp by shuffles first, and synchronise once",
        )
    if reason in ("short_scoreboard", "mio_throttle"):
        return Hint(
            f"warps wait {cycles:.3g} cycles per instruction for shared memory or special "
            "functions",
            "avoid layout conversions between loads and dots; use fewer exp and division",
            "read shared memory in 16-byte pieces, keep values in registers, use fast intrinsics",
        )
    return None


def _tail(report: KernelReport) -> Hint | None:
    if report.waves is None or report.tail_share is None:
        return None
    if report.waves < 1:
        return Hint(
            f"the grid fills {report.waves:.0%} of the places for blocks: multiprocessors stay "
            "empty",
            "take smaller blocks, or split the reduced dimension over programs",
            "take smaller blocks, or split the reduced dimension over blocks",
        )
    cost = report.tail_share / ceil(report.waves)
    if floor(report.waves) == report.waves or cost < TAIL / 2 or report.tail_share < TAIL:
        return None
    return Hint(
        f"{report.waves:.3g} waves: {report.tail_share:.0%} of the last one's places stay empty",
        "run a persistent grid (as many programs as fit, each looping), or another block size",
        "run a persistent grid with a grid-stride loop, or another block size",
    )


def _occupancy(report: KernelReport) -> Hint | None:
    asked, reached = report.occupancy_asked, report.occupancy_reached
    if asked is None or reached is None:
        return None
    if asked - reached >= GAP:
        return Hint(
            f"{asked:.0%} occupancy is allowed and {reached:.0%} reached: blocks are too few or "
            "end at different times",
            "even out the work of programs, or run more of them",
            "even out the work of blocks, or run more of them",
        )
    tight = min(report.limits, key=lambda limit: limit.blocks, default=None)
    if asked >= 0.5 or tight is None:
        return None
    return Hint(
        f"{tight.resource} hold occupancy at {asked:.0%}: {tight.blocks} block"
        f"{'s' if tight.blocks != 1 else ''} per multiprocessor",
        "fewer num_stages or a smaller block for shared memory; more num_warps for registers",
        "__launch_bounds__ or smaller tiles for registers; smaller buffers for shared memory",
    )


def _coalescing(report: KernelReport) -> Hint | None:
    worst = max(report.load_sectors or 0.0, report.store_sectors or 0.0)
    if worst <= SECTORS:
        return None
    return Hint(
        f"a warp's access touches {worst:.3g} sectors of 32 bytes; 4 suffice for 4-byte elements "
        "side by side",
        "let the last dimension of offsets run along memory, and say tl.multiple_of where it holds",
        "let threadIdx.x run along memory, or bring a tile through shared memory",
    )


def _conflicts(report: KernelReport) -> Hint | None:
    if report.bank_conflicts is None or report.bank_conflicts < CONFLICTS:
        return None
    return Hint(
        f"{report.bank_conflicts:,.0f} bank conflicts in shared memory",
        "change the block's shape or num_warps: Triton chooses the layout from them",
        "pad rows by one element, or swizzle the index",
    )


def _padding(report: KernelReport) -> Hint | None:
    if report.active_threads is None or report.active_threads >= ACTIVE:
        return None
    return Hint(
        f"{report.active_threads:.3g} of the 32 threads of a warp do work on average: the others "
        "are masked off or in another branch",
        "take a block size that divides the row, or handle several rows per program",
        "take a block size that divides the row, and keep branches the same within a warp",
    )


_RULES = (_at_its_limit, _waiting, _tail, _occupancy, _coalescing, _conflicts, _padding)

"""Hardware counters of an operator's kernels, to see why it is slower than its floor.

    python tools/counters.py "softmax 1024x262144 bfloat16 cuda backward" ["OP CASE DTYPE IMPL ..."]

The script runs itself under Nsight Compute (``ncu`` must be on the PATH) and prints a line per
kernel: its time, the bytes it read from and wrote to memory, how busy memory, the multiprocessors
and the matrix units were (percent of their peak), L2 hits, warps resident (percent of what fits),
registers and the three reasons for which its warps waited most. A work is
``OP CASE DTYPE IMPLEMENTATION``, with ``_`` for a case's spaces, and ``backward`` for the kernels
of forward and backward.

Caches are flushed before every kernel and clocks are not locked. The times are only for
orientation, because counting serialises launches; ``fuselab bench`` measures times.
"""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys

import torch

from fuselab import ops
from fuselab.prove.arguments import differentiable
from fuselab.prove.asked_calls import with_gradients
from fuselab.prove.held import Held

SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "ComputeWorkloadAnalysis",
    "Occupancy",
    "LaunchStats",
    "WarpStateStats",
)
MARKER = "spin"  # the kernel of torch.cuda._sleep, which separates one work from the next
INSIDE = "FUSELAB_COUNTERS_INSIDE"
STALL = re.compile(r"issue_stalled_(\w+?)_per_(?:warp_active|issue_active)")


def launch(work: str) -> None:
    """Make warm calls of the work, then one inside the profiler's range, after a marker."""
    name, case_name, dtype, implementation, *backward = work.split()
    op = ops.contract(name)
    device = torch.device("cuda", 0)
    held = Held(op, implementation)
    case = next(case for case in op.cases if case.name.replace(" ", "_") == case_name)
    args = op.bind(case.make(device, getattr(torch, dtype), torch.Generator().manual_seed(0)))
    places = differentiable(op, args) if backward else []
    upstream = torch.ones_like(held.public(*args)) if places else None

    def call() -> None:
        if places:
            with_gradients(held.public, places, [*args, upstream])
        else:
            held.public(*args)

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counted(works: list[str]) -> list[dict[str, str]]:
    """Return the rows of ncu's table, one per kernel, including the markers."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    ncu = ("ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none")
    moved = ("--metrics", "dram__bytes_read.sum,dram__bytes_write.sum")
    words = (
        *ncu,
        "--profile-from-start",
        "off",
        *sections,
        *moved,
        sys.executable,
        __file__,
        *works,
    )
    ended = subprocess.run(words, env={**os.environ, INSIDE: "1"}, capture_output=True, text=True)
    lines = ended.stdout.splitlines()
    head = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        raise SystemExit(f"ncu counted nothing: {(ended.stdout + ended.stderr)[-2000:]}")
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[head:]))))
    return [row for row in rows if row["ID"]]  # the row of units has none


def number(row: dict[str, str], pattern: str) -> float:
    """Return the largest metric whose name matches; NaN if ncu has none."""
    found = [
        float(value.replace(",", ""))
        for name, value in row.items()
        if name and value and re.search(pattern, name)
    ]
    return max(found, default=float("nan"))


def line(row: dict[str, str]) -> str:
    """Return the line that ``main`` prints for a kernel."""
    stalls = sorted(
        (
            (float(value.replace(",", "")), found.group(1))
            for name, value in row.items()
            if name and value and (found := STALL.search(name)) and "selected" not in found.group(1)
        ),
        reverse=True,
    )
    reasons = ", ".join(f"{reason} {ratio:.1f}" for ratio, reason in largest_of_each(stalls)[:3])
    return (
        f"  {row['Kernel Name'][:44]:44} {number(row, r'^gpu__time_duration.sum') / 1e3:8.1f} us"
        f" {number(row, r'^dram__bytes_read.sum$') / 1e6:8.1f} MB read"
        f" {number(row, r'^dram__bytes_write.sum$') / 1e6:8.1f} MB written"
        f"  memory {number(row, r'dram_+throughput.*pct_of_peak_sustained_elapsed'):4.0f} %"
        f"  SM {number(row, r'^sm__throughput.*pct_of_peak'):4.0f} %"
        f"  matrix {number(row, r'pipe_tensor.*pct_of_peak_sustained_active'):4.0f} %"
        f"  L2 hits {number(row, r'^lts__t_sector_hit_rate'):4.0f} %"
        f"  warps {number(row, r'^sm__warps_active.*pct'):4.0f} %"
        f"  {number(row, r'^launch__registers_per_thread$'):4.0f} registers"
        f"  waits: {reasons}"
    )


def largest_of_each(stalls: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return each reason once, with its largest ratio; ``stalls`` come largest first."""
    largest: dict[str, float] = {}
    for ratio, reason in stalls:
        largest.setdefault(reason, ratio)
    return [(ratio, reason) for reason, ratio in largest.items()]


def main() -> None:
    works = sys.argv[1:]
    if os.environ.get(INSIDE):
        for work in works:
            launch(work)
        return
    titles = iter(works)
    for row in counted(works):
        if MARKER in row["Kernel Name"]:
            print(next(titles))
        else:
            print(line(row))


if __name__ == "__main__":
    main()

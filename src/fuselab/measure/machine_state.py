"""How fast and how busy the machine is: clock, load and waiting, which explain odd timings."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch

BUSY_SHARE = 0.1  # a machine is busy where our threads wait for a core for so much of their time


@dataclass(frozen=True)
class MachineState:
    """The clock of the device in MHz, and how many processes want a core on average over a minute.

    ``waited_share`` is the ``waiting_share`` of what was measured. A figure that the machine does
    not tell is None.
    """

    clock_mhz: float | None
    load: float | None
    cores: int
    waited_share: float | None = None


def machine_state(device: torch.device, waited_share: float | None = None) -> MachineState:
    """Return the state of the machine now; the clock is the GPU's or the mean of the cores'."""
    clock = _gpu_clock(device) if device.type == "cuda" else _cpu_clock()
    try:
        load = round(os.getloadavg()[0], 2)
    except OSError:
        load = None
    return MachineState(clock, load, len(os.sched_getaffinity(0)), waited_share)


@contextlib.contextmanager
def waiting_share() -> Iterator[Callable[[], float]]:
    """Yield a function that returns how much of its time this process has waited for a core.

    It is the share, since the block began, of the time in which a thread of this process could have
    run and another process had the core. It is 0 where Linux does not keep such accounts.
    """
    ran_before, waited_before = _scheduled_ns()

    def share() -> float:
        ran, waited = _scheduled_ns()
        wanted = ran - ran_before + waited - waited_before
        return max(0.0, (waited - waited_before) / wanted) if wanted > 0 else 0.0

    yield share


def _scheduled_ns() -> tuple[int, int]:
    """Return the nanoseconds that this process's threads have run, and have waited for a core."""
    ran = waited = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # a thread that has ended meanwhile
            ran_ns, waited_ns, _ = map(int, file.read_text(encoding="utf-8").split())
            ran, waited = ran + ran_ns, waited + waited_ns
    return ran, waited


def _gpu_clock(device: torch.device) -> float | None:
    try:
        return float(torch.cuda.clock_rate(device))
    # torch asks NVML through a package that need not be installed, and raises what that raises
    except Exception:
        return None


def _cpu_clock() -> float | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    clocks = [float(found) for found in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)]
    return round(mean(clocks)) if clocks else None

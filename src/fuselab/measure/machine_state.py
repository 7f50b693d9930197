"""How fast and how busy the machine is at a moment: clock and load, which explain odd timings."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch


@dataclass(frozen=True)
class MachineState:
    """The clock of the device in MHz, and how many processes want a core on average over a minute.

    A figure that the machine does not tell is None.
    """

    clock_mhz: float | None
    load: float | None
    cores: int


def machine_state(device: torch.device) -> MachineState:
    """Return the state of the machine now; the clock is the GPU's or the mean of the cores'."""
    clock = _gpu_clock(device) if device.type == "cuda" else _cpu_clock()
    try:
        load = round(os.getloadavg()[0], 2)
    except OSError:
        load = None
    return MachineState(clock, load, len(os.sched_getaffinity(0)))


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

"""The environment of a result: device, driver, CPU and versions, as written in every JSON file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import fuselab
from fuselab.device.select import select


def describe(device: torch.device | None = None) -> dict[str, Any]:
    """Return facts about this process and ``device`` as plain JSON values.

    ``device`` None means ``select("auto")``; a fact that does not apply is None. ``cores`` counts
    the logical CPUs that this process may use, ``threads`` those that torch uses.
    """
    device = device or select("auto")
    on_cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_cuda else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(device),
        "device_name": properties.name if properties else cpu_model(),
        "cuda_capability": f"{properties.major}.{properties.minor}" if properties else None,
        "device_memory_bytes": properties.total_memory if properties else None,
        "driver": driver_version() if on_cuda else None,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "fuselab": fuselab.__version__,
    }


def version(distribution: str) -> str | None:
    """Return a package's installed version from its metadata, or None; nothing is imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the CPU's name as the kernel gives it, or the architecture if it gives none (Arm)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def driver_version() -> str | None:
    """Return the NVIDIA driver's version, or None.

    Containers may hide /proc; NVML answers there too.
    """
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return _driver_version_from_nvml()
    match = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, re.MULTILINE)
    return match[1] if match else _driver_version_from_nvml()


def _driver_version_from_nvml() -> str | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None

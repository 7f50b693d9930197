"""Measured best rates of a device: copy bandwidth, matmul rates, launch latency.

This is the only module of ``device`` that imports ``measure`` and ``runtime``, because a ceiling is
timed exactly as the kernels that are compared with it. A busy machine gives too low a ceiling.
Ceilings that were measured on one say so, and are measured again once the machine is quiet; a
ceiling that a kernel exceeds is measured again before the kernel is said to exceed it.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from math import log
from pathlib import Path
from statistics import median
from typing import Literal

import torch

from fuselab.device.environment import cpu_model, driver_version
from fuselab.device.streaming import Streaming, variants
from fuselab.measure.device_timer import timer
from fuselab.measure.host import host_latency_samples_us
from fuselab.measure.machine_state import BUSY_SHARE, machine_state, waiting_share
from fuselab.measure.statistics import significant
from fuselab.measure.timer import Call
from fuselab.runtime import cache

MIB = 1 << 20
COPY_BYTES = {
    "cuda": (1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB, 4096 * MIB),
    "cpu": (1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
}
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
MATMUL_UNITS = {
    "cuda": {
        "fp32": torch.float32,
        "tf32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp64": torch.float64,
    },
    "cpu": {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64},
}
SAMPLES = 9
# A larger share of a ceiling must be explained: by a cache that kept inputs, or by wrong bytes.
HIGHEST_PLAUSIBLE_SHARE = 1.03
WORTH_KEEPING = 1.1  # a better figure by this ratio says that the one before was disturbed


@dataclass(frozen=True)
class Ceilings:
    """Best measured rates of a device.

    ``copy_gbps`` maps bytes moved (half read, half written, as text) to GB/s with a cold cache;
    ``matmul_tflops`` maps an arithmetic unit (``Cost.unit``) to TFLOP/s of the library's square
    matrix product; ``launch_us`` is the host's time for one small PyTorch operator. ``busy`` says
    that other processes held the cores meanwhile, so that the device can do better.
    """

    device: str
    torch: str
    driver: str
    measured: str
    copy_gbps: Mapping[str, float]
    matmul_tflops: Mapping[str, float]
    launch_us: float
    busy: bool = False

    @property
    def best_gbps(self) -> float:
        """The largest copy bandwidth over all sizes."""
        return max(self.copy_gbps.values())

    def nearest_copy(self, bytes_moved: int) -> str:
        """Return the key of ``copy_gbps`` whose size is nearest, as a ratio."""
        return min(self.copy_gbps, key=lambda size: abs(log(int(size) / bytes_moved)))


Figure = Literal["copy_gbps", "matmul_tflops", "launch_us"]


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's model with torch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {torch.get_num_threads()} threads"


def measured_ceilings(device: torch.device, refresh: bool = False) -> Ceilings:
    """Return the device's ceilings from the cache on disk, measuring them first if they are
    missing.

    They are kept per device, driver and torch version. What was measured on a busy machine is
    measured again when a core is free, and the better of both is kept. ``refresh`` measures again,
    which takes some ten seconds.
    """
    file = _file(device)
    kept = None if refresh else _read(file)
    if kept is not None and not (kept.busy and _is_quiet(device)):
        return kept
    ceilings = _measured(device)
    if kept is not None:
        ceilings = _merged(kept, ceilings)
    with contextlib.suppress(OSError):  # on a full disk they are measured again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        with cache.locked(file.with_suffix(".lock")):
            _write(file, ceilings)
    return ceilings


def _measured(device: torch.device) -> Ceilings:
    with waiting_share() as waiting:
        ceilings = Ceilings(
            device=device_name(device),
            torch=torch.__version__,
            driver=_driver(device),
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
            copy_gbps=_copy_gbps(device),
            matmul_tflops=_matmul_tflops(device),
            launch_us=_launch_us(device),
        )
        return replace(ceilings, busy=waiting() > BUSY_SHARE)


def _is_quiet(device: torch.device) -> bool:
    state = machine_state(device)
    return state.load is not None and state.load < state.cores / 2


def _merged(kept: Ceilings, again: Ceilings) -> Ceilings:
    """Return the better of each figure.

    They count as undisturbed if nothing disturbed the second measurement, or if it found nothing
    better: a container that may use less than the cores it sees always waits for one.
    """
    copies, products = (
        {key: max(old.get(key, 0.0), new.get(key, 0.0)) for key in {**old, **new}}
        for old, new in (
            (kept.copy_gbps, again.copy_gbps),
            (kept.matmul_tflops, again.matmul_tflops),
        )
    )
    gains = [new / kept.copy_gbps.get(key, new) for key, new in copies.items()]
    gains += [new / kept.matmul_tflops.get(key, new) for key, new in products.items()]
    return replace(
        again,
        copy_gbps=copies,
        matmul_tflops=products,
        launch_us=min(kept.launch_us, again.launch_us),
        busy=again.busy and max(gains, default=1.0) > WORTH_KEEPING,
    )


def measured_again(
    ceilings: Ceilings, device: torch.device, figure: Figure, key: str = ""
) -> Ceilings:
    """Measure one of the ceilings again after something exceeded it.

    ``figure`` names the ceiling, and ``key`` its entry if it is a mapping. It is measured at most
    once per process, and the better of both values is returned and written to the disk.
    """
    found = _second(device_name(device), device, figure, key)
    if found is None:
        return ceilings
    file = _file(device)
    with contextlib.suppress(OSError), cache.locked(file.with_suffix(".lock")):
        kept = _read(file)  # another process may have written better values meanwhile
        if kept is not None and (better := _better(kept, figure, key, found)) != kept:
            _write(file, better)
    return _better(ceilings, figure, key, found)


@functools.cache
def _second(name: str, device: torch.device, figure: Figure, key: str) -> float | None:
    """Measure one figure again, once per ``name``, which contains the number of threads.

    Returns None if there is not enough memory beside what is being timed.
    """
    try:
        if figure == "launch_us":
            return _launch_us(device)
        if figure == "copy_gbps":
            return _copy_rate(device, int(key))
        return _matmul_rate(device, key)
    except torch.OutOfMemoryError:
        return None


def _better(ceilings: Ceilings, figure: Figure, key: str, found: float) -> Ceilings:
    if figure == "launch_us":
        return replace(ceilings, launch_us=min(ceilings.launch_us, found))
    rates = ceilings.copy_gbps if figure == "copy_gbps" else ceilings.matmul_tflops
    better = {**rates, key: max(rates.get(key, 0.0), found)}
    if figure == "copy_gbps":
        return replace(ceilings, copy_gbps=better)
    return replace(ceilings, matmul_tflops=better)


def _file(device: torch.device) -> Path:
    key = cache.key(device_name(device), _driver(device), torch.__version__)
    return cache.folder() / "ceilings" / f"{key[:16]}.json"


def _read(file: Path) -> Ceilings | None:
    """Read the ceilings; None if they were never measured, or were written by another version."""
    try:
        return Ceilings(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write(file: Path, ceilings: Ceilings) -> None:
    whole = file.with_suffix(".new")
    whole.write_text(json.dumps(asdict(ceilings), indent=1))
    whole.replace(file)


def streaming_ceiling(
    bytes_read: int, bytes_written: int, device: torch.device, best: int = 2
) -> list[Streaming]:
    """Return the ``best`` fastest ways to move exactly these bytes, by a short cold-cache trial.

    Their ``call`` belongs among the candidates of an interleaved run; the ceiling is the faster
    one's time there. Empty when there is nothing to move.
    """
    if bytes_read + bytes_written == 0:
        return []
    ways = variants(bytes_read, bytes_written, device)
    return sorted(ways, key=lambda way: _time_us(way.call, device))[:best]


def _driver(device: torch.device) -> str:
    return (driver_version() or "unknown") if device.type == "cuda" else "none"


def _time_us(call: Call, device: torch.device, cold: bool = True, samples: int = SAMPLES) -> float:
    """Return the median of the samples on a GPU. On a CPU it is the fastest one, because whatever
    else runs there makes a sample longer."""
    clock = timer(call, device, cold=cold)
    times = [clock.sample() for _ in range(samples)]
    return median(times) if device.type == "cuda" else min(times)


def _copy_gbps(device: torch.device) -> dict[str, float]:
    rates = {}
    for bytes_moved in COPY_BYTES[device.type]:
        if device.type == "cuda" and bytes_moved > torch.cuda.mem_get_info(device)[0] // 4:
            continue
        rates[str(bytes_moved)] = _copy_rate(device, bytes_moved)
    return rates


def _copy_rate(device: torch.device, bytes_moved: int) -> float:
    fastest = streaming_ceiling(bytes_moved // 2, bytes_moved // 2, device, best=1)[0]
    return significant(bytes_moved / _time_us(fastest.call, device) / 1000)


def _matmul_tflops(device: torch.device) -> dict[str, float]:
    return {unit: _matmul_rate(device, unit) for unit in MATMUL_UNITS[device.type]}


def _matmul_rate(device: torch.device, unit: str) -> float:
    """Measure a warm product of random values; zeros draw less power and run faster than any real
    product."""
    size, dtype = MATMUL_SIZE[device.type], MATMUL_UNITS[device.type][unit]
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if unit == "tf32" else "highest")
        generator = torch.Generator(device).manual_seed(0)
        left, right = (
            torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2)
        )
        elapsed_us = _time_us(lambda: left @ right, device, cold=False, samples=5)
    finally:
        torch.set_float32_matmul_precision(before)
    return significant(2 * size**3 / elapsed_us / 1e6)


def _launch_us(device: torch.device) -> float:
    small = torch.zeros(16, 16, device=device)
    samples, _ = host_latency_samples_us(lambda: torch.relu(small), device)
    return significant(median(samples))

"""Compiled subjects as plain facts, and the texts of their stages."""

from __future__ import annotations

import functools
import linecache
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fuselab.errors import TargetError, UnsupportedError
from fuselab.inspect.assembly import architectures, summary, tools
from fuselab.inspect.assembly.advice import advice
from fuselab.inspect.assembly.kernel import Kernel
from fuselab.inspect.assembly.subjects import Compiled


def facts_of(compiled: Compiled) -> dict[str, Any]:
    """Return a compiled subject as plain values: the JSON of ``fuselab asm``."""
    device = compiled.architecture
    # NVIDIA's tools are processes of their own, two or three for each kernel.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        kernels = list(threads.map(kernel_facts, compiled.kernels))
    return {
        "target": compiled.spec,
        "architecture": device.name,
        "vendor": device.vendor,
        "chip": device.chip,
        "multiprocessors": device.multiprocessors,
        "case": compiled.case,
        "notes": list(compiled.notes),
        "kernels": kernels,
    }


def kernel_facts(kernel: Kernel) -> dict[str, Any]:
    """Return the summary as plain values, for JSON."""
    found = summary.summarised(kernel)
    held = found.occupancy
    return {
        "name": kernel.name,
        "launched_by": kernel.launched_by,
        "language": kernel.language,
        "architecture": kernel.architecture.name,
        "file": kernel.file,
        "settings": {name: str(value) for name, value in kernel.settings.items()},
        "grid": None if kernel.grid is None else list(kernel.grid),
        "block": list(kernel.block),
        "registers": found.registers,
        "static_shared_bytes": found.static_shared_bytes,
        "dynamic_shared_bytes": found.dynamic_shared_bytes,
        "stack_bytes": found.stack_bytes,
        "spill_store_bytes": None if found.spills is None else found.spills[0],
        "spill_load_bytes": None if found.spills is None else found.spills[1],
        "occupancy": None
        if held is None
        else {
            "blocks": held.blocks,
            "warps": held.warps,
            "most_warps": held.most_warps,
            "limited_by": list(held.limited_by),
            "blocks_by_limit": held.limits,
        },
        "accesses": [
            {"space": one.space, "direction": one.direction, "bits": one.bits, "count": count}
            for one, count in found.accesses.items()
        ],
        "coalescing": [
            {
                "file": one.file,
                "line": one.line,
                "place": kernel.line(one.file, one.line),
                "direction": one.direction,
                "instructions": one.instructions,
                "bytes_per_lane": one.bytes_per_lane,
                "sectors_per_request": one.sectors,
                "least_sectors": one.least,
            }
            for one in found.coalescing
        ],
        "unknown_addresses": found.unknown_addresses,
        "unreached_accesses": found.unreached_accesses,
        "matrix": dict(found.matrix),
        "barriers": dict(found.barriers),
        "instructions": dict(found.mix),
        "most_live_registers": found.most_live,
        **({"amd": dict(found.other)} if found.other else {}),
        "advice": advice(kernel, found),
        "source_of_limits": architectures.SOURCE,
    }


def stage_text(kernel: Kernel, stage: str) -> str:
    """Return the text of one stage of a kernel. Raises UnsupportedError if the kernel has no such
    stage, MissingDependencyError without nvdisasm."""
    if stage not in kernel.stages:
        raise UnsupportedError(
            f"{kernel.name} has no stage {stage} on {kernel.architecture.name}; it has "
            f"{', '.join(kernel.stages)}."
        )
    if stage == "sass":
        return sass_text(kernel)
    return kernel.texts[stage]


@functools.lru_cache(maxsize=64)
def sass_text(kernel: Kernel) -> str:
    """Return nvdisasm's text of one kernel, without the other functions of its binary."""
    if not summary.is_binary(kernel):
        raise UnsupportedError(
            f"NVRTC is older than {kernel.architecture.name} and gave PTX only for {kernel.name}; "
            "--stage ptx shows it."
        )
    text = tools.disassembled(kernel.binary)
    body = text.partition(f".text.{kernel.function}:")[2]
    if not body:
        raise TargetError(f"nvdisasm shows no code of {kernel.function}.")
    kept = re.split(r"\n//-{5,}", body)[0]
    return f"{kernel.function}:{kept.rstrip()}\n"


def annotated(kernel: Kernel) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the instructions of a kernel with source lines and live registers, and its source
    lines with what each became.

    Raises UnsupportedError for an AMD kernel, MissingDependencyError without nvdisasm.
    """
    if kernel.architecture.vendor != "nvidia":
        raise UnsupportedError(
            f"--annotate is for NVIDIA's SASS; --stage amdgcn of {kernel.architecture.name} names "
            "the source lines itself."
        )
    code = summary.code_of(kernel)
    rows = [
        {
            "address": one.address,
            "live": one.live,
            "text": one.text,
            "file": one.place.file if one.place else None,
            "line": one.place.line if one.place else None,
            "place": _short(kernel, one.place.file, one.place.line) if one.place else "",
            "source": _source(one.place.file, one.place.line) if one.place else "",
        }
        for one in code
    ]
    lines = [
        {
            "file": one.file,
            "line": one.line,
            "place": _short(kernel, one.file, one.line),
            "instructions": one.instructions,
            "memory": one.memory,
            "most_live": one.most_live,
            "source": _source(one.file, one.line),
        }
        for one in sorted(summary.by_line(code), key=lambda each: each.file != kernel.file)
    ]
    return rows, lines


def _short(kernel: Kernel, file: str, line: int) -> str:
    return kernel.line(file, line).removeprefix("line ")


def _source(file: str, line: int) -> str:
    return linecache.getline(file, line).rstrip()


def files_of(compiled: Compiled) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of a file for every stage of every kernel."""
    seen: dict[str, int] = {}
    for kernel in compiled.kernels:
        name = re.sub(r"\W+", "_", f"{kernel.launched_by}_{kernel.name}").strip("_")[:80]
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            name = f"{name}_{seen[name]}"
        for stage in kernel.stages:
            yield f"{name}.{kernel.architecture.name}.{stage}", stage_text(kernel, stage)

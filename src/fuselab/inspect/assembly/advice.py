"""Advice on a compiled kernel: what its numbers suggest, and nothing that no number supports."""

from __future__ import annotations

from fuselab.inspect.assembly.kernel import Kernel
from fuselab.inspect.assembly.occupancy import registers_for
from fuselab.inspect.assembly.summary import DENSE, WIDEST, Summary

_DOES = {"load": "loads", "store": "stores", "copy": "copies", "atomic": "updates"}


def advice(kernel: Kernel, summary: Summary) -> list[str]:
    """Return what the numbers suggest; nothing where none of them does."""
    device = kernel.architecture
    found = [*_too_much_shared(kernel, summary), *_spilled(summary), *_indexed_local(summary)]
    found += [*_scattered(kernel, summary), *_narrow(kernel, summary), *_few_warps(kernel, summary)]
    if kernel.grid is not None:
        blocks = kernel.grid[0] * kernel.grid[1] * kernel.grid[2]
        if 0 < blocks < device.multiprocessors:
            found.append(
                f"the grid has {blocks} blocks, and {device.chip} has {device.multiprocessors} "
                f"multiprocessors: {device.multiprocessors - blocks} of them stay idle."
            )
    doubles = summary.mix.get("float64", 0)
    takes_double = any("64" in one.type and "f" in one.type for one in kernel.arguments)
    if doubles and not takes_double and kernel.language == "triton":
        found.append(
            f"{doubles} instructions compute in float64, and no argument is float64: a constant or "
            "a Python float may have widened the arithmetic."
        )
    if "tt.dot" in kernel.texts.get("ttir", "") and not summary.matrix:
        found.append(
            f"tl.dot became {summary.mix.get('float32', 0)} float32 instructions and no matrix "
            "instruction: "
            + (
                f"Triton writes none for {device.name}."
                if device.vendor == "nvidia" and device.number < 80
                else "with 16-bit operands, or input_precision='tf32', it has one."
            )
        )
    return found


def _too_much_shared(kernel: Kernel, summary: Summary) -> list[str]:
    limit = kernel.architecture.block_shared_bytes
    if summary.shared_bytes <= limit:
        return []
    return [
        f"it needs {summary.shared_bytes} bytes of shared memory and a block of "
        f"{kernel.architecture.name} can have {limit}: it cannot be launched there; fewer "
        "num_stages or smaller blocks take less."
    ]


def _spilled(summary: Summary) -> list[str]:
    if summary.other.get("vgpr_spills"):
        return [f"{summary.other['vgpr_spills']} vector registers are spilled to memory."]
    if not summary.spills or not any(summary.spills):
        return []
    stores, loads = summary.spills
    return [
        f"{stores} bytes are spilled to local memory and {loads} read back, per thread: fewer "
        f"elements per thread (a smaller block or more warps) would keep them in registers."
    ]


def _indexed_local(summary: Summary) -> list[str]:
    """Return what local memory holds beside spills: an array whose index is not a constant."""
    local = {
        way: sum(
            count * (one.bits or 0) // 8
            for one, count in summary.accesses.items()
            if (one.space, one.direction) == ("local", way)
        )
        for way in ("store", "load")
    }
    if summary.spills is None or sum(local.values()) <= sum(summary.spills):
        return []
    return [
        f"a thread keeps {summary.stack_bytes} bytes in local memory, which is global memory "
        f"behind the caches; stores of {local['store']} bytes and loads of {local['load']} go "
        "there, and spills are not the reason: an array is indexed by a variable. With constant "
        "indices, as in a loop that is unrolled, it stays in registers."
    ]


def _scattered(kernel: Kernel, summary: Summary) -> list[str]:
    return [
        f"{kernel.line(one.file, one.line)} {_DOES[one.direction]} {one.sectors:g} sectors per "
        f"request where {one.least:g} hold its bytes: {100 * one.useful_share:.0f} % of the "
        "traffic is used; neighbouring threads should touch neighbouring addresses."
        for one in summary.coalescing
        if one.sectors >= 2 * one.least and not one.is_split
    ]


def _narrow(kernel: Kernel, summary: Summary) -> list[str]:
    """Return the lines that move few bytes per instruction although the addresses are dense."""
    found = []
    for one in summary.coalescing:
        wide = WIDEST // one.bytes_per_lane if one.bytes_per_lane else 1
        is_dense = one.sectors <= DENSE * one.least or one.is_split
        instructions = one.instructions + one.unreached
        if is_dense and instructions >= wide > 1 and one.direction != "atomic":
            remedy = (
                "Triton needs to know that pointers and strides are divisible by 16 "
                "(tl.multiple_of, tl.max_contiguous)"
                if kernel.language == "triton"
                else "a float4 or uint4 access would"
            )
            found.append(
                f"{kernel.line(one.file, one.line)} {_DOES[one.direction]} "
                f"{8 * one.bytes_per_lane} bits per thread in {instructions} instructions; "
                f"{-(-instructions // wide)} of 128 bits could move as much: {remedy}."
            )
    return found


def _few_warps(kernel: Kernel, summary: Summary) -> list[str]:
    held = summary.occupancy
    if held is None or held.share >= 0.5 or not held.blocks:
        return []
    said = f"{held.warps} of {held.most_warps} warps fit"
    if held.limited_by == ("registers",):
        most = registers_for(kernel.architecture, kernel.threads, held.blocks + 1)
        return [
            f"{said}, because of {summary.registers} registers: with {most} one more block would."
        ]
    if held.limited_by == ("shared memory",):
        unit = kernel.architecture.shared_unit
        per_block = kernel.architecture.shared_bytes // (held.blocks + 1) // unit * unit
        most = per_block - kernel.architecture.reserved_shared_bytes
        return [
            f"{said}, because of {summary.shared_bytes} bytes of shared memory: with {most} one "
            "more block would."
        ]
    return []

"""A kernel under Nsight Compute as text of 80 columns, from the same facts as its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fuselab.report.numbers import NONE, byte_count, count, duration, share, three
from fuselab.report.screen import cut, folded, table

Facts = Mapping[str, Any]


def ncu_text(kernels: Sequence[Facts], report: str) -> str:
    """Return what ``fuselab profile --ncu`` prints of each kernel, and where the report is."""
    lines = [line for kernel in kernels for line in ("", *_kernel(kernel))]
    return "\n".join([*lines, "", *folded("", f"Nsight Compute's report: {report}", whole=True)])


def _kernel(facts: Facts) -> Iterator[str]:
    yield cut(f"Under Nsight Compute: {facts['name']}")
    yield from table(["launch", "", "device and memory", ""], list(_rows(facts)), right=(1, 3))
    limits = ", ".join(f"{limit['resource']} {limit['blocks']}" for limit in facts["limits"])
    if limits:
        yield from folded(" ", f"blocks per multiprocessor that each resource allows: {limits}")
    stalls = ", ".join(f"{reason.replace('_', ' ')} {three(c)}" for reason, c in facts["stalls"])
    if stalls:
        yield from folded(" ", f"cycles that a warp waits per instruction: {stalls}")
    for hint in facts["hints"]:
        yield from folded(" → ", f"{hint['seen']}.")
        if hint["triton"] == hint["cuda"]:
            yield from folded("     ", f"{hint['triton']}.")
        else:
            yield from folded("     Triton: ", f"{hint['triton']}.")
            yield from folded("     CUDA:   ", f"{hint['cuda']}.")


def _rows(facts: Facts) -> Iterator[list[str]]:
    def number(key: str) -> str:
        return NONE if facts[key] is None else three(facts[key])

    def whole(key: str) -> str:
        return count(facts[key])

    read, written = facts["bytes_read"], facts["bytes_written"]
    moved = read + written if read is not None and written is not None else None
    yield ["time", duration(facts["us"]), "DRAM", share(facts["dram_share"])]
    yield ["grid, in blocks", whole("grid"), "L2", share(facts["l2_share"])]
    yield ["block, in threads", whole("block"), "multiprocessors", share(facts["sm_share"])]
    yield ["waves", number("waves"), "empty in the last wave", share(facts["tail_share"])]
    yield [
        "occupancy allowed",
        share(facts["occupancy_asked"]),
        "occupancy reached",
        share(facts["occupancy_reached"]),
    ]
    yield [
        "registers per thread",
        whole("registers"),
        "shared memory per block",
        byte_count(facts["shared_bytes"]),
    ]
    yield [
        "moved by DRAM",
        byte_count(moved),
        "operands, once",
        byte_count(facts.get("least_bytes")),
    ]
    yield [
        "sectors per load",
        number("load_sectors"),
        "sectors per store",
        number("store_sectors"),
    ]
    yield [
        "threads at work, of 32",
        number("active_threads"),
        "bank conflicts",
        whole("bank_conflicts"),
    ]

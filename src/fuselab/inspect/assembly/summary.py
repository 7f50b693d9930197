"""The facts of a compiled kernel that an expert reads from its assembly."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fuselab.errors import BuildError, MissingDependencyError
from fuselab.inspect.assembly import (
    instruction_kinds,
    liveness,
    ptx_addresses,
    ptx_lines,
    sass,
    tools,
)
from fuselab.inspect.assembly.instruction_kinds import Access
from fuselab.inspect.assembly.kernel import Kernel
from fuselab.inspect.assembly.occupancy import Occupancy, occupancy
from fuselab.inspect.assembly.sass import Instruction

WIDEST = 16  # bytes of the widest access of one thread
DENSE = 1.01  # sectors over the least, up to which accesses count as dense


@dataclass(frozen=True)
class LineAccess:
    """The global accesses of one source line: how many instructions, how wide, and the sectors of
    32 bytes that each request of the first warp touches, beside the least that its bytes need.

    ``is_split`` says that a thread reads neighbouring elements, up to 16 bytes, one by one: each
    request skips what the others touch, and together they leave nothing out.
    ``unreached`` counts the line's further instructions, which that warp does not execute.
    """

    file: str
    line: int | None
    direction: str
    instructions: int
    bytes_per_lane: int
    sectors: float
    least: float
    unreached: int = 0
    is_split: bool = False

    @property
    def useful_share(self) -> float:
        return self.least / self.sectors if self.sectors else 1.0


@dataclass(frozen=True)
class Summary:
    """The facts that the assembly of one kernel tells.

    ``accesses`` count instructions, not executions. ``unknown_addresses`` and
    ``unreached_accesses`` are those of ``ptx_addresses.Found``; None where there is no PTX.
    ``spills`` are the bytes of spill stores and loads; None where the assembler does not say.
    """

    registers: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    stack_bytes: int
    spills: tuple[int, int] | None
    occupancy: Occupancy | None
    accesses: Mapping[Access, int]
    coalescing: tuple[LineAccess, ...]
    unknown_addresses: int | None
    unreached_accesses: int | None
    matrix: Mapping[str, int]
    barriers: Mapping[str, int]
    mix: Mapping[str, int]
    most_live: int | None
    other: Mapping[str, Any]  # what an AMD assembler says beyond

    @property
    def instructions(self) -> int:
        return sum(self.mix.values())

    @property
    def shared_bytes(self) -> int:
        return self.static_shared_bytes + self.dynamic_shared_bytes


@functools.lru_cache(maxsize=64)
def code_of(kernel: Kernel) -> tuple[Instruction, ...]:
    """Return the kernel's SASS with source lines and live registers. Raises
    MissingDependencyError without nvdisasm."""
    places = ptx_lines.places(kernel.texts["ptx"])
    found = sass.instructions(tools.disassembled_by_ptx(kernel.binary), kernel.function, places)
    counted = tools.live_counts(kernel.binary, kernel.function)
    if counted is None:
        return liveness.with_live(found)
    return sass.with_counts(found, counted)


def summarised(kernel: Kernel) -> Summary:
    """Return the facts of a kernel. Raises MissingDependencyError without NVIDIA's tools."""
    if kernel.architecture.vendor == "amd":
        return _of_amd(kernel)
    if not is_binary(kernel):
        raise BuildError(
            f"{kernel.name}: NVRTC is older than {kernel.architecture.name} and gave PTX only; "
            "--stage ptx shows it."
        )
    code = code_of(kernel)
    used = tools.resource_usage(kernel.binary)[kernel.function]
    static = used["SHARED"]
    if kernel.architecture.number >= 90 and static:
        static -= kernel.architecture.reserved_shared_bytes  # cuobjdump counts the system's too
    spills = (0, 0)
    if used["STACK"]:
        spills = _spills(kernel)  # type: ignore[assignment]
    device = kernel.architecture
    total = static + kernel.shared_bytes
    found = ptx_addresses.requests(kernel)
    return Summary(
        registers=used["REG"],
        static_shared_bytes=static,
        dynamic_shared_bytes=kernel.shared_bytes,
        stack_bytes=used["STACK"],
        spills=spills,
        occupancy=occupancy(device, kernel.threads, used["REG"], total),
        accesses=instruction_kinds.accesses(code),
        coalescing=tuple(_coalescing(found)),
        unknown_addresses=found.unknown,
        unreached_accesses=len(found.unreached),
        matrix=instruction_kinds.matrix(code),
        barriers=instruction_kinds.barriers(code),
        mix=instruction_kinds.mix(code),
        most_live=max((one.live for one in code if one.live is not None), default=None),
        other={},
    )


def is_binary(kernel: Kernel) -> bool:
    """Return whether the compiler gave machine code, and not PTX for the driver to compile."""
    return kernel.binary.startswith(b"\x7fELF")


def _spills(kernel: Kernel) -> tuple[int, int] | None:
    """Return the bytes that the assembler spilled, by assembling the PTX once more."""
    target = re.search(r"^\.target (\w+)", kernel.texts["ptx"], re.M)
    try:
        _, said = tools.assembled(
            kernel.texts["ptx"],
            target[1] if target else kernel.architecture.name,
            newest=kernel.language == "cuda",
        )
    except (BuildError, MissingDependencyError):
        return None  # a ptxas that is older than the PTX
    return tools.spilled_bytes(said, kernel.function)


def _coalescing(found: ptx_addresses.Found) -> list[LineAccess]:
    lines = []
    for place, direction, members in ptx_addresses.by_line(found.requests):
        count = len(members)
        bytes_per_lane = max(one.bytes_per_lane for one in members)
        sectors = sum(one.sectors for one in members) / count
        least = sum(one.least for one in members) / count
        together, least_together = ptx_addresses.sectors_together(members)
        lines.append(
            LineAccess(
                file=place.file if place else "",
                line=place.line if place else None,
                direction=direction,
                instructions=count,
                bytes_per_lane=bytes_per_lane,
                sectors=sectors,
                least=least,
                unreached=found.unreached.count((place, direction)),
                is_split=together <= DENSE * least_together
                and sectors <= least * WIDEST / bytes_per_lane,
            )
        )
    return lines


# --- AMD ---------------------------------------------------------------------------------------

_AMD_INSTRUCTION = re.compile(r"^\t([a-z]\w+)(?:\s|$)")
_AMD_FACTS = {
    "vgprs": r"\.vgpr_count:\s+(\d+)",
    "agprs": r"\.agpr_count:\s+(\d+)",
    "sgprs": r"\.sgpr_count:\s+(\d+)",
    "vgpr_spills": r"\.vgpr_spill_count:\s+(\d+)",
    "sgpr_spills": r"\.sgpr_spill_count:\s+(\d+)",
    "scratch_bytes": r"\.private_segment_fixed_size:\s+(\d+)",
    "waves_per_simd": r"; Occupancy: (\d+)",
}


def amd_code(kernel: Kernel) -> list[str]:
    """Return the opcodes of an AMD kernel's assembly text."""
    body = kernel.texts["amdgcn"].partition(f"\n{kernel.function}:")[2].partition(".Lfunc_end")[0]
    found = (_AMD_INSTRUCTION.match(row) for row in body.splitlines())
    return [match[1] for match in found if match is not None and not match[1].startswith("p2")]


def _of_amd(kernel: Kernel) -> Summary:
    code = amd_code(kernel)
    matches = {name: re.search(way, kernel.texts["amdgcn"]) for name, way in _AMD_FACTS.items()}
    facts = {name: int(match[1]) for name, match in matches.items() if match is not None}
    kinds = [(opcode, instruction_kinds.amd_kind(opcode)) for opcode in code]
    accesses = [instruction_kinds.amd_access(opcode) for opcode in code]
    return Summary(
        registers=facts.get("vgprs", 0),
        static_shared_bytes=0,
        dynamic_shared_bytes=kernel.shared_bytes,
        stack_bytes=facts.get("scratch_bytes", 0),
        spills=None,
        occupancy=None,
        accesses=Counter(one for one in accesses if one is not None),
        coalescing=(),
        unknown_addresses=None,
        unreached_accesses=None,
        matrix=Counter(opcode for opcode, kind in kinds if kind == "matrix"),
        barriers=Counter(opcode for opcode, kind in kinds if kind == "barrier"),
        mix=Counter(kind for _, kind in kinds),
        most_live=None,
        other=facts,
    )


# --- per source line -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LineCost:
    """The cost of one source line: instructions, the most live registers, accesses of memory."""

    file: str
    line: int
    instructions: int
    most_live: int | None
    memory: int


def by_line(code: Sequence[Instruction]) -> list[LineCost]:
    """Return the source lines of a kernel with what they became, in order."""
    groups: dict[tuple[str, int], list[Instruction]] = {}
    for one in code:
        if one.place is not None:
            groups.setdefault((one.place.file, one.place.line), []).append(one)
    return [
        LineCost(
            file,
            line,
            len(members),
            max((one.live for one in members if one.live is not None), default=None),
            sum(instruction_kinds.kind(one) == "memory" for one in members),
        )
        for (file, line), members in sorted(groups.items())
    ]

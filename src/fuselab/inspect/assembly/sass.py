"""SASS, the machine code of NVIDIA GPUs, as nvdisasm prints it: instructions with source lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fuselab.inspect.assembly.ptx_lines import Place

_LINE = re.compile(r'//## File "\.nv_debug_ptx_txt", line (?P<line>\d+)')
_INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:(?P<guard>@!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)"
    r"\s*(?P<operands>[^;]*?)\s*;"
)
_LABEL = re.compile(r"^(?P<label>\.L_\w+):")
_BRANCH_TARGET = re.compile(r"`\((\.L_\w+)\)|\b0x([0-9a-f]+)\s*$")


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``place`` is the source line that it computes, None where the compiler names
    none; ``live`` the number of general registers that hold a value when it issues."""

    address: int
    opcode: str
    operands: str
    guard: str = ""
    place: Place | None = None
    target: int | None = None  # of a branch
    live: int | None = None

    @property
    def base(self) -> str:
        """The opcode without its modifiers: LDG of LDG.E.128."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    @property
    def text(self) -> str:
        return f"{self.guard + ' ' if self.guard else ''}{self.opcode} {self.operands}".rstrip()


def instructions(
    text: str, function: str, places: Sequence[Place | None] = ()
) -> tuple[Instruction, ...]:
    """Return the instructions of one function of nvdisasm's text, without the padding behind its
    last branch.

    ``text`` names lines of the PTX that ptxas read; ``places`` are their source lines.
    """
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    place: Place | None = None
    for row in _rows_of(text, function):
        label = _LABEL.match(row)
        if label:
            waiting.append(label["label"])
            continue
        line = _LINE.search(row)
        if line:
            number = int(line["line"])
            place = places[number] if number < len(places) else None
            continue
        match = _INSTRUCTION.search(row)
        if match is None:
            continue
        address = int(match["address"], 16)
        labels.update(dict.fromkeys(waiting, address))
        waiting.clear()
        guard = match["guard"] or ""
        found.append(Instruction(address, match["opcode"], match["operands"], guard, place))
    return _without_padding([_with_target(one, labels) for one in found])


def _rows_of(text: str, function: str) -> Iterator[str]:
    inside = False
    for row in text.splitlines():
        if row.startswith(f".text.{function}:"):
            inside = True
        elif inside and row.startswith(("//-----", ".section", "\t.section")):
            return
        elif inside:
            yield row


def _with_target(one: Instruction, labels: dict[str, int]) -> Instruction:
    if one.base not in ("BRA", "BSSY", "CALL", "BRX", "BRXU", "JMP"):
        return one
    match = _BRANCH_TARGET.search(one.operands)
    if match is None:
        return one
    address = labels.get(match[1]) if match[1] else int(match[2], 16)
    return replace(one, target=address)


def _without_padding(found: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Leave out what follows the last EXIT, RET or branch: a branch to itself, and NOPs."""
    kept = list(found)
    while kept and (kept[-1].base == "NOP" or kept[-1].target == kept[-1].address):
        kept.pop()
    return tuple(kept)


def with_counts(found: Sequence[Instruction], counts: Mapping[int, int]) -> tuple[Instruction, ...]:
    """Return the instructions with ``live`` from counts by address."""
    return tuple(replace(one, live=counts.get(one.address)) for one in found)

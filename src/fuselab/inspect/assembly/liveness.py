"""Live registers: at each instruction, how many general registers hold a value that is still read.

nvdisasm counts them too, but only in binaries of a CUDA 13 assembler; Triton's wheel assembles for
sm_90 and older with an earlier one. A test compares the two on binaries that nvdisasm can follow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fuselab.inspect.assembly.sass import Instruction

_STACK_POINTER = 1  # held from the first instruction to the last
_REGISTER = re.compile(r"(?<![\w.])([-|~!]*)R(\d+)\b((?:\.\w+)*)")
_NO_RESULT = re.compile(
    r"^(?:ST|STG|STS|STL|STSM|STTM|RED|REDG|BAR|BRA|BRX|BRXU|EXIT|NOP|BSSY|BSYNC|BREAK|RET|CALL|JMP"
    r"|WARPSYNC|MEMBAR|ERRBAR|DEPBAR|LDGDEPBAR|LDGSTS|CCTL\w*|UBLK\w+|UTMA\w+|UTC\w+|ARRIVES"
    r"|WARPGROUP|NANOSLEEP|FENCE|KILL|BPT|R2UR|R2P|R2B|UCGABAR_\w+|CGAERRBAR|ACQBULK|PREEXIT|YIELD)$"
)
_ADDRESSED = frozenset(("LDG", "LD", "STG", "ST", "ATOM", "ATOMG", "RED", "REDG", "LDGSTS"))
_DOUBLE = frozenset(("DADD", "DMUL", "DFMA", "DSETP", "DMNMX"))
_PAIRED = frozenset(("FADD2", "FMUL2", "FFMA2"))
# Registers of the operands A, B and C of a matrix instruction, by shape.
_MATRIX = {
    "HMMA.16816": (4, 2, 4), "HMMA.1688": (2, 1, 4), "HMMA.1684": (2, 1, 4), "DMMA.884": (2, 2, 4),
    "IMMA.8816": (1, 1, 2), "IMMA.16816": (2, 1, 4), "IMMA.16832": (4, 2, 4),
    "QMMA.16832": (4, 2, 4), "HMMA.16832": (4, 2, 4), "OMMA.16864": (4, 2, 4),
}  # fmt: skip


def with_live(found: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Return the instructions with ``live`` filled in: the registers read later, and the results
    of the instruction itself."""
    counts = live_counts(found)
    return tuple(replace(one, live=count) for one, count in zip(found, counts, strict=True))


def live_counts(found: Sequence[Instruction]) -> list[int]:
    """Return the number of live registers at each instruction."""
    effects = [_effect(one) for one in found]
    following = list(_successors(found))
    before: list[set[int]] = [set() for _ in found]
    changed = True
    while changed:
        changed = False
        for index in range(len(found) - 1, -1, -1):
            results, operands, is_certain = effects[index]
            after = set().union(*(before[place] for place in following[index]))
            alive = operands | (after - results if is_certain else after)
            if alive != before[index]:
                before[index] = alive
                changed = True
    return [
        len({_STACK_POINTER} | before[index] | effects[index][0]) for index in range(len(found))
    ]


def _successors(found: Sequence[Instruction]) -> Iterator[tuple[int, ...]]:
    places = {one.address: index for index, one in enumerate(found)}
    returns = tuple(
        index + 1
        for index, one in enumerate(found)
        if one.base == "CALL" and index + 1 < len(found)
    )
    for index, one in enumerate(found):
        is_last = index + 1 == len(found)
        next_one = () if is_last else (index + 1,)
        target = (places[one.target],) if one.target in places else ()
        if one.base == "EXIT" and not one.guard:
            yield ()
        elif one.base == "RET":
            yield returns if not one.guard else (*returns, *next_one)
        elif one.base in ("BRA", "JMP", "BRX", "BRXU"):
            # A convergent or uniform branch may have a predicate as an operand.
            is_certain = not one.guard and not re.match(r"!?U?P\d|~?URZ|UR\d", one.operands)
            yield target if is_certain and target else (*target, *next_one)
        elif one.base == "CALL":
            yield (*target, *next_one)
        else:
            yield next_one


def _effect(one: Instruction) -> tuple[set[int], set[int], bool]:
    """Return the registers that an instruction writes and reads, and whether it always writes."""
    operands = _split(one.operands)
    results: set[int] = set()
    start = 0
    if not _NO_RESULT.match(one.base):
        # A predicate may come before the result: SHFL P0, R5, ...; and ATOMG PT, R5, ...
        place = 1 if operands and re.fullmatch(r"!?U?P\w+", operands[0]) else 0
        has_register = place < len(operands) and re.fullmatch(r"R\d+", operands[place]) is not None
        sets_predicate = place == 1 and one.base not in ("SHFL", "ATOMG", "ATOM", "ATOMS", "MATCH")
        if has_register and not (sets_predicate and "SETP" in one.base):
            first = int(operands[place][1:])
            results = set(range(first, first + _result_width(one)))
            start = place + 1
    reads: set[int] = set()
    sources = operands[start:]
    for place, operand in enumerate(sources):
        for _, number, suffix in _REGISTER.findall(operand):
            first = int(number)
            width = _source_width(one, place, len(sources), operand, suffix)
            reads |= set(range(first, first + width))
    return results, reads, not one.guard


def _split(operands: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(operands):
        depth += letter in "[(" or -(letter in "])")
        if letter == "," and depth == 0:
            parts.append(operands[start:place].strip())
            start = place + 1
    parts.append(operands[start:].strip())
    return [part for part in parts if part]


def _memory_width(one: Instruction) -> int:
    if one.base in ("LDSM", "STSM"):
        last = one.modifiers[-1]
        return int(last) if last.isdigit() else 1
    for modifier in one.modifiers:
        if modifier in ("64", "128", "256"):
            return int(modifier) // 32
        if modifier.startswith("x") and modifier[1:].isdigit():
            return int(modifier[1:])
    return 1


def _matrix_widths(one: Instruction) -> tuple[int, int, int] | None:
    widths = _MATRIX.get(f"{one.base}.{one.modifiers[0]}" if one.modifiers else "")
    if widths is None:
        return None
    first, second, third = widths
    if "TF32" in one.modifiers:
        first, second = 2 * first, 2 * second
    if one.base == "HMMA" and "F16" in one.modifiers and "F32" not in one.modifiers:
        third = 2
    return first, second, third


def _warpgroup_width(one: Instruction) -> int:
    """Return the accumulator's registers of a warpgroup product 64 x N, over 128 threads."""
    columns = int(one.modifiers[0].split("x")[1])
    return columns // (2 if "F32" in one.modifiers or one.base == "IGMMA" else 4)


def _result_width(one: Instruction) -> int:
    matrix = _matrix_widths(one)
    if matrix is not None:
        return matrix[2]
    if one.base.endswith("GMMA"):
        return _warpgroup_width(one)
    if one.base in ("LDG", "LD", "LDS", "LDL", "LDC", "LDSM", "LDTM", "ATOM", "ATOMG", "ATOMS"):
        return _memory_width(one)
    if one.base == "CS2R":
        return 1 if "32" in one.modifiers else 2
    first = one.modifiers[0] if one.modifiers else ""
    wide = one.base in _DOUBLE | _PAIRED or "WIDE" in one.modifiers
    wide |= one.base in ("IADD", "IADD3", "MOV", "IMNMX", "SEL", "LEA") and "64" in one.modifiers
    wide |= one.base == "F2F" and first == "F64"
    wide |= one.base == "I2F" and first == "F64"
    wide |= one.base == "F2I" and any(part in ("S64", "U64") for part in one.modifiers)
    return 2 if wide else 1


def _source_width(one: Instruction, place: int, count: int, operand: str, suffix: str) -> int:
    if "[" in operand:
        is_pair = ".64" in suffix or (
            one.base in _ADDRESSED
            and "E" in one.modifiers
            and "UR" not in operand
            and ".U32" not in suffix
            and not (one.base == "LDGSTS" and place == 0)
        )
        return 2 if is_pair else 1
    matrix = _matrix_widths(one)
    if matrix is not None:
        return matrix[min(place, 2)]
    if one.base.endswith("GMMA"):
        return _warpgroup_width(one) if place == count - 1 and place else 4
    if one.base in ("STG", "ST", "STS", "STL", "STSM", "STTM", "RED", "REDG", "ATOM", "ATOMG",
                    "ATOMS"):  # fmt: skip
        return _memory_width(one)
    last = one.modifiers[-1] if one.modifiers else ""
    if one.base in _DOUBLE | _PAIRED:
        return 2
    if "WIDE" in one.modifiers:
        return 2 if place == 2 else 1
    if one.base in ("IADD", "IADD3", "ISETP", "MOV", "SEL", "LEA") and "64" in one.modifiers:
        return 2
    is_double = one.base in ("F2F", "F2I") and "F64" in (last, *one.modifiers[1:])
    is_long = one.base == "I2F" and any(part in ("S64", "U64") for part in one.modifiers)
    return 2 if is_double or is_long else 1

"""The addresses that the first warp of the first block reads and writes, computed from the PTX.

The whole-number instructions of the PTX are run for the 32 lanes of one warp at a time, with the
launch's own arguments; what was loaded from memory stays unknown, and so does what is computed from
it. Loops are run once. An access whose addresses come out is then counted in sectors of 32 bytes,
the unit in which a GPU moves global memory (CUDA C++ Best Practices Guide, "Coalesced Access to
Global Memory"). It is what Nsight Compute measures as sectors per request, for one warp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fuselab.inspect.assembly import ptx_lines
from fuselab.inspect.assembly.architectures import SECTOR_BYTES, WARP
from fuselab.inspect.assembly.kernel import Kernel
from fuselab.inspect.assembly.ptx_lines import Place

# A whole number that no launch gave: large, as sizes and strides are, and a power of two.
UNKNOWN_NUMBER = 1 << 20
_MOST_STEPS = 200_000
_MOST_PATHS = 64

Lanes = Any  # an int64 array of 32 values, or None where they are unknown
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:([+-])\s*(-?\w+))?\s*\]")
_TYPE = re.compile(r"^(?:pred|[bsuf](?:8|16|32|64|128)|f16x2|bf16|bf16x2|tf32)$")


@dataclass(frozen=True)
class Request:
    """One access of global memory by one warp: the sectors that it touches, and the least that its
    distinct bytes need. ``touched`` are the addresses of these bytes."""

    place: Place | None
    direction: str  # load, store, copy, atomic
    bytes_per_lane: int
    lanes: int  # that are not masked off
    sectors: int
    least: int
    touched: Lanes = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class _Statement:
    line: int
    guard: str
    opcode: tuple[str, ...]
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """The requests of a kernel's first warp, in the order of the PTX.

    ``unknown`` counts the accesses of global memory whose addresses only the device knows.
    ``unreached`` has the source line and direction of those that this warp never makes: the tail of
    a block that is full, for example.
    """

    requests: tuple[Request, ...]
    unknown: int
    unreached: tuple[tuple[Place | None, str], ...]


def requests(kernel: Kernel) -> Found:
    """Return the requests of global memory that the kernel's first warp makes."""
    statements, labels = _parsed(kernel.texts["ptx"], kernel.function)
    places = ptx_lines.places(kernel.texts["ptx"])
    warp = _Warp(kernel, statements, labels)
    warp.run()
    found: list[Request] = []
    unreached: list[tuple[Place | None, str]] = []
    unknown = 0
    for index, statement in enumerate(statements):
        direction = _direction(statement.opcode)
        if direction is None:
            continue
        place = places[statement.line] if statement.line < len(places) else None
        seen = warp.accesses.get(index)
        if seen is None and index in warp.visited:
            unknown += 1
        elif seen is None or not len(seen[0]):
            unreached.append((place, direction))
        else:
            found.append(_request(place, direction, *seen))
    return Found(tuple(found), unknown, tuple(unreached))


def _request(place: Place | None, direction: str, addresses: Lanes, size: int) -> Request:
    lanes = np.unique(addresses)
    touched = (lanes[:, None] + np.arange(size)[None, :]).ravel()
    distinct = np.unique(touched)
    return Request(place, direction, size, len(addresses), *_sectors(distinct), distinct)


def _sectors(distinct: Lanes) -> tuple[int, int]:
    """Return how many sectors these bytes lie in, and the least that as many bytes need."""
    return len(np.unique(distinct // SECTOR_BYTES)), -(-len(distinct) // SECTOR_BYTES)


def sectors_together(members: Sequence[Request]) -> tuple[int, int]:
    """Return the sectors that several requests touch together, and the least that their bytes
    need."""
    return _sectors(np.unique(np.concatenate([one.touched for one in members])))


def _direction(opcode: tuple[str, ...]) -> str | None:
    """Return how an instruction touches global memory, or None if it does not."""
    root, rest = opcode[0], opcode[1:]
    if root == "cp" and rest[:1] == ("async",) and "global" in rest and "bulk" not in rest:
        return "copy"
    if root not in ("ld", "ldu", "st", "red", "atom") or "global" not in rest:
        return None
    return {"ld": "load", "ldu": "load", "st": "store"}.get(root, "atomic")


def _parsed(ptx: str, function: str) -> tuple[list[_Statement], dict[str, int]]:
    """Return the statements of one entry, and the statement that each label stands before."""
    statements: list[_Statement] = []
    labels: dict[str, int] = {}
    entry = re.compile(rf"\.entry\s+{re.escape(function)}\s*\(")
    inside, waiting, started = False, "", 0
    for number, row in enumerate(ptx.splitlines(), 1):
        row = row.split("//")[0].strip()
        if not inside:
            inside = entry.search(row) is not None
            continue
        if row == "}" and not waiting:
            break
        label = re.fullmatch(r"([$\w]+):", row)
        if label is not None:
            labels[label[1]] = len(statements)
        # Directives, and the braces of scopes, are no statements; one may take several rows.
        if label is not None or not row or (not waiting and row[0] in ".{})"):
            continue
        started = started if waiting else number
        *finished, waiting = f"{waiting} {row}".split(";")
        waiting = waiting.strip()
        found = (_statement(text.strip(), started) for text in finished)
        statements += [one for one in found if one is not None]
    return statements, labels


def _statement(text: str, line: int) -> _Statement | None:
    match = re.fullmatch(r"(?:@(!?%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.DOTALL)
    if match is None:
        return None
    opcode = tuple(match[2].replace("::", ":").split("."))
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", match[3])
    return _Statement(line, match[1] or "", opcode, tuple(one.strip() for one in operands))


class _Warp:
    """The registers of one warp while its code runs."""

    def __init__(
        self, kernel: Kernel, statements: list[_Statement], labels: Mapping[str, int]
    ) -> None:
        self._statements, self._labels = statements, labels
        self._kernel = kernel
        self._special = _special(kernel)
        self.accesses: dict[int, tuple[Lanes, int]] = {}
        self.visited: set[int] = set()
        self._values: dict[str, Lanes] = {}
        self._steps = 0

    def run(self) -> None:
        """Run every path once that a branch may take."""
        waiting: list[tuple[int, dict[str, Lanes]]] = [(0, {})]
        paths = 0
        while waiting and paths < _MOST_PATHS and self._steps < _MOST_STEPS:
            paths += 1
            index, values = waiting.pop()
            if index in self.visited:
                continue
            self._values = values
            with np.errstate(over="ignore", divide="ignore"):
                self._follow(index, waiting)

    def _follow(self, index: int, waiting: list[tuple[int, dict[str, Lanes]]]) -> None:
        while index < len(self._statements) and self._steps < _MOST_STEPS:
            self._steps += 1
            statement = self._statements[index]
            self.visited.add(index)
            root = statement.opcode[0]
            if root in ("ret", "exit", "trap") and not statement.guard:
                return
            if root == "bra":
                target = self._labels.get(statement.operands[-1], len(self._statements))
                taken = self._guard(statement)
                always = not statement.guard or (taken is not None and bool(taken.all()))
                never = taken is not None and not taken.any()
                if always and target not in self.visited:
                    index = target
                    continue
                if always and not statement.guard:
                    return  # back to a loop that has run
                if not never and target not in self.visited:
                    waiting.append((target, dict(self._values)))
            else:
                self._step(index, statement)
            index += 1

    def _guard(self, statement: _Statement) -> Lanes:
        if not statement.guard:
            return np.ones(WARP, bool)
        value = self._values.get(statement.guard.lstrip("!"))
        if value is None:
            return None
        return ~value if statement.guard.startswith("!") else value

    def _step(self, index: int, statement: _Statement) -> None:
        direction = _direction(statement.opcode)
        if direction is not None:
            self._note(index, statement)
        root = statement.opcode[0]
        if root in ("st", "red", "bar", "barrier", "cp", "membar", "fence", "prefetch"):
            return
        targets = re.findall(r"%\w+", statement.operands[0]) if statement.operands else []
        value: Lanes = None
        if direction is None:
            value = self._computed(statement)
        active = self._guard(statement)
        for target in targets:
            if not statement.guard or (active is not None and active.all()):
                self._values[target] = value
            elif active is None or value is None or self._values.get(target) is None:
                self._values[target] = None
            else:
                self._values[target] = np.where(active, value, self._values[target])

    def _note(self, index: int, statement: _Statement) -> None:
        if index in self.accesses:
            return
        memory = [one for one in statement.operands if one.startswith("[")]
        if not memory:
            return
        addresses = self._address(memory[-1 if statement.opcode[0] == "cp" else 0])
        if addresses is None:
            return
        active = self._guard(statement)
        kept = addresses if active is None else addresses[active]
        self.accesses[index] = kept, self._bytes(statement)

    def _bytes(self, statement: _Statement) -> int:
        if statement.opcode[0] == "cp":
            size = next((one for one in statement.operands[2:] if re.match(r"0x|\d", one)), "16")
            return int(size, 0)
        count = next(
            (int(m[1]) for part in statement.opcode if (m := re.fullmatch(r"v(\d)", part))), 1
        )
        bits = re.search(
            r"(\d+)(x2)?$", next(p for p in reversed(statement.opcode) if _TYPE.match(p))
        )
        assert bits is not None
        return count * int(bits[1]) * (2 if bits[2] else 1) // 8

    def _address(self, operand: str) -> Lanes:
        match = _ADDRESS.fullmatch(operand)
        value = self._operand(match[1]) if match is not None else None
        if match is None or value is None or match[3] is None:
            return value
        return value - int(match[3], 0) if match[2] == "-" else value + int(match[3], 0)

    def _operand(self, text: str) -> Lanes:
        if text in self._special:
            return self._special[text]
        if text.startswith("%"):
            return self._values.get(text)
        try:
            return np.full(WARP, _signed64(int(text, 0)), np.int64)
        except ValueError:
            return None  # a float, or the address of a variable

    def _computed(self, statement: _Statement) -> Lanes:
        root, parts = statement.opcode[0], statement.opcode[1:]
        if root == "ld":
            return self._parameter(statement) if "param" in parts else None
        kind = next((part for part in reversed(parts) if _TYPE.match(part)), "b32")
        sources = [self._operand(one) for one in statement.operands[1:]]
        if root == "setp":
            return _compared(parts, kind, sources)
        if kind.startswith(("f", "bf", "tf")) and root != "selp":
            return None
        if root == "cvt":
            source = [part for part in parts if _TYPE.match(part)]
            if any(part.startswith(("f", "bf", "tf")) for part in source) or sources[0] is None:
                return None
            return _fitted(_fitted(sources[0], source[-1]), source[0])
        function = _OPERATIONS.get(root)
        if function is None or any(one is None for one in sources):
            return None
        if kind == "pred":
            return _LOGIC[root](*sources) if root in _LOGIC else None
        wide = "wide" in parts
        given = [one if one.dtype == bool else _fitted(one, kind) for one in sources]
        if root == "mad" and wide:
            given[2] = sources[2]
        result = function(*given)
        if "hi" in parts and root in ("mul", "mad"):
            return None
        return result if wide else _fitted(result, kind)

    def _parameter(self, statement: _Statement) -> Lanes:
        match = re.fullmatch(r"\[\s*\w+_param_(\d+)\s*\]", statement.operands[-1])
        kind = statement.opcode[-1]
        if match is None or statement.operands[0].startswith("{") or kind.startswith("f"):
            return None
        value = _parameter(self._kernel, int(match[1]), kind)
        return None if value is None else np.full(WARP, value, np.int64)


def _parameter(kernel: Kernel, place: int, kind: str) -> int | None:
    """Return the value of the kernel's parameter at a place. Pointers lie far apart and are
    aligned; where no launch gave arguments, what has 64 bits is taken for a pointer."""
    pointer = (place + 1) << 40
    if place >= len(kernel.arguments):
        if kernel.arguments:
            return None
        return pointer if kind.endswith("64") else UNKNOWN_NUMBER
    argument = kernel.arguments[place]
    if argument.value is not None:
        return argument.value
    if argument.type.startswith("*") or argument.type == "pointer":
        return pointer
    return UNKNOWN_NUMBER if re.match(r"[iu]\d", argument.type) else None


def _special(kernel: Kernel) -> dict[str, Lanes]:
    lane = np.arange(WARP, dtype=np.int64)
    x, y, _ = kernel.block
    grid = kernel.grid or (UNKNOWN_NUMBER, 1, 1)
    found = {
        "%tid.x": lane % x,
        "%tid.y": lane // x % y,
        "%tid.z": lane // (x * y),
        "%laneid": lane,
        "%warpid": lane * 0,
    }
    for place, axis in enumerate("xyz"):
        found[f"%ntid.{axis}"] = np.full(WARP, kernel.block[place], np.int64)
        found[f"%nctaid.{axis}"] = np.full(WARP, grid[place], np.int64)
        found[f"%ctaid.{axis}"] = np.zeros(WARP, np.int64)
    return found


def _signed64(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _fitted(value: Lanes, kind: str) -> Lanes:
    """Return whole numbers as a type holds them: cut to its bits, with or without a sign."""
    bits = int(re.sub(r"\D", "", kind) or 64)
    if bits >= 64 or value.dtype == bool:
        return value
    cut = value & ((1 << bits) - 1)
    if kind.startswith(("s", "b")):
        return np.where(cut >> (bits - 1), cut - (1 << bits), cut)
    return cut


def _compared(parts: tuple[str, ...], kind: str, sources: list[Lanes]) -> Lanes:
    if kind.startswith(("f", "bf")) or any(one is None for one in sources[:2]):
        return None
    left, right = _fitted(sources[0], kind), _fitted(sources[1], kind)
    comparisons = {
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "eq": np.equal,
        "ne": np.not_equal,
        "lo": np.less,
        "ls": np.less_equal,
        "hi": np.greater,
        "hs": np.greater_equal,
    }
    name = next((part for part in parts if part in comparisons), None)
    if name is None:
        return None
    found = comparisons[name](left, right)
    logic = next((part for part in parts if part in ("and", "or", "xor")), None)
    if logic is None:
        return found
    return None if sources[2] is None else _LOGIC[logic](found, sources[2].astype(bool))


def _field(value: Lanes, start: Lanes, length: Lanes) -> Lanes:
    return (value >> start) & ((1 << length) - 1)


def _inserted(field: Lanes, into: Lanes, start: Lanes, length: Lanes) -> Lanes:
    mask = ((1 << length) - 1) << start
    return (into & ~mask) | ((field << start) & mask)


def _quotient(a: Lanes, b: Lanes) -> Lanes:
    b = np.where(b == 0, 1, b)
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


_LOGIC: dict[str, Callable[..., Lanes]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
    "mov": lambda a: a,
}
_OPERATIONS: dict[str, Callable[..., Lanes]] = {
    "mov": lambda a: a,
    "cvta": lambda a: a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "shl": lambda a, b: a << np.minimum(b, 63),
    "shr": lambda a, b: a >> np.minimum(b, 63),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "abs": np.abs,
    "min": np.minimum,
    "max": np.maximum,
    "div": _quotient,
    "rem": lambda a, b: a - _quotient(a, b) * b,
    "selp": lambda a, b, p: np.where(p.astype(bool), a, b),
    "bfe": _field,
    "bfi": _inserted,
}


def by_line(found: Sequence[Request]) -> Iterator[tuple[Place | None, str, list[Request]]]:
    """Yield the requests of each source line and direction, in the order of the first ones."""
    groups: dict[tuple[Place | None, str], list[Request]] = {}
    for one in found:
        groups.setdefault((one.place, one.direction), []).append(one)
    for (place, direction), members in groups.items():
        yield place, direction, members

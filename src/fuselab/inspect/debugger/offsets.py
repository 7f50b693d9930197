"""The accesses of a debug session, put together by source line and tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Facts = Mapping[str, Any]


@dataclass
class Accesses:
    """The loads or stores of one line and tensor: by program, the offsets and what the mask cuts.

    ``grid`` is the number of programs per axis. ``span`` is the number of elements from the
    tensor's first to its last; offsets beyond it are outside the tensor.
    """

    kernel: str
    line: int | None
    kind: str
    tensor: str
    span: int
    grid: tuple[int, ...] = ()
    programs: dict[tuple[int, ...], tuple[list[int], list[int]]] = field(default_factory=dict)

    @property
    def does(self) -> str:
        """The verb for what a program does there."""
        return {"atomic": "updates atomically"}.get(self.kind, f"{self.kind}s")

    def name_of(self, program: Sequence[int]) -> str:
        """Return a program's id with as many numbers as the grid has dimensions."""
        return program_name(program, self.grid)

    @property
    def outside(self) -> dict[tuple[int, ...], list[int]]:
        """The offsets outside the tensor that are touched nevertheless, by program."""
        found = {
            program: [offset for offset in touched if not 0 <= offset < self.span]
            for program, (touched, _) in self.programs.items()
        }
        return {program: offsets for program, offsets in found.items() if offsets}

    @property
    def written_twice(self) -> dict[int, list[tuple[int, ...]]]:
        """The offsets that several programs store to, with the programs."""
        writers: dict[int, list[tuple[int, ...]]] = {}
        for program, (touched, _) in self.programs.items():
            for offset in set(touched):
                writers.setdefault(offset, []).append(program)
        return {offset: those for offset, those in writers.items() if len(those) > 1}


def grouped(facts: Facts) -> list[Accesses]:
    """Return a session's accesses by kernel, line, kind and tensor, in the order of the first."""
    spans = {
        (kernel["name"], name): tensor["span"]
        for kernel in facts["kernels"]
        for name, tensor in kernel["tensors"].items()
    }
    grids = {kernel["name"]: tuple(kernel["grid"]) for kernel in facts["kernels"]}
    found: dict[tuple[Any, ...], Accesses] = {}
    for one in facts["accesses"]:
        key = one["kernel"], one["line"], one["kind"], one["tensor"]
        if key not in found:
            span = spans.get((one["kernel"], one["tensor"]), 0)
            found[key] = Accesses(*key, span, grids.get(one["kernel"], ()))
        touched, cut = found[key].programs.setdefault(tuple(one["program"]), ([], []))
        touched += one["offsets"]
        cut += one["cut"]
    return list(found.values())


def runs(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Return offsets as runs of neighbours, first and last: 0 1 2 8 as (0, 2), (8, 8)."""
    found: list[tuple[int, int]] = []
    for offset in sorted(set(offsets)):
        if found and offset == found[-1][1] + 1:
            found[-1] = found[-1][0], offset
        else:
            found.append((offset, offset))
    return found


def program_name(program: Sequence[int], grid: Sequence[int] = ()) -> str:
    """Return a program's id as it is written on the command line: 2, or 0,3 in a grid of two
    dimensions."""
    used = 1 + max((place for place, index in enumerate(program) if index), default=0)
    used = max([used, *(axis for axis, size in enumerate(grid, 1) if size > 1)])
    return ",".join(map(str, (*program, 0, 0)[:used]))

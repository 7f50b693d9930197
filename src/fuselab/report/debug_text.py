"""The screen of ``fuselab debug``: which offsets each program touches, and the comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fuselab.inspect.debugger.offsets import Accesses, grouped, runs
from fuselab.report.numbers import count
from fuselab.report.screen import folded

PROGRAMS = 6  # shown of each access; the JSON has all
RUNS = 4  # shown of each program's offsets

Facts = Mapping[str, Any]


def debug_text(facts: Facts) -> str:
    """Return what a session saw as text of 80 columns."""
    lines = []
    for kernel in facts["kernels"]:
        grid = " x ".join(map(str, kernel["grid"]))
        tensors = ", ".join(
            f"{name} {tensor['dtype']}{tensor['shape']}"
            for name, tensor in kernel["tensors"].items()
        )
        programs = "program" if grid == "1" else "programs"
        lines += folded("", f"{kernel['name']}, {grid} {programs}: {tensors}", indent=2)
    for one in grouped(facts):
        lines += _accesses(one)
    if facts["left_out"]:
        lines.append(f"{facts['left_out']} further accesses are left out")
    if any("bfloat16" in str(kernel["tensors"]) for kernel in facts["kernels"]):
        lines += folded("", "note: the interpreter truncates bfloat16 where a GPU rounds.")
    for compared in facts["against"]:
        lines += ["", *_against(compared)]
    return "\n".join(lines)


def _accesses(one: Accesses) -> Iterator[str]:
    yield f"  line {one.line} {one.does} {one.tensor}"
    shown = list(one.programs.items())[:PROGRAMS]
    for program, (touched, cut) in shown:
        text = _offsets(touched)
        if cut:
            text += f"; the mask cuts {_offsets(cut)}"
        yield from folded(f"    program {one.name_of(program)}: ", text)
    if len(one.programs) > len(shown):
        more = len(one.programs) - len(shown)
        yield f"    and {more} program{'s' if more != 1 else ''} more"
    for program, outside in list(one.outside.items())[:PROGRAMS]:
        yield from folded(
            "    OUTSIDE ",
            f"{one.tensor}, which spans {one.span} elements: program {one.name_of(program)} "
            f"{one.does} {_offsets(outside)}; mask it",
        )
    twice = one.written_twice if one.kind == "store" else {}
    if twice:
        offset, programs = next(iter(twice.items()))
        names = " and ".join(map(one.name_of, programs[:3]))
        yield from folded(
            "    STORED MORE THAN ONCE ",
            f"{count(len(twice))} elements of {one.tensor}, {one.tensor}[{offset}] by programs "
            f"{names}: the last one wins on a GPU, in any order",
        )


def _offsets(offsets: Sequence[int]) -> str:
    found = runs(offsets)
    if not found:
        return "nothing"
    text = ", ".join(
        str(first) if first == last else f"{first}..{last}" for first, last in found[:RUNS]
    )
    more = len(found) - RUNS
    return text + (f" and {more} run{'s' if more > 1 else ''} more" if more > 0 else "")


def _against(compared: Facts) -> Iterator[str]:
    name, expression = compared["name"], compared["expression"]
    if not compared["numel"]:
        yield f"{name} against {expression}: empty"
        return
    place = ", ".join(map(str, compared["at"]))
    verdict = (
        "the same, as far as PyTorch's own arithmetic is"
        if compared["within"]
        else f"DIFFERENT at {count(compared['different'])} of {count(compared['numel'])} elements"
    )
    yield from folded("", f"{name} against {expression}: {verdict}", indent=2)
    yield from folded(
        "  ",
        f"largest difference {compared['difference']:.6g} at [{place}]: the kernel has "
        f"{compared['kernel']:.9g}, float64 {compared['expected']:.9g}; PyTorch in this dtype "
        f"differs by at most {compared['eager_difference']:.6g}",
    )

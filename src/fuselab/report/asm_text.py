"""The screen of ``fuselab asm``: summaries, two side by side, and annotated instructions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fuselab.report.numbers import NONE
from fuselab.report.screen import WIDTH, cut, cut_place, folded, table

Facts = Mapping[str, Any]
_HEAD = 15  # columns of a row's name


def asm_text(facts: Facts) -> str:
    """Return the summaries of a compiled subject as text of 80 columns."""
    lines = [*folded("", title_of(facts), whole=True)]
    lines += [line for note in facts["notes"] for line in folded("  note: ", f"{note}.")]
    kernels = facts["kernels"]
    if len(kernels) > 1:
        lines += ["", *_overview(kernels)]
    for kernel in kernels:
        lines += ["", *_summary(kernel)]
    if facts["vendor"] == "nvidia":
        lines += ["", *folded("", f"Limits: {kernels[0]['source_of_limits']}.")]
    return "\n".join(lines)


def title_of(facts: Facts) -> str:
    """Return what was compiled, for which GPU and for which inputs."""
    case = f", for {facts['case']}" if facts["case"] else ""
    chip = f"{facts['chip']}, {facts['multiprocessors']} multiprocessors"
    return f"{facts['target']} on {facts['architecture']} ({chip}){case}"


def _overview(kernels: Sequence[Facts]) -> list[str]:
    rows: list[list[str]] = []
    for kernel in kernels:
        held = kernel["occupancy"]
        share = NONE if held is None else f"{held['warps']}/{held['most_warps']}"
        shared = kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"]
        rows.append(
            [
                kernel["name"],
                kernel["launched_by"],
                str(kernel["registers"]),
                str(shared),
                _spills(kernel) or "0",
                share,
                str(sum(kernel["instructions"].values())),
            ]
        )
    columns = ["kernel", "launched by", "regs", "shared", "spills", "warps", "instr"]
    taken = [2 + max(map(len, column)) for column in zip(columns, *rows, strict=True)][1:]
    left = WIDTH - 1 - sum(taken)
    # names that differ at their end, as those of a backward's kernels, are cut in the middle
    for row in rows:
        if len(row[0]) > left:
            row[0] = cut_place(row[0].partition("<")[0], left)
    return table(columns, rows, right=range(2, 7))


def _spills(kernel: Facts) -> str:
    if kernel["spill_store_bytes"] is None:
        return str(kernel.get("amd", {}).get("vgpr_spills", NONE)) if "amd" in kernel else NONE
    total = kernel["spill_store_bytes"] + kernel["spill_load_bytes"]
    return f"{total} B" if total else ""


def _row(name: str, text: str) -> list[str]:
    return folded(f"  {name:<{_HEAD - 2}}", text, indent=_HEAD, whole=True)


def name_of(kernel: Facts) -> str:
    """Return a kernel's name with what launched it."""
    launched = f" ({kernel['launched_by']})" if kernel["launched_by"] else ""
    return f"{kernel['name']}{launched}"


def _summary(kernel: Facts) -> Iterator[str]:
    yield from folded("", name_of(kernel), indent=2)
    for name, text in rows_of(kernel):
        yield from _row(name, text)
    yield from _coalescing(kernel)
    for sentence in kernel["advice"]:
        yield from _row("advice", sentence)


def rows_of(kernel: Facts) -> Iterator[tuple[str, str]]:
    """Yield the rows of a kernel's summary: what is told, and the words for it."""
    yield "source", short_path(kernel["file"])
    yield "launch", _launch(kernel)
    if "amd" in kernel:
        yield from _amd_rows(kernel)
    else:
        yield from _nvidia_rows(kernel)
    yield "memory", _accesses(kernel["accesses"])
    yield "matrix", _counts(kernel["matrix"])
    yield "barriers", _counts(kernel["barriers"])
    mix = sorted(kernel["instructions"].items(), key=lambda item: -item[1])
    parts = ", ".join(f"{count} {kind}" for kind, count in mix)
    yield "instructions", f"{sum(kernel['instructions'].values())}: {parts}"


def _launch(kernel: Facts) -> str:
    grid = kernel["grid"]
    said = f"blocks of {_sizes(kernel['block'])} threads"
    if grid is not None:
        said = f"{_sizes(grid)} {said}"
    settings = {
        name: value.removeprefix("triton.language.") for name, value in kernel["settings"].items()
    }
    return said + (f"; {_settings(settings)}" if settings else "")


def _sizes(sizes: Sequence[int]) -> str:
    last = max((axis for axis, size in enumerate(sizes) if size > 1), default=0)
    return " x ".join(map(str, sizes[: last + 1]))


def _settings(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _nvidia_rows(kernel: Facts) -> Iterator[tuple[str, str]]:
    live = kernel["most_live_registers"]
    spills = _spills(kernel)
    stack = kernel["stack_bytes"]
    yield (
        "registers",
        f"{kernel['registers']} per thread"
        + (f", {live} live at most" if live is not None else "")
        + (f"; stack {stack} B" if stack else "; no stack")
        + (f", spills {spills}" if spills else ", no spills"),
    )
    static, dynamic = kernel["static_shared_bytes"], kernel["dynamic_shared_bytes"]
    yield "shared", f"{static + dynamic} B" + (f" ({static} static)" if static and dynamic else "")
    held = kernel["occupancy"]
    limits = ", ".join(f"{name} {blocks}" for name, blocks in held["blocks_by_limit"].items())
    yield (
        "occupancy",
        f"{held['blocks']} blocks, {held['warps']} of {held['most_warps']} warps "
        f"({100 * held['warps'] / held['most_warps']:.0f} %), limited by "
        f"{' and '.join(held['limited_by'])} (blocks by {limits})",
    )


def _amd_rows(kernel: Facts) -> Iterator[tuple[str, str]]:
    facts = kernel["amd"]
    yield (
        "registers",
        f"{facts.get('vgprs', 0)} vector ({facts.get('agprs', 0)} of them accumulators), "
        f"{facts.get('sgprs', 0)} scalar; spills {facts.get('vgpr_spills', 0)} vector, "
        f"{facts.get('sgpr_spills', 0)} scalar; scratch {facts.get('scratch_bytes', 0)} B",
    )
    yield "shared", f"{kernel['dynamic_shared_bytes']} B"
    if "waves_per_simd" in facts:
        yield "occupancy", f"{facts['waves_per_simd']} waves per SIMD, as the assembler says"


def _accesses(accesses: Sequence[Facts]) -> str:
    def one(access: Facts) -> str:
        bits = "tiles" if access["bits"] is None else f"{access['bits']} bit"
        return f"{access['space']} {access['direction']} {bits} x{access['count']}"

    return ", ".join(map(one, _ordered(accesses))) or "none"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} x{count}" for name, count in counts.items()) or "none"


def _coalescing(kernel: Facts) -> Iterator[str]:
    """Yield the sectors of each source line's requests, for the first warp of the first block."""
    if "amd" in kernel:
        return
    said = [
        f"{one['place']} {one['direction']} {one['instructions']} x "
        f"{8 * one['bytes_per_lane']} bit: {one['sectors_per_request']:g}"
        f"/{one['least_sectors']:g} sectors"
        for one in kernel["coalescing"]
    ]
    for key, words in (
        ("unknown_addresses", "with addresses that only the device knows"),
        ("unreached_accesses", "that the first warp does not make"),
    ):
        count = kernel[key]
        if count:
            said.append(f"{count} {'access' if count == 1 else 'accesses'} {words}")
    for place, text in enumerate(said):
        yield from _row("coalescing" if place == 0 else "", text)


def short_path(path: str) -> str:
    """Return a path relative to the working folder where that is shorter."""
    if not path:
        return NONE
    here = os.path.relpath(path)
    return min(here, path, key=len)


# --- two kernels side by side --------------------------------------------------------------------


def diff_text(left: Facts, right: Facts, names: tuple[str, str]) -> str:
    """Return the summaries of two compiled subjects side by side, kernel by kernel.

    Kernels are paired by their place; what the two have alike is shown once.
    """
    lines = [f"left:  {cut(names[0], WIDTH - 7)}", f"right: {cut(names[1], WIDTH - 7)}"]
    pairs = list(zip(left["kernels"], right["kernels"], strict=False))
    for first, second in pairs:
        lines += ["", *_pair(first, second)]
    alone = left["kernels"][len(pairs) :] + right["kernels"][len(pairs) :]
    if alone:
        side = "left" if len(left["kernels"]) > len(pairs) else "right"
        lines += ["", *folded("", f"only {side}: {', '.join(map(name_of, alone))}")]
    return "\n".join(lines)


def _pair(first: Facts, second: Facts) -> Iterator[str]:
    title = name_of(first)
    yield cut(title if title == name_of(second) else f"{title} | {name_of(second)}")
    left, right = ({name: value for _, name, value in numbers_of(one)} for one in (first, second))
    ranked = sorted((*numbers_of(first), *numbers_of(second)), key=lambda each: each[0])
    rows = []
    for name in dict.fromkeys(name for _, name, _ in ranked):
        before, after = left.get(name), right.get(name)
        rows.append([name, _cell(before), _cell(after), _change(before, after)])
    yield from table(["", "left", "right", "change"], rows, right=(1, 2, 3))


def _cell(value: Any) -> str:
    return NONE if value is None else str(value)


def _change(before: Any, after: Any) -> str:
    if isinstance(before, int | None) and isinstance(after, int | None):
        step = (after or 0) - (before or 0)
        return f"{step:+d}" if step else ""
    return "" if before == after else "differs"


def numbers_of(kernel: Facts) -> Iterator[tuple[int, str, Any]]:
    """Yield the figures of a kernel that a comparison shows: the rank of the row, name, value."""
    yield 0, "threads per block", kernel["block"][0] * kernel["block"][1] * kernel["block"][2]
    yield 0, "registers", kernel["registers"]
    if kernel["most_live_registers"] is not None:
        yield 0, "live registers at most", kernel["most_live_registers"]
    yield 0, "shared memory B", kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"]
    yield 0, "stack B", kernel["stack_bytes"]
    if kernel["spill_store_bytes"] is not None:
        yield 0, "spilled B", kernel["spill_store_bytes"] + kernel["spill_load_bytes"]
    held = kernel["occupancy"]
    if held is not None:
        yield 0, "blocks per multiprocessor", held["blocks"]
        yield 0, "warps per multiprocessor", held["warps"]
        yield 0, "limited by", ", ".join(held["limited_by"])
    for access in _ordered(kernel["accesses"]):
        bits = "tile" if access["bits"] is None else f"{access['bits']} bit"
        yield 1, f"{access['space']} {access['direction']} {bits}", access["count"]
    for rank, name in ((2, "matrix"), (3, "barriers")):
        for opcode, count in kernel[name].items():
            yield rank, opcode, count
    yield 4, "instructions", sum(kernel["instructions"].values())
    for kind, count in sorted(kernel["instructions"].items()):
        if kind not in ("memory", "matrix", "barrier"):
            yield 5, f"  {kind}", count


def _ordered(accesses: Sequence[Facts]) -> list[Facts]:
    return sorted(
        accesses, key=lambda each: (each["space"], each["direction"], -(each["bits"] or 0))
    )


# --- annotated instructions ----------------------------------------------------------------------


def annotated_text(title: str, rows: Sequence[Facts], lines: Sequence[Facts], width: int) -> str:
    """Return instructions with their source lines beside them, and what each line became.

    A row is an instruction: its address, the live registers, its text, and the source line's number
    and text, which are shown where the line changes.
    """
    found = [title, "", "addr  live  instruction and the source line that it computes"]
    before: Any = None
    code = min(max((len(row["text"]) for row in rows), default=0), width - 40)
    for row in rows:
        live = NONE if row["live"] is None else str(row["live"])
        place = row["file"], row["line"]
        source = ""
        if row["line"] is not None:
            source = f"{row['place']:>5}"
            if place != before:
                source += f" {row['source'].strip()}"
        before = place
        text = cut(row["text"], code)
        found.append(
            cut(f"{row['address']:04x}  {live:>4}  {text:<{code}} {source}", width).rstrip()
        )
    found += ["", *_line_table(lines)]
    return "\n".join(found)


def _line_table(lines: Sequence[Facts]) -> list[str]:
    rows = [
        [
            line["place"],
            str(line["instructions"]),
            str(line["memory"]),
            NONE if line["most_live"] is None else str(line["most_live"]),
            line["source"].strip(),
        ]
        for line in lines
    ]
    return table(["line", "instr", "memory", "live", "source"], rows, right=(0, 1, 2, 3))

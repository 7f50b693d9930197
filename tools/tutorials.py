"""docs/tutorials/: a page per story, made from its script in examples/, and an index.

python tools/tutorials.py [NAME ...]   run the scripts (all without names) and write their pages
python tools/tutorials.py --figures    renew text and figures, keep what the scripts printed
python tools/tutorials.py --beside [NAME ...]   on an H200: write what measured steps print there

A story is a script with ``STEPS``, functions that print. Comments that begin a line become the
page's text, the code between them is shown, and each step's output follows it, with the pictures
that it wrote. The output of steps named ``time_...`` or ``measure_...`` differs from run to run or
from machine to machine, so their output on an H200 (story.NAME.json) stands beside it. A paragraph
of the text may be one of these directives. If its file is missing, the directive is left out,
together with a preceding paragraph that ends in a colon:

    [figures: softmax forward float32]    a table of an operator's results in benchmarks/nvidia-h200
    [plot: softmax forward float32]       its bandwidth or arithmetic against the size, or its times
    [host: add forward float32]           host time per call of its smallest case
    [steps: dlrm_step.json]               the results of benchmarks/dlrm_step.py
    [ranges: train_boxes.json]            the results of `fuselab train boxes`
    [modes: train_lora.json]              the results of `fuselab train lora`
    [ceiling: bf16]                       the device's best rates, and the operations per byte
    [bars: modes train_lora.json]         times of [steps], in bfloat16, or of [modes] as bars
    [file: lora_floor.txt]                a file of benchmarks/nvidia-h200 as it is
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import readme_table

from fuselab.data.layout import KAGGLE_CARDINALITIES
from fuselab.device import environment
from fuselab.report.files import write_json
from fuselab.report.numbers import NONE, byte_count, digits
from fuselab.report.plots import COLORS, MARKERS

CLONE = Path(__file__).resolve().parents[1]
SCRIPTS = CLONE / "examples"
FOLDER = CLONE / "docs" / "tutorials"
PICTURES = FOLDER / "pictures"
RESULTS = CLONE / "benchmarks" / "nvidia-h200"
MADE = "<!-- made by tools/tutorials.py from the script; do not edit -->"
STORIES = (
    "vector_add",
    "square",
    "softmax_four_ways",
    "matmul_activation",
    "add_an_operator",
    "one_kernel_or_many",
    "giou",
    "lora",
    "dlrm_layers",
    "dlrm_profile",
    "which_tool_when",
)
OUTPUT = re.compile(r"^```text( measured)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED_ON = re.compile(r"^\*Printed on .*\*$", re.MULTILINE)
WROTE = re.compile(r"^wrote (\S+\.png)$", re.MULTILINE)
FEWEST_POINTS = 4  # the fewest points of a line; fewer cases are drawn as bars
DIRECTIVE = re.compile(r"\[(figures|plot|host|steps|ranges|modes|ceiling|bars|file): (.+)\]")


@dataclass(frozen=True)
class Piece:
    """A part of a page: ``prose``, ``code``, or the ``output`` of the step named in ``text``."""

    kind: str
    text: str


def load(name: str) -> ModuleType:
    """Import the script as a module; this runs no step."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle and inspect look for the module there
    spec.loader.exec_module(module)
    return module


def printed(module: ModuleType, folder: Path) -> list[str]:
    """Return what each step prints; the pictures that they write are in ``folder`` then."""
    texts = []
    with contextlib.chdir(folder):
        for step in module.STEPS:
            with contextlib.redirect_stdout(io.StringIO()) as text:
                step()
            texts.append(text.getvalue())
    return texts


def print_beside(name: str, folder: Path) -> None:
    """Write to a file what the measured steps print on this machine, after each step."""
    module = load(name)
    texts: dict[str, str] = {}
    for step in module.STEPS:
        if not is_measured(step.__name__):
            continue
        with (
            tempfile.TemporaryDirectory() as away,
            contextlib.chdir(away),
            contextlib.redirect_stdout(io.StringIO()) as text,
        ):
            step()
        texts[step.__name__] = WROTE.sub("", text.getvalue()).strip("\n")
        payload = {"environment": environment.describe(), "printed": texts}
        write_json(folder / f"story.{name}.json", payload)


def where() -> str:
    """Return the line that says on which machine the outputs were printed."""
    facts = environment.describe()
    python = ".".join(facts["python"].split(".")[:2])
    cores = f"{facts['threads']} core{'s' if facts['threads'] > 1 else ''}"
    return (
        f"*Printed on {cores} of an {facts['cpu']}, torch {facts['torch']}, "
        f"Triton {facts['triton']}, Python {python}, {facts['date'][:10]}. What is measured varies "
        "from run to run.*"
    )


def pieces(source: str, steps: Sequence[str]) -> Iterator[Piece]:
    """Yield the parts of the script from its first comment that begins a line to ``STEPS``."""
    lines = source.splitlines()
    code: dict[int, ast.stmt] = {}
    for node in ast.parse(source).body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(each.lineno for each in decorators)])
        code |= dict.fromkeys(range(first, (node.end_lineno or first) + 1), node)
    kind, held = "", list[str]()
    for number, line in enumerate(lines, 1):
        owner = code.get(number)
        if isinstance(owner, ast.Assign) and ast.unparse(owner.targets[0]) == "STEPS":
            break
        here = "code" if owner else "prose" if line.startswith("#") else kind
        if here != kind:
            if kind:
                yield Piece(kind, "\n".join(held).strip("\n"))
            if not kind and here == "code":
                continue  # the imports
            kind, held = here, []
        held.append(line.removeprefix("#").removeprefix(" ") if here == "prose" else line)
        if isinstance(owner, ast.FunctionDef) and owner.end_lineno == number:
            if owner.name not in steps:
                continue
            yield Piece(kind, "\n".join(held).strip("\n"))
            yield Piece("output", owner.name)
            kind, held = "code", []
    if held:
        yield Piece(kind, "\n".join(held).strip("\n"))


def page(name: str, outputs: Sequence[str], place: str) -> str:
    """Return the page of a story.

    Its steps printed ``outputs`` on the machine that the line ``place`` describes.
    """
    source = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    title, intro = headline(source)
    steps = step_names(source)
    by_step = dict(zip(steps, outputs, strict=True))
    parts = [f"# {title}", MADE, *([intro] if intro else [])]
    parts.append(f"The script is [examples/{name}.py](../../examples/{name}.py).")
    for piece in pieces(source, steps):
        if piece.kind == "code" and piece.text:
            parts.append(f"```python\n{piece.text}\n```")
        elif piece.kind == "prose":
            parts += carried_out(piece.text)
        elif piece.kind == "output":
            parts += output(piece.text, by_step[piece.text])
            parts += beside(RESULTS / f"story.{name}.json", piece.text)
    return "\n\n".join([*parts, place]) + "\n"


def output(step: str, text: str) -> list[str]:
    """Return a step's output and its pictures."""
    shown = WROTE.sub("", text).strip("\n")
    measured = " measured" if is_measured(step) else ""
    pictures = [f"![{Path(file).stem}](pictures/{file})" for file in WROTE.findall(text)]
    return [f"```text{measured}\n{shown}\n```", *pictures]


def beside(file: Path, step: str) -> list[str]:
    """Return what a step printed on an H200, if that is on file."""
    payload = json.loads(file.read_text()) if file.exists() else {"printed": {}}
    if step not in payload["printed"]:
        return []
    facts = payload["environment"]
    return [
        f"The same on an {facts['device_name']}, torch {facts['torch']}, {facts['date'][:10]} "
        f"([{file.name}](../../benchmarks/nvidia-h200/{file.name})):",
        f"```text beside\n{payload['printed'][step]}\n```",
    ]


def is_measured(step: str) -> bool:
    return step.startswith(("time_", "measure_"))


def headline(source: str) -> tuple[str, str]:
    """Return the docstring's first line and the paragraphs after it, without its commands."""
    text = inspect.cleandoc(ast.get_docstring(ast.parse(source)) or "")
    first, _, rest = text.partition("\n")
    kept = [line for line in rest.splitlines() if not line.startswith("    ")]
    return first.rstrip("."), "\n".join(kept).strip().replace("``", "`")


def step_names(source: str) -> list[str]:
    """Return the names in ``STEPS``, in order."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STEPS":
            assert isinstance(node.value, ast.Tuple)
            return [ast.unparse(each) for each in node.value.elts]
    raise ValueError("the script has no STEPS")


def carried_out(prose: str) -> list[str]:
    """Return the paragraphs with each directive replaced by its text, or removed if it has none."""
    kept: list[str] = []
    for paragraph in prose.split("\n\n"):
        found = DIRECTIVE.fullmatch(paragraph)
        text = paragraph if found is None else directive(*found.groups())
        if text:
            kept.append(text)
        elif kept and kept[-1].endswith(":"):
            kept.pop()
    return kept


def directive(kind: str, of: str) -> str:
    """Return the text of a directive; empty if its file is missing."""
    if kind == "ceiling":
        return ceiling(of)
    if kind in TABLES:
        return trained(kind, RESULTS / of)
    if kind == "bars":
        name = of.split()[1]
        shown = f"![{name}, on an H200](pictures/{bars_name(name)})"
        return shown if (RESULTS / name).exists() else ""
    if kind == "file":
        if not (RESULTS / of).exists():
            return ""
        text = (RESULTS / of).read_text(encoding="utf-8").rstrip()
        return f"```\n{text}\n```\n\nFrom [{of}](../../benchmarks/nvidia-h200/{of})."
    operator, phase, dtype = of.split()
    groups = measured(operator, phase, dtype, host=kind == "host")
    if not groups:
        return ""
    if kind == "figures":
        return table(groups)
    if kind == "host":
        return host_table(groups[0])
    return f"![{of} on an H200](pictures/{plot_name(operator, phase, dtype)})"


def ceiling(unit: str) -> str:
    """Return a sentence on the measured rates of matrix products and copies, and their ratio."""
    file = RESULTS / "softmax.json"
    payload = json.loads(file.read_text())
    tflops = payload["ceilings"]["matmul_tflops"][unit]
    gbps = max(payload["ceilings"]["copy_gbps"].values())
    return (
        f"The {payload['environment']['device_name']} that made the figures on these pages "
        f"multiplies {digits(tflops)} TFLOP/s in {unit} and copies {digits(gbps)} GB/s "
        f"([{file.name}](../../benchmarks/nvidia-h200/{file.name})): "
        f"{1000 * tflops / gbps:.0f} operations in the time of one byte from memory."
    )


@dataclass(frozen=True)
class Measured:
    """A group of a benchmark's result and the file that it came from."""

    file: Path
    environment: dict[str, Any]
    group: dict[str, Any]


def measured(operator: str, phase: str, dtype: str, host: bool = False) -> list[Measured]:
    """Return each case of an operator from the newest file that has it with ours, smallest first.

    The files are those of ``readme_table.files_of``.
    """
    files = readme_table.files_of(RESULTS, operator, host)
    payloads = [(file, json.loads(file.read_text())) for file in files]
    payloads.sort(key=lambda pair: pair[1]["environment"]["date"])
    found = {
        group["case"]: Measured(file, payload["environment"], group)
        for file, payload in payloads
        for group in payload["groups"]
        if (group["phase"], group["dtype"]) == (phase, dtype) and readme_table.has_ours(group)
    }
    return sorted(found.values(), key=lambda one: one.group["bytes_read"] or 0)


def providers(groups: Sequence[Measured]) -> list[str]:
    """Return the providers timed, in the order of the files, without ``auto``, which is one of
    them."""
    names = [record["provider"] for one in groups for record in one.group["records"]]
    return [name for name in dict.fromkeys(names) if name != "auto"]


def time_of(group: dict[str, Any], provider: str) -> float | None:
    """Return the median microseconds of a provider, or None."""
    times = [each["median_us"] for each in group["records"] if each["provider"] == provider]
    return times[0] if times else None


def table(groups: Sequence[Measured]) -> str:
    """Return a table of median microseconds per case and provider, and where they come from."""
    names = providers(groups)
    lines = [f"| us | {' | '.join(names)} | limit |", "|---" * (len(names) + 2) + "|"]
    for one in groups:
        limit = one.group["ceiling"]["median_us"] if one.group["ceiling"] else None
        times = [*(time_of(one.group, name) for name in names), limit]
        cells = [NONE if time is None else digits(time) for time in times]
        lines.append(f"| {one.group['case']} | {' | '.join(cells)} |")
    facts = groups[0].environment
    links = ", ".join(
        f"[{name}](../../benchmarks/nvidia-h200/{name})"
        for name in dict.fromkeys(one.file.name for one in groups)
    )
    first = groups[0].group
    return "\n".join(
        [
            *lines,
            "",
            f"{facts['device_name']}, torch {facts['torch']}, Triton {facts['triton']}, "
            f"{facts['date'][:10]}: {first['phase']}, {first['dtype']}, medians with a cold L2, "
            f"from {links}. The limit is {limit_of(groups)}.",
        ]
    )


def limit_of(groups: Sequence[Measured]) -> str:
    """Return what the column ``limit`` is the time of, by what bounds the operator."""
    said = {
        "memory": "the fastest kernel that only moves the same bytes",
        "compute": "a matrix product of as many operations",
    }
    bounds = {one.group["ceiling"]["bound"] for one in groups if one.group["ceiling"]}
    return ", or ".join(said[bound] for bound in sorted(bounds, reverse=True))


def host_table(one: Measured) -> str:
    """Return a table of the microseconds that a call of one case keeps the host busy."""
    records = [each for each in one.group["records"] if each["host_us"] is not None]
    names = " | ".join(each["provider"] for each in records)
    times = " | ".join(digits(each["host_us"]) for each in records)
    facts = one.environment
    return "\n".join(
        [
            f"| host us | {names} |",
            "|---" * (len(records) + 1) + "|",
            f"| {one.group['case']} | {times} |",
            "",
            f"{facts['device_name']}, torch {facts['torch']}, {facts['date'][:10]}, from "
            f"[{one.file.name}](../../benchmarks/nvidia-h200/{one.file.name}).",
        ]
    )


def trained(kind: str, file: Path, root: str = "../..") -> str:
    """Return the table of a training case study and where it comes from; empty without the file.

    ``root`` is the path from the page to the clone.
    """
    if not file.exists():
        return ""
    payload = json.loads(file.read_text())
    lines, what = TABLES[kind](payload)
    facts = payload["environment"]
    link = f"[{file.name}]({root}/benchmarks/nvidia-h200/{file.name})"
    where = f"{facts['device_name']}, torch {facts['torch']}, {facts['date'][:10]}"
    return "\n".join([*lines, "", f"{where}: {what}; {link}."])


def steps_table(payload: dict[str, Any]) -> tuple[list[str], str]:
    """Return a row per provider and precision, a column per case."""
    times = step_times(payload, "{provider}, {precision}")
    cases = list(dict.fromkeys(one["case"] for one in payload["measured"]))
    lines = [f"| us | {' | '.join(cases)} |", "|---" * (len(cases) + 1) + "|"]
    for name, found in times.items():
        cells = (digits(found[case]) if case in found else NONE for case in cases)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    largest = min(payload["largest_table"], max(KAGGLE_CARDINALITIES))
    return lines, f"us per step or forward, the largest table has {largest:,} rows"


def step_times(payload: dict[str, Any], label: str) -> dict[str, dict[str, float]]:
    """Return microseconds by ``label``, which is filled from each measurement, and by case."""
    times: dict[str, dict[str, float]] = {}
    for one in payload["measured"]:
        times.setdefault(label.format(**one), {})[one["case"]] = one["loop_us"]
    return times


def ranges_table(payload: dict[str, Any]) -> tuple[list[str], str]:
    """Return a row per variant, a column per range."""
    ranges = list(payload["variants"][0]["ranges_us"])
    lines = [
        f"| us | model | casts | {' | '.join(ranges)} | step | held-out loss |",
        "|---" * (len(ranges) + 5) + "|",
    ]
    for one in payload["variants"]:
        way = one["variant"]
        times = " | ".join(digits(one["ranges_us"][name]) for name in ranges)
        lines.append(
            f"| {way['loss']} | {way['model']} | {'float32' if way['casts'] else 'none'} "
            f"| {times} | {digits(one['step_us'])} | {one['held_out']:.3f} |"
        )
    settings = payload["settings"]
    return lines, (
        f"us per step of {settings['batch_size']} images of 256 cells, mean of {settings['runs']} "
        f"x {settings['steps']} steps, bfloat16 autocast"
    )


def modes_table(payload: dict[str, Any]) -> tuple[list[str], str]:
    """Return a row per mode."""
    rows = [
        f"| {one['mode']} | {one['loss']:.4f} | {one['accuracy']:.1%} | {digits(one['step_us'])} "
        f"| {byte_count(one['peak_bytes'])} |"
        for one in payload["modes"]
    ]
    settings = payload["settings"]
    return ["| mode | loss | 5 to 9 right | us per step | memory |", "|---" * 5 + "|", *rows], (
        f"layers of {settings['hidden']}, rank {settings['rank']}, {settings['steps']} steps of "
        f"{settings['batch_size']} rows{', bfloat16 autocast' if settings['amp'] else ''}"
    )


def loader_table(payload: dict[str, Any]) -> tuple[list[str], str]:
    """Return a row per batch size."""
    figures = payload["figures"]
    ways = ("in order", "given", "step", "fed")
    sizes = dict.fromkeys(name.partition(":")[0] for name in figures if ": given" in name)
    lines = [f"| million rows/s | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for size in sizes:
        rates = (digits(figures[f"{size}: {way} (M rows/s)"]) for way in ways)
        lines.append(f"| batch {size} | {' | '.join(rates)} |")
    return lines, (
        f"{payload['rows']:,} rows in the page cache; the loader alone in order and shuffled "
        "(given), the fused step in bfloat16 on one batch that stays, and fed by the loader"
    )


def parity_table(payload: dict[str, Any]) -> tuple[list[str], str]:
    """Return a row per mode and precision; the first is eager's."""
    seeds = list(next(iter(payload["runs"].values())))
    head = " | ".join(f"seed {seed}" for seed in seeds)
    lines = [f"| held-out loss | {head} | AUC | off at most |", "|---" * (len(seeds) + 3) + "|"]
    eager: dict[str, float] = {}
    for way, runs in payload["runs"].items():
        losses = {seed: runs[seed]["held_out"]["loss"] for seed in seeds}
        areas = [runs[seed]["held_out"]["auc"] for seed in seeds]
        eager = eager or losses
        off = max(abs(losses[seed] - eager[seed]) for seed in seeds)
        cells = " | ".join(f"{loss:.5f}" for loss in losses.values())
        span = f"{min(areas):.4f} to {max(areas):.4f}"
        lines.append(f"| {way} | {cells} | {span} | {f'{off:.1g}' if off else NONE} |")
    spread = max(eager.values()) - min(eager.values())
    plan = next(iter(payload["runs"].values()))[seeds[0]]
    return lines, (
        f"{plan['steps']:,} steps of {plan['batch_size']} rows, {plan['optimizer']} {plan['lr']}; "
        f"eager's own seeds differ by {spread:.1g}"
    )


TABLES = {
    "steps": steps_table,
    "ranges": ranges_table,
    "modes": modes_table,
    "loader": loader_table,
    "parity": parity_table,
}


def plot_name(operator: str, phase: str, dtype: str) -> str:
    return f"h200-{operator}-{phase}-{dtype}.png"


def draw(operator: str, phase: str, dtype: str) -> None:
    """Draw an operator's bandwidth against the case, or its arithmetic if that can be the limit.

    There is one line per provider, and a dashed one for the limit. Few cases are drawn as bars of
    their times.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = measured(operator, phase, dtype)
    if not groups:
        return
    title = f"{operator}, {phase}, {dtype}: {groups[0].environment['device_name']}"
    path = PICTURES / plot_name(operator, phase, dtype)
    if len(groups) < FEWEST_POINTS:
        rows: dict[str, dict[str, float]] = {name: {} for name in [*providers(groups), "limit"]}
        for one in groups:
            for name in rows:
                limit = one.group["ceiling"]
                us = limit["median_us"] if limit and name == "limit" else time_of(one.group, name)
                rows[name] |= {one.group["case"]: us} if us else {}
        draw_bars(rows, title, path)
        return
    figure, axis = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    cases = [one.group["case"] for one in groups]
    arithmetic = any((one.group["ceiling"] or {}).get("bound") == "compute" for one in groups)

    def rates(times: Sequence[float | None]) -> list[float]:
        if arithmetic:
            counts = [one.group["flops"] / 1e6 for one in groups]
        else:
            counts = [
                (one.group["bytes_read"] + one.group["bytes_written"]) / 1e3 for one in groups
            ]
        pairs = zip(counts, times, strict=True)
        return [count / us if us else float("nan") for count, us in pairs]

    for index, name in enumerate(providers(groups)):
        times = [time_of(one.group, name) for one in groups]
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        axis.plot(cases, rates(times), label=name, color=color, marker=marker)
    limits = [one.group["ceiling"] and one.group["ceiling"]["median_us"] for one in groups]
    axis.plot(cases, rates(limits), label="limit", color="#777777", ls="--")
    axis.set_ylabel("TFLOP/s" if arithmetic else "GB/s")
    axis.set_ylim(bottom=0)
    axis.tick_params("x", rotation=25, labelsize=8)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    axis.set_title(title)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def bars_name(file: str) -> str:
    return f"h200-{Path(file).stem}.png"


def draw_study(kind: str, file: Path) -> None:
    """Draw the times of a training case study as bars."""
    if not file.exists():
        return
    payload = json.loads(file.read_text())
    what = file.stem
    if kind == "modes":
        rows = {one["mode"]: {"step": one["step_us"]} for one in payload["modes"]}
    else:
        half = [one for one in payload["measured"] if one["precision"] == "bf16"]
        rows, what = step_times({"measured": half}, "{provider}"), f"{what}, bfloat16"
    title = f"{what}: {payload['environment']['device_name']}"
    draw_bars(rows, title, PICTURES / bars_name(file.name))


def draw_bars(rows: dict[str, dict[str, float]], title: str, path: Path) -> None:
    """Draw microseconds as bars in groups; a bar's length is its share of the group's longest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(case for found in rows.values() for case in found))
    longest = {case: max(found.get(case, 0) for found in rows.values()) for case in cases}
    inches = 0.7 + 0.2 * sum(map(len, rows.values())) + 0.1 * len(cases)
    figure, axis = pyplot.subplots(figsize=(7, inches), layout="constrained")
    middles, at = [], 0.0
    for case in cases:
        first = at
        for index, (name, found) in enumerate(rows.items()):
            if case in found:
                color = "#777777" if name == "limit" else COLORS[index % len(COLORS)]
                share = found[case] / longest[case]
                axis.barh(at, share, color=color)
                axis.text(
                    share + 0.01, at, f"{name}, {digits(found[case])} us", va="center", size=8
                )
                at += 1
        middles.append((first + at - 1) / 2)
        at += 0.5
    axis.set_yticks(middles, cases)
    axis.set(xlim=(0, 1.35), xticks=(0, 0.5, 1), xlabel="time, of the slowest", title=title)
    axis.invert_yaxis()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def draw_plots(name: str) -> None:
    """Draw every ``[plot: ...]`` and ``[bars: ...]`` of a story."""
    source = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    for found in re.findall(r"^# \[plot: (\S+) (\S+) (\S+)\]$", source, re.MULTILINE):
        draw(*found)
    for kind, file in re.findall(r"^# \[bars: (\S+) (\S+)\]$", source, re.MULTILINE):
        draw_study(kind, RESULTS / file)


def outputs_of(text: str) -> list[str]:
    """Read back from a page what the steps printed, with the lines that named pictures."""
    found = []
    for match in OUTPUT.finditer(text):
        pictures = re.match(r"(?:\n\n!\[[^\]]*\]\(pictures/[^)]+\))*", text[match.end() :])
        names = re.findall(r"pictures/([^)]+)", pictures[0]) if pictures else []
        found.append(match[2] + "".join(f"wrote {name}\n" for name in names))
    return found


def renewed(name: str) -> str:
    """Return the committed page with new text and figures and the outputs that it has."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    place = PRINTED_ON.search(text)
    assert place is not None
    return page(name, outputs_of(text), place[0])


def index() -> str:
    """Return the list of stories."""
    rows = []
    for name in STORIES:
        title, intro = headline((SCRIPTS / f"{name}.py").read_text(encoding="utf-8"))
        rows.append(f"- [{title}]({name}.md): {' '.join(intro.split(chr(10) * 2)[0].split())}")
    return "\n".join(
        [
            "# Tutorials",
            "",
            MADE.replace("script", "scripts"),
            "",
            "Each is a script that runs top to bottom on any machine; on a CPU, Triton kernels run "
            "in its interpreter. The pages show what the scripts printed, and beside it what an "
            "H200 measured, from the files under [benchmarks](../../benchmarks/README.md).",
            "",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(STORIES))
    parser.add_argument("--figures", action="store_true", help="run nothing")
    parser.add_argument(
        "--beside", action="store_true", help="write benchmarks/nvidia-h200/story.*"
    )
    options = parser.parse_args()
    for name in options.names or STORIES:
        if options.beside:
            print_beside(name, RESULTS)
        elif options.figures:
            renew(name)
        else:
            draw_plots(name)
            write(name, page(name, printed(load(name), PICTURES), where()))
    if not options.beside:
        write("README", index())


def renew(name: str) -> None:
    """Write a page with new text and figures and the outputs that it has."""
    draw_plots(name)
    write(name, renewed(name))


def write(name: str, text: str) -> None:
    (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()

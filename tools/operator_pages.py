"""docs/operators/: a page per operator and an index, made from contracts and benchmark results.

python tools/operator_pages.py    write them all, and remove pages of operators that are gone
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import readme_table
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fuselab import ops
from fuselab.op import Cost, FusedOp
from fuselab.report.numbers import NONE, byte_count, digits

CLONE = Path(__file__).resolve().parents[1]
FOLDER = CLONE / "docs" / "operators"
RESULTS = CLONE / "benchmarks"
Results = list[tuple[Path, dict[str, Any]]]  # files and their contents
MADE = "<!-- made by tools/operator_pages.py from the operator's contract; do not edit -->\n"
SECTIONS = ("Args", "Returns", "Raises")


def pages() -> dict[str, str]:
    """Return every page by file name, the index (README.md) first."""
    names = paged()
    written = {f"{name}.md": page(name) for name in names}
    return {"README.md": index(names)} | written


def paged() -> tuple[str, ...]:
    """Return the operators with a page of their own: all but in-place forms that share one."""
    known = ops.operators()
    return tuple(name for name in known if name.removesuffix("_") not in {*known} - {name})


def index(names: Sequence[str]) -> str:
    """Return the table of all operators."""
    rows = []
    for name in names:
        op = ops.contract(name)
        in_place = f", `{name}_`" if has_in_place(name) else ""
        gradient = "yes" if op.gradient is not None else "no"
        rows.append(
            f"| [`{name}`]({name}.md){in_place} | {summary(op)} | {', '.join(op.implementations)} "
            f"| {gradient} | {where_measured(name)} |"
        )
    return "\n".join(
        [
            "# Operators",
            "",
            MADE,
            'Each takes `implementation="auto"` too: `auto`, `reference` or one of the table\'s. '
            "[The contract](../contract.md) says how to add yours.",
            "",
            "| operator | computes | implementations | gradient | measured |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def page(name: str) -> str:
    """Return the page of the operator ``name``."""
    op, results = ops.contract(name), result_files(name)
    parts = [f"# {name}", "", MADE, code(signature(op)), "", *description(op)]
    if op.mutates:
        parts += [writes(op), ""]
    if has_in_place(name):
        parts += in_place(ops.contract(f"{name}_"))
    parts += implementations(op)
    parts += floor(op, results)
    parts += measured(results)
    parts += on_a_cpu(op)
    parts += limits(op)
    return "\n".join(parts).rstrip() + "\n"


def has_in_place(name: str) -> bool:
    return f"{name}_" in ops.operators()


def code(text: str) -> str:
    return textwrap.indent(text, "    ")


def signature(op: FusedOp) -> str:
    """Return the public call with its annotations, a line per argument if one line is too long."""
    shown = list(map(parameter, inspect.signature(op.reference).parameters.values()))
    line = f"{op.short_name}({', '.join(shown)})"
    if len(line) <= 90:
        return line
    return f"{op.short_name}(\n    " + ",\n    ".join(shown) + ",\n)"


def parameter(one: inspect.Parameter) -> str:
    """Format a parameter as the source spells it: ``dim: int = -1``."""
    annotation = one.annotation
    if not isinstance(annotation, str):
        annotation = inspect.formatannotation(annotation)
    default = "" if one.default is one.empty else f" = {one.default!r}"
    return f"{one.name}: {annotation}{default}"


def docstring(op: FusedOp) -> dict[str, str]:
    """Return the reference's docstring by section; ``""`` is the text before the first section."""
    text = inspect.cleandoc(op.reference.__doc__ or "")
    pieces = re.split(rf"^({'|'.join(SECTIONS)}):\n", text, flags=re.MULTILINE)
    found = {"": pieces[0].strip()}
    found |= dict(zip(pieces[1::2], map(textwrap.dedent, pieces[2::2]), strict=True))
    return {name: markdown(body.strip()) for name, body in found.items()}


def markdown(text: str) -> str:
    return text.replace("``", "`")


def joined(text: str) -> str:
    """Put a paragraph on one line, and escape bars, which would end a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def summary(op: FusedOp) -> str:
    return joined(docstring(op)[""].split("\n\n")[0]) or op.short_name


def entries(section: str) -> Iterator[tuple[str, str]]:
    """Yield ``name: text`` pairs of a section whose later lines are indented."""
    for entry in re.split(r"\n(?=\S)", section):
        name, _, text = entry.partition(":")
        yield name.strip(), joined(text)


def description(op: FusedOp) -> list[str]:
    """Return the description, the arguments, the result and the errors as Markdown."""
    sections = docstring(op)
    parts = [sections[""], ""]
    if "Args" in sections:
        parts += ["| argument | |", "|---|---|"]
        parts += [f"| `{name}` | {text} |" for name, text in entries(sections["Args"])]
        parts.append("")
    if "Returns" in sections:
        parts += [f"**Returns** {joined(sections['Returns'])}", ""]
    if "Raises" in sections:
        raised = list(entries(sections["Raises"]))
        named = all(said for _, said in raised)
        listed = " ".join(f"`{name}`: {said}" for name, said in raised)
        parts += [f"**Raises** {listed if named else joined(sections['Raises'])}", ""]
    return parts


def in_place(op: FusedOp) -> list[str]:
    return ["## In place", "", code(signature(op)), "", writes(op), ""]


def writes(op: FusedOp) -> str:
    names = ", ".join(f"`{name}`" for name in op.mutates)
    return (
        f"Writes over {names}: {', '.join(op.implementations)}. Inputs that need a gradient and "
        "tensors whose elements share memory are refused; version counters move."
    )


def implementations(op: FusedOp) -> list[str]:
    """Return the table of implementations: where each runs, and its ``supports``' docstring."""
    rows = []
    for name, one in op.implementations.items():
        backward = "forward, backward" if one.backward is not None else "forward"
        tuned = " and ".join(
            step
            for step, key in (("forward", name), ("backward", f"{name}_backward"))
            if key in op.configs
        )
        rows.append(
            f"| `{name}` | {one.device} | {backward} | {tuned or NONE} | {said(one.supports)} |"
        )
    return [
        "## Implementations",
        "",
        "| | runs on | has | `bench --tune` | limits |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"dtypes: {', '.join(text(dtype) for dtype in op.dtypes)}.",
        "",
        *(
            [f"`auto`: {said(op.prefer)}", ""]
            if op.prefer is not None and op.prefer.__doc__
            else []
        ),
        *(
            [
                "On a CPU `auto` takes the C++ kernel where it was measured faster than PyTorch "
                "for the machine's instruction set, and PyTorch elsewhere.",
                "",
            ]
            if op.cpu_cases
            else []
        ),
    ]


def said(function: Callable[..., Any]) -> str:
    """Return the first paragraph of a function's docstring, as a statement about its operator:
    without the verb "Return", and without the "None" and "else the reason" of ``supports``."""
    while isinstance(function, functools.partial):
        function = function.func
    paragraph = markdown(inspect.cleandoc(function.__doc__ or "")).split("\n\n")[0]
    text = joined(paragraph)
    text = re.sub(r"^Return None (?:for|if) (.*?)[,;] else the reason\.", r"\1.", text)
    text = text.removeprefix("Return ")
    return text[:1].upper() + text[1:] or NONE


def text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def floor_dtype(op: FusedOp, results: Results) -> torch.dtype:
    """Return the operator's first dtype, or the first one measured if that was not."""
    found = {group["dtype"] for _, payload in results for group in payload["groups"]}
    return next((dtype for dtype in op.dtypes if text(dtype) in found), op.dtypes[0])


def floor(op: FusedOp, results: Results) -> list[str]:
    """Return the table of the least work at the benchmark's cases."""
    dtype, rows = floor_dtype(op, results), []
    for case in [case for case in op.cases if "bench" in case.tags] or op.cases[:1]:
        try:
            with FakeTensorMode():
                made = case.make(torch.device("cpu"), dtype, torch.Generator().manual_seed(0))
                args = op.bind(made)
                costs = [op.cost(*args), op.cost_backward(*args) if op.cost_backward else None]
        except Exception:  # making the case reads tensor values, which fake tensors do not have
            continue
        rows.append(f"| {case.name} | {' | '.join(map(cost, costs))} |")
    if not rows:
        return []
    return [
        "## Floor",
        "",
        f"Every input byte read once, every output byte written once; {text(dtype)}.",
        "",
        "| case | forward | | | backward | | |",
        "|---|---|---|---|---|---|---|",
        "| | read | written | operations | read | written | operations |",
        *rows,
        "",
    ]


def cost(one: Cost | None) -> str:
    if one is None:
        return " | ".join([NONE] * 3)
    operations = f"{count(one.flops)} {one.unit}"
    return f"{byte_count(one.bytes_read)} | {byte_count(one.bytes_written)} | {operations}"


def count(number: int) -> str:
    """Format a number of operations with its SI prefix."""
    power = min(int(math.log10(number) // 3), 4) if number else 0
    return f"{number / 1000**power:.4g}{' kMGT'[power].strip()}"


def result_files(name: str) -> Results:
    """Return every benchmark of the operator, ``NAME.json`` and ``NAME.*.json``, with its payload.

    If a device has the same case, dtype and phase from several days, only the newest remain.
    """
    files = sorted([*RESULTS.glob(f"*/{name}.json"), *RESULTS.glob(f"*/{name}.*.json")])
    found = [(file, json.loads(file.read_text())) for file in files]

    def key_of(file: Path, group: dict[str, Any]) -> tuple[str, ...]:
        return file.parent.name, group["case"], group["dtype"], group["phase"]

    newest: dict[tuple[str, ...], str] = {}
    for file, payload in sorted(found, key=lambda pair: day_of(pair[1])):
        newest |= {key_of(file, group): day_of(payload) for group in payload["groups"]}
    for file, payload in found:
        payload["groups"] = [
            group for group in payload["groups"] if newest[key_of(file, group)] == day_of(payload)
        ]
    return [(file, payload) for file, payload in found if payload["groups"]]


def day_of(payload: dict[str, Any]) -> str:
    return str(payload["environment"]["date"])[:10]


def where_measured(name: str) -> str:
    found = [f"{file.parent.name}, {day_of(payload)}" for file, payload in result_files(name)]
    return "; ".join(dict.fromkeys(found)) or NONE


def measured(results: Results) -> list[str]:
    """Return a table per result file: eager, the best peer, and every implementation timed.

    ``auto`` has a column if the implementation that it takes was not timed by its own name.
    """
    parts = ["## Measured", ""]
    for file, payload in results:
        environment = payload["environment"]
        groups = payload["groups"]
        ours = list(
            dict.fromkeys(
                record["provider"]
                for group in groups
                for record in group["records"]
                if record["kind"] == "implementation" or taken_unnamed(record, group)
            )
        )
        parts += [
            f"{environment['device_name']}, torch {environment['torch']}, Triton "
            f"{environment['triton']}, {day_of(payload)} "
            f"([all of it](../../benchmarks/{file.parent.name}/{file.name})): median us, cold "
            "cache, and the share of the limit. Tiny cases: host time.",
            "",
            f"| case | | eager | best peer | {' | '.join(ours)} |",
            "|---|---" * 2 + "|---" * len(ours) + "|",
            *(measured_row(group, ours) for group in groups),
            "",
        ]
    if len(parts) == 2:
        parts += ["No result of `fuselab bench` is on file.", ""]
    return parts


def on_a_cpu(op: FusedOp) -> list[str]:
    """Return a table of how ``auto`` compares with eager PyTorch over the sizes timed on CPUs."""
    if not op.cpu_cases:
        return []
    parts = [
        "## On a CPU",
        "",
        "Eager's time over `auto`'s, 64 kB to 200 MB of float32, forward and, where there is a "
        "gradient, forward with backward ([all rows](../../benchmarks/cpu/operators.md)):",
        "",
        "| instruction set | machine | rows | least | geometric mean | most |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in readme_table.cpu_results().items():
        rows = [row for row in found["rows"] if row["operator"] == op.short_name]
        ratios = [row["eager_over_auto"][0] for row in rows]
        if ratios:
            where = found["environments"][rows[0]["environment"]]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            parts.append(
                f"| {name} | {where['threads']} threads of {where['cpu']}, torch {where['torch']}, "
                f"{where['date']} | {len(ratios)} | {min(ratios):.2f} | {mean:.2f} "
                f"| {max(ratios):.2f} |"
            )
    return [*parts, ""]


def taken_unnamed(record: dict[str, Any], group: dict[str, Any]) -> str | None:
    """Return what ``auto``'s record says it took, if no other record of the group timed that."""
    says = "auto takes "  # in the note of ``fuselab bench``
    if record["kind"] != "auto" or not (record["note"] or "").startswith(says):
        return None
    taken = str(record["note"]).removeprefix(says)
    timed = {other["provider"] for other in group["records"] if other["median_us"] is not None}
    return None if taken in timed else taken


def measured_row(group: dict[str, Any], ours: Sequence[str]) -> str:
    by_host = group["verdicts_by"] == "host time"
    key = "host_us" if by_host else "median_us"
    records = {record["provider"]: record for record in group["records"]}

    def time(name: str) -> str:
        record = records.get(name)
        if record is None or record.get(key) is None:
            return NONE
        share = record["ceiling_share"]
        limit = "" if by_host or share is None else f" ({100 * share:.0f} %)"
        if record["kind"] != "auto":
            return f"{digits(record[key])}{limit}"
        taken = taken_unnamed(record, group)
        if taken is None:
            return NONE
        # The note is about the forward; the backward's choice may differ.
        by = f" {taken}" if group["phase"] == "forward" else ""
        return f"{digits(record[key])}{limit}{by}"

    peers = {
        name: record[key]
        for name, record in records.items()
        if record["kind"] in ("peer", "torchscript", "compile") and record.get(key) is not None
    }
    best = min(peers, key=peers.__getitem__, default=None)
    cells = [
        group["case"],
        f"{group['dtype']} {group['phase']}",
        time("eager"),
        f"{time(best)} {best}" if best else NONE,
        *map(time, ours),
    ]
    return f"| {' | '.join(cells)} |"


def limits(op: FusedOp) -> list[str]:
    """Return what the operator does not do."""
    lines = []
    if op.gradient is None:
        lines.append("It has no gradient.")
    else:
        for name, instead in op.gradient.frozen.items():
            lines.append(f"`{name}` has no gradient; {markdown(instead)}.")
    if op.nondeterministic is not None:
        lines.append(
            f"Not deterministic: {markdown(op.nondeterministic)}; it obeys "
            "`torch.use_deterministic_algorithms`."
        )
    return ["## Limits", "", *(f"- {line}" for line in lines), ""] if lines else []


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for name, content in made.items():
        (FOLDER / name).write_text(content, encoding="utf-8")
    for file in FOLDER.glob("*.md"):
        if file.name not in made:
            file.unlink()


if __name__ == "__main__":
    main()

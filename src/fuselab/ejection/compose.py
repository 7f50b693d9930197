"""Write a function that is cut into regions: a package for each, and the function over them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from fuselab.ejection.calls import call_text
from fuselab.ejection.capture import source_line
from fuselab.ejection.fold import formatted
from fuselab.ejection.regions import Cut, Region, call_name, is_number
from fuselab.ejection.returned import namedtuples_in, nodes_in, structure_text
from fuselab.ejection.write import annotated, draw_text, example_case, package_files, test_text
from fuselab.ejection.write_module import module_text
from fuselab.ejection.write_reference import reference_text


def composition_files(cut: Cut) -> dict[str, str]:
    """Return the text of every file by its name; those of a region's package as ``NAME/file``."""
    files = {
        "__init__.py": _init(cut),
        "reference.py": formatted(reference_text(cut.captured, ())),
        "composed.py": formatted(_composed(cut)),
        f"test_{cut.name}.py": test_text(cut.name),
        "page.md": _page(cut),
    }
    if isinstance(cut.captured.function, nn.Module):
        files["module.py"] = module_text(cut.captured, f"from .composed import {cut.name}")
    for region in cut.regions:
        for name, text in package_files(region.package).items():
            files[f"{region.name}/{name}"] = text
    return files


def describe(cut: Cut) -> dict[str, Any]:
    """Return the facts for JSON: what each operator computes, and what stays a PyTorch call."""
    return {
        "operator": f"ejected::{cut.name}",
        "kernels": [
            kernel for region in cut.regions for kernel in region.package.describe()["kernels"]
        ],
        "operators": [
            {"name": region.name, "calls": [call_name(node) for node in region.calls]}
            for region in cut.regions
        ],
        "pytorch_calls": [
            {"name": call_name(node), "line": source_line(node), "reason": cut.reason(node)}
            for node in cut.calls
        ],
    }


def _init(cut: Cut) -> str:
    return f'''\
"""{cut.name}, ejected from plain PyTorch by fuselab."""

from .composed import COMPOSITION, {cut.name}

__all__ = ["COMPOSITION", "{cut.name}"]
'''


def _composed(cut: Cut) -> str:
    drawn = draw_text(cut)
    names = ["Case", "Composition", *(["Draw"] if drawn else []), "Inputs"]
    case = example_case(cut)
    if not drawn and "Inputs" not in case:
        names.remove("Inputs")
    contract = [name for name in names if name != "Composition"]
    signature = ["from fuselab.runtime.signature import accepted"] if drawn else []
    classes: dict[str, Any] = dict(namedtuples_in(cut.captured.returned.structure))
    frozen = [one.name for one in cut.captured.arguments if one.name in cut.frozen]
    lines = [
        f'"""{cut.name}: its chains are fused operators, everything else stays a PyTorch call."""',
        "",
        "from __future__ import annotations",
        "",
        *(["from collections import namedtuple"] if classes else []),
        "from typing import Any",
        "",
        "import torch",
        "from torch import Tensor",
        "",
        "from fuselab.composition import Composition",
        f"from fuselab.op import {', '.join(contract)}",
        *signature,
        "",
        *(
            line
            for name in sorted(one.name for one in cut.regions)
            for line in (f"from .{name} import OP as {name.upper()}", f"from .{name} import {name}")
        ),
        "from .reference import reference",
        "",
        "",
        *(f'{name} = namedtuple("{name}", {kind._fields!r})' for name, kind in classes.items()),
        *(["", ""] if classes else []),
        _function(cut),
        "",
        *([drawn, ""] if drawn else []),
        case,
        "COMPOSITION = Composition(",
        f'    name="ejected::{cut.name}",',
        f"    function={cut.name},",
        "    reference=reference,",
        f"    operators=({''.join(f'{one.name.upper()}, ' for one in cut.regions).rstrip()}),",
        "    cases=(_EXAMPLE,),",
        *([f"    outputs={count},"] if (count := _tensors(cut)) != 1 else []),
        *(["    draw=draw,"] if drawn else []),
        *([f"    frozen={tuple(frozen)!r},".replace("'", '"')] if frozen else []),
        ")",
    ]
    return "\n".join(lines) + "\n"


def _tensors(cut: Cut) -> int:
    """Return how many tensors the function returns."""
    found = nodes_in(cut.captured.returned.structure)
    return sum(isinstance(node.meta["example_value"], Tensor) for node in found)


def _function(cut: Cut) -> str:
    names = dict(cut.names)
    for node in cut.captured.traced.graph.nodes:
        if is_number(node):
            names[node] = cut.sizes.value_text(node.meta["example_value"])
    body = [line for step in cut.steps for line in _step(step, names)]
    structure = cut.captured.returned.structure
    body.append(f"return {structure_text(structure, lambda node: names[cut.newest(node)])}")
    used = "\n".join(body)
    sizes = [
        line
        for line in cut.sizes.statements(cut.parameters)
        if _is_word(line.partition(" = ")[0], used)
    ]
    return (
        f"def {cut.name}({annotated(cut.parameters)}) -> Any:\n"
        f'    """Compute what reference.py defines, with fused operators."""\n'
        + textwrap.indent("\n".join([*sizes, *body]), "    ")
        + "\n"
    )


def _is_word(word: str, text: str) -> bool:
    return word in text.replace("(", " ").replace(")", " ").replace(",", " ").split()


def _step(step: Region | fx.Node, names: Mapping[fx.Node, str]) -> list[str]:
    if isinstance(step, Region):
        given = ", ".join(names[one] for one in step.inputs)
        results = ", ".join(names[one] for one in step.outputs)
        return [f"{results} = {step.name}({given})"]
    if not step.users:
        return [call_text(step, names)]
    return [f"{names[step]} = {call_text(step, names)}"]


# --- the page -------------------------------------------------------------------------------------


def _page(cut: Cut) -> str:
    calls = cut.calls
    lines = [
        f"# {cut.name}",
        "",
        f"{len(cut.regions)} fused operators take the place of "
        f"{sum(len(one.calls) for one in cut.regions)} PyTorch calls; {len(calls)} calls stay. "
        "In the order in which they run:",
        "",
        "| step | lines of the code | why |",
        "|---|---|---|",
    ]
    for step in cut.steps:
        if isinstance(step, Region):
            label = f"[{step.name}]({step.name}/page.md)"
            lines.append(f"| {label} | {_lines(step.calls)} | fused |")
        else:
            lines.append(f"| {call_name(step)} | {_lines([step])} | {cut.reason(step)} |")
    lines += ["", "The page of each operator shows its kernels and the bytes before and after."]
    return "\n".join(lines) + "\n"


def _lines(calls: Sequence[fx.Node]) -> str:
    found = dict.fromkeys(source_line(node).partition(": ")[2] for node in calls)
    return "<br>".join(f"`{line}`".replace("|", "\\|") for line in found if line)

"""Write a function that is cut into regions: a package for each, and the function over them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fuselab.ejection.blocks import Blocks, blocks_of, in_blocks
from fuselab.ejection.calls import call_name, call_text, is_number, source_line
from fuselab.ejection.copied import FOLDER
from fuselab.ejection.dropout import RUNTIME
from fuselab.ejection.fold import formatted
from fuselab.ejection.followed_dtypes import followed
from fuselab.ejection.regions import Cut, Region
from fuselab.ejection.returned import class_texts, classes_in, nodes_in, structure_text
from fuselab.ejection.whole import Whole
from fuselab.ejection.write import (
    draw_text,
    example_case,
    package_files,
    reference_import,
    test_text,
)
from fuselab.ejection.write_init import (
    flat_parameters,
    public_docstring,
    sequence_import,
)
from fuselab.ejection.write_launchers import where_it_runs
from fuselab.ejection.write_module import module_text
from fuselab.ejection.write_reference import reference_text
from fuselab.ejection.write_signature import (
    is_called_as_operator,
    opening,
    option_import,
    public_signature,
)
from fuselab.ejection.write_standalone import operator_files, page_section, with_runtime
from fuselab.ejection.write_whole import whole_files

COMPOSED = "composed.py"  # the file of a folder that holds a Composition


def composition_files(
    cut: Cut, standalone: bool = False, whole: Whole | None = None
) -> dict[str, str]:
    """Return the text of every file by its name; those of a region's package as ``NAME/file``. A
    ``standalone`` package has the parts of fuselab's runtime that it uses, and its function in a
    file that does not import fuselab. ``whole`` is the function as one kernel, a package too."""
    files = {
        "__init__.py": _init(cut, standalone),
        "reference.py": formatted(reference_text(cut.captured, ())),
        COMPOSED: formatted(_composed(cut, standalone, whole)),
        f"test_{cut.name}.py": test_text(cut.name, standalone),
        "page.md": _page(cut, whole),
    }
    if standalone:
        files["steps.py"] = formatted("\n".join(_steps(cut)) + "\n")
        files["page.md"] += page_section()
    if isinstance(cut.captured.function, nn.Module):
        files["module.py"] = module_text(cut.captured)
    for region in cut.operators:
        operator = region.package
        written = operator_files(operator, f"..{FOLDER}") if standalone else package_files(operator)
        for name, text in written.items():
            files[f"{region.name}/{name}"] = text
    if whole is not None:
        for name, text in whole_files(whole, cut).items():
            files[f"{whole.name}/{name}"] = text
    return with_runtime(files) if standalone else files


def describe(cut: Cut) -> dict[str, Any]:
    """Return the facts for JSON: what each operator computes, and what stays a PyTorch call."""
    return {
        "operator": f"ejected::{cut.name}",
        "where": where_it_runs(cut),
        "kernels": [
            kernel for region in cut.operators for kernel in region.package.describe()["kernels"]
        ],
        "operators": [
            {"name": region.name, "calls": [call_name(node) for node in region.calls]}
            for region in cut.operators
        ],
        "pytorch_calls": [
            {"name": call_name(node), "line": source_line(node), "reason": cut.reason(node)}
            for node in cut.calls
        ],
    }


def _init(cut: Cut, standalone: bool) -> str:
    module, published = ("steps", []) if standalone else ("composed", ["COMPOSITION"])
    listed = ", ".join(f'"{name}"' for name in (*published, cut.name))
    if not is_called_as_operator(cut.captured):
        return _taking_init(cut, module, published, listed)
    return f'''\
"""{cut.name}, ejected from plain PyTorch by fuselab."""

from .{module} import {", ".join([*published, cut.name])}

__all__ = [{listed}]
'''


def _taking_init(cut: Cut, module: str, published: Sequence[str], listed: str) -> str:
    """Return the text of ``__init__.py`` with a function that takes lists and dicts of tensors
    apart, tensors that it does not read, or options."""
    captured = cut.captured
    given = [*captured.of_users, *([captured.seed] if captured.seed else [])]
    found = public_signature(captured)
    lines = opening(captured, found)
    lines.append(f"return _of_tensors({', '.join(given)})")
    told = "Compute what reference.py defines, with fused operators."
    imports = [*sequence_import(found.text()), "from typing import Any"]
    names = ", ".join([*published, f"{cut.name} as _of_tensors"])
    body = textwrap.indent("\n".join(lines), "    ")
    own = option_import(body)
    imported = ["import torch"] if "torch." in f"{found.text()}\n{body}" else []
    imported += ["from torch import Tensor", *([""] if own else []), *own]
    return formatted(
        f'''\
"""{cut.name}, ejected from plain PyTorch by fuselab."""

from __future__ import annotations

{chr(10).join(imports)}

{chr(10).join(imported)}

from .{module} import {names}


def {cut.name}({found.text()}) -> Any:
    """{public_docstring(captured, told)}"""
{body}


__all__ = [{listed}]
'''
    )


def _composed(cut: Cut, standalone: bool, whole: Whole | None) -> str:
    """Return the text of the module that holds the composition; ``steps.py`` has the function of a
    standalone package."""
    drawn = draw_text(cut)
    case = example_case(cut)
    contract = [
        "Case",
        *(["Draw"] if drawn else []),
        *(["Inputs"] if "Inputs" in case + drawn else []),
    ]
    signature = ["from fuselab.runtime.signature import accepted"] if drawn else []
    chosen = [] if whole is None else ["from fuselab.runtime.forms import Forms"]
    imports = [
        "from fuselab.composition import Composition",
        f"from fuselab.op import {', '.join(contract)}",
        *chosen,
        *([] if standalone else _dropout_imports(cut)),
        *signature,
        "",
    ]
    operators = [one.name for one in cut.operators]
    regions = sorted(operators)
    if whole is not None:
        regions = sorted([*regions, whole.name])
        operators.append(whole.name)
    frozen = [one.name for one in cut.captured.arguments if one.name in cut.frozen]
    if standalone:
        head = [
            f'"""The contract of {cut.name}, by which fuselab checks and times it."""',
            "",
            "from __future__ import annotations",
            "",
            *(["import torch"] if "torch." in case else []),
            *(["from torch import Tensor"] if drawn else []),
            *([""] if drawn or "torch." in case else []),
            *imports,
            *(f"from .{name}.op import OP as {name.upper()}" for name in regions),
            reference_import(cut),
            f"from .steps import {cut.name}",
            "",
        ]
    else:
        imported = [
            line
            for name in regions
            for line in (f"from .{name} import OP as {name.upper()}", f"from .{name} import {name}")
        ]
        if whole is not None:
            imported.append(f"from .{whole.name}.op import supports")
        head = _steps(cut, [*imports, *imported, reference_import(cut)], whole)
    lines = [
        *head,
        "",
        *([drawn, ""] if drawn else []),
        case,
        "COMPOSITION = Composition(",
        f'    name="ejected::{cut.name}",',
        f"    function={cut.name},",
        "    reference=reference,",
        f"    operators=({''.join(f'{one.upper()}, ' for one in operators).rstrip()}),",
        *([f"    steps={cut.name}_of_operators,"] if whole is not None else []),
        "    cases=(_EXAMPLE,),",
        *([f"    outputs={count},"] if (count := _tensors(cut)) != 1 else []),
        *(["    draw=draw,"] if drawn else []),
        *(["    drawing=drawing,"] if cut.captured.seed is not None else []),
        *([f"    frozen={tuple(frozen)!r},".replace("'", '"')] if frozen else []),
        ")",
    ]
    return "\n".join(lines) + "\n"


def _steps(cut: Cut, imports: Sequence[str] = (), whole: Whole | None = None) -> list[str]:
    """Return the lines of a module with the function; without ``imports`` it imports the operators'
    functions alone."""
    imported, classes = class_texts(classes_in(cut.captured.returned.structure))
    operators = [
        f"from .{name} import {name}" for name in sorted(one.name for one in cut.operators)
    ]
    reference = ["from .reference import reference"] if _other_sizes(cut) else []
    return [
        f'"""{cut.name}: its chains are fused operators, everything else stays a PyTorch call."""',
        "",
        "from __future__ import annotations",
        "",
        *sorted({*imported, "from typing import Any"}),
        "",
        "import torch",
        "from torch import Tensor",
        "",
        *(imports or [*_dropout_imports(cut), *operators, *reference]),
        "",
        "",
        *classes,
        *(["", ""] if classes else []),
        _function(cut, whole),
    ]


def _tensors(cut: Cut) -> int:
    """Return how many tensors the function returns."""
    found = nodes_in(cut.captured.returned.structure)
    return sum(isinstance(node.meta["example_value"], Tensor) for node in found)


def _function(cut: Cut, whole: Whole | None) -> str:
    names: dict[Any, str] = {**cut.names, torch.device: f"{cut.parameters[0]}.device"}
    names |= followed([one.node for one in cut.captured.arguments], names)
    for node in cut.captured.traced.graph.nodes:
        if is_number(node):
            names[node] = cut.sizes.value_text(node.meta["example_value"])
    body = in_blocks(line for step in cut.steps for line in _step(cut, step, names))
    body = [*_other_sizes(cut), *body]
    structure = cut.captured.returned.structure
    body.append(f"return {structure_text(structure, lambda node: names[cut.newest(node)])}")
    used = "\n".join(body)
    sizes = [
        line
        for line in cut.sizes.statements(cut.parameters)
        if _is_word(line.partition(" = ")[0], used)
    ]
    told = "Compute what reference.py defines, with fused operators."
    if cut.captured.seed is not None:
        sizes.append(
            f"{cut.captured.seed} = seed_tensor({cut.captured.seed}, {names[torch.device]})"
        )
    whole_text, name = "", cut.name
    if whole is not None:
        name = f"{cut.name}_of_operators"
        given = ", ".join(cut.parameters)
        whole_text = (
            f"\n\n_FORMS = Forms({whole.name}, {name}, supports)\n"
            f"\n\ndef {cut.name}({flat_parameters(cut.captured)}) -> Any:\n"
            '    """Compute it in one kernel where that can be done and is faster, as timed at\n'
            '    the first call of its kind, else by operators."""\n'
            f"    return _FORMS({given})\n"
        )
    return (
        f"def {name}({flat_parameters(cut.captured)}) -> Any:\n"
        f'    """{public_docstring(cut.captured, told)}"""\n'
        + textwrap.indent("\n".join([*sizes, *body]), "    ")
        + "\n"
        + whole_text
    )


def _is_word(word: str, text: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(word)}\b", text) is not None


def _other_sizes(cut: Cut) -> list[str]:
    """Return the statements that leave sizes to the reference which the steps are not right for:
    those for which the user's code decides otherwise, and dimensions that are the example's."""
    wanted = where_it_runs(cut)
    if not wanted:
        return []
    condition = wanted[0] if len(wanted) == 1 else " and ".join(f"({one})" for one in wanted)
    called = ", ".join(cut.parameters)
    return [f"if not ({condition}):", f"    return reference({called})"]


def _step(cut: Cut, step: Region | fx.Node, names: Mapping[Any, str]) -> list[tuple[Blocks, str]]:
    """Return the lines of a step, each with the blocks that it stands in. The function of a region
    has those of its calls inside."""
    if isinstance(step, Region):
        given = [names[one] for one in step.inputs]
        own = step.package.captured.seed
        if own is not None:
            given.append(f"{own}={cut.captured.seed}")
        results = ", ".join(names[one] for one in step.outputs)
        return [((), f"{results} = {step.name}({', '.join(given)})")]
    text = call_text(step, names)
    line = f"{names[step]} = {text}" if step.users else text
    if step in cut.numbers:
        masks = f"SeededDropout({cut.captured.seed}, ({cut.numbers[step]},))"
        return [((*blocks_of(step), masks), line)]
    return [(blocks_of(step), line)]


def _dropout_imports(cut: Cut) -> list[str]:
    """Return the line that imports what the function makes seeds and masks with."""
    if cut.captured.seed is None:
        return []
    is_called = any(step in cut.numbers for step in cut.calls)
    names = [*(["SeededDropout"] if is_called else []), "seed_tensor"]
    return [f"from {RUNTIME} import {', '.join(names)}"]


# --- the page -------------------------------------------------------------------------------------


def _page(cut: Cut, whole: Whole | None) -> str:
    calls = cut.calls
    count = len(cut.regions)
    plural = "" if len(cut.operators) == 1 else "s"
    repeated = f", called {count} times," if count != len(cut.operators) else ""
    takes = "takes" if len(cut.operators) == 1 else "take"
    lines = [
        f"# {cut.name}",
        "",
        f"{len(cut.operators)} fused operator{plural}{repeated} {takes} the place of "
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
    if where := where_it_runs(cut):
        lines += ["", f"The operators run where {' and '.join(f'`{one}`' for one in where)}."]
    lines += ["", "The page of each operator shows its kernels and the bytes before and after."]
    if whole is not None:
        lines += [
            "",
            f"On a GPU, where no gradient is wanted, [one kernel]({whole.name}/page.md) computes",
            "all of it. Its page compares the two forms.",
        ]
    return "\n".join(lines) + "\n"


def _lines(calls: Sequence[fx.Node]) -> str:
    found = dict.fromkeys(source_line(node).partition(": ")[2] for node in calls)
    return "<br>".join(f"`{line}`".replace("|", "\\|") for line in found if line)

"""Write ``__init__.py``: the public function, which returns what the ejected function returns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fuselab.ejection.calls import call_text
from fuselab.ejection.capture import Captured, argument_name
from fuselab.ejection.dropout import RUNTIME
from fuselab.ejection.package import Package
from fuselab.ejection.plan import Namer
from fuselab.ejection.returned import (
    class_texts,
    classes_in,
    is_same_view,
    nodes_in,
    source_of,
    structure_text,
)
from fuselab.ejection.write_reference import defined_in_reference
from fuselab.ejection.write_signature import (
    CHOICE,
    Parameters,
    is_called_as_operator,
    opening,
    option_import,
    public_signature,
    seed_parameter,
)


def init_text(package: Package, of_tensors: bool = False) -> str:
    """Return the text of ``__init__.py``; with a public function that takes each tensor as an
    argument of its own if ``of_tensors``, else with one that takes what the user's function does.
    """
    name = package.name
    is_same = package.is_plain and (of_tensors or is_called_as_operator(package.captured))
    if is_same and not package.is_constant and package.captured.seed is None:
        return f'''\
"""{name}, ejected from plain PyTorch by fuselab."""

import fuselab

from .op import OP

{name} = fuselab.operator(OP)

__all__ = ["OP", "{name}"]
'''
    imports = ["import fuselab", *seed_import(package), "", "from .op import OP"]
    operator = "_operator = fuselab.operator(OP)\n"
    return public_text(package, imports, operator, ["OP"], of_tensors)


def public_text(
    package: Package,
    imports: Sequence[str],
    operator: str,
    published: Sequence[str] = (),
    of_tensors: bool = False,
) -> str:
    """Return the text of a module with the public function. ``imports`` and the statement
    ``operator`` make ``_operator`` known; ``published`` are further names for users. The function
    takes what ``init_text`` says."""
    name = package.name
    found = _parameters(package.captured, of_tensors)
    body = _body(package, found)
    more = [] if CHOICE in found.names else [f'{CHOICE}: str = "auto"']
    told = f"Compute {name} by its kernels, and return what the ejected function returns."
    return f'''\
"""{name}, ejected from plain PyTorch by fuselab."""

from __future__ import annotations

{_imports(package, imports, found.text(), body)}

{operator}{_named_tuples(package)}

def {name}({found.text(more)}) -> Any:
    """{public_docstring(package.captured, told)}"""
{textwrap.indent(body, "    ")}


__all__ = [{", ".join(f'"{one}"' for one in (*published, name))}]
'''


def flat_parameters(captured: Captured) -> str:
    """Return the parameters of a function that takes every tensor as an argument of its own, and
    the seed of dropouts."""
    return _parameters(captured, of_tensors=True).text()


def _parameters(captured: Captured, of_tensors: bool) -> Parameters:
    """Return the parameters of the public function, or those of a function of all tensors."""
    if not of_tensors:
        return public_signature(captured)
    tensors = [f"{name}: Tensor" for name in captured.of_users]
    return Parameters([*tensors, *seed_parameter(captured)], of_tensors=True)


def public_docstring(captured: Captured, told: str) -> str:
    """Return the docstring of a public function, without its quotes, which begins with ``told``."""
    if captured.seed is None:
        return told
    return (
        f"{told}\n\n    Dropouts take their masks from ``{captured.seed}``, equal ones from equal "
        "seeds; None draws a seed\n    from PyTorch's generator.\n    "
    )


def sequence_import(parameters: str) -> list[str]:
    """Return the line that imports the type of lists among the parameters."""
    return ["from collections.abc import Sequence"] if "Sequence[Tensor]" in parameters else []


def seed_import(package: Package) -> list[str]:
    """Return the line that imports what the public function makes a seed with."""
    return [] if package.captured.seed is None else [f"from {RUNTIME} import seed_tensor"]


def _imports(package: Package, imports: Sequence[str], given: str, body: str) -> str:
    defined, others = _classes(package)
    any_import = "from typing import Any"
    own = imports.index("") if "" in imports else len(imports)  # where the package's own begin
    lines = [
        *sorted({*class_texts(others)[0], *sequence_import(given), any_import}),
        "",
        *(["import torch"] if re.search(r"\btorch\.", f"{given}\n{body}") else []),
        "from torch import Tensor",
        "",
        *imports[:own],
        *option_import(body),
        *imports[own:],
        *([f"from .reference import {', '.join(defined)}"] if defined else []),
    ]
    return "\n".join(lines)


def _classes(package: Package) -> tuple[list[str], dict[str, Any]]:
    """Return the classes that ``reference.py`` defines, and the others that are returned."""
    found = classes_in(package.returned.structure)
    copied = defined_in_reference(package.formulas)
    defined = sorted(name for name in found if name in copied)
    return defined, {name: kind for name, kind in found.items() if name not in defined}


def _named_tuples(package: Package) -> str:
    lines = class_texts(_classes(package)[1])[1]
    return "".join(f"{line}\n" for line in lines)


def _body(package: Package, found: Parameters) -> str:
    """Return the call of the operator, the views of its outputs and of the arguments, and the
    return of the structure."""
    behind = ".detach()" if package.is_constant else ""
    called = ", ".join(f"{name}{behind}" for name in package.taken)
    chosen = "" if CHOICE in found.names else f", {CHOICE}={CHOICE}"
    outputs = "" if package.in_place else f"{', '.join(package.output_names)} = "
    lines = [f"{outputs}_operator({called}{chosen})"]
    if package.captured.seed is not None:
        seed, like = package.captured.seed, package.parameters[0]
        lines.insert(0, f"{seed} = seed_tensor({seed}, {like}.device)")
    # The operator's last outputs are the new values of the arguments that are written over.
    names: dict[fx.Node, str] = dict(
        zip(package.returned.results, package.output_names, strict=False)
    )
    copied = () if package.in_place else package.captured.written
    lines += [f"{name}.copy_(new_{name}.detach())" for name in copied]
    for node, keeps in zip(package.returned.results, package.keeps_gradient, strict=False):
        if not keeps:
            lines.append(f"{names[node]} = {names[node]}.detach()")
    for node, of in zip(package.returned.results, package.gradients_of, strict=False):
        if of is not None:
            needed = " or ".join(f"{name}.requires_grad" for name in of)
            needed = f"({needed})" if len(of) > 1 else needed
            lines.append(f"if {names[node]}.requires_grad and not {needed}:")
            lines.append(f"    {names[node]} = {names[node]}.detach()")
    namer = Namer([*package.parameters, *package.output_names, *package.sizes.names.values()])
    for node in package.formulas.traced.graph.nodes:
        if node.op == "placeholder":
            names[node] = argument_name(node)
        if isinstance(node.meta.get("example_value"), torch.SymInt):
            names[node] = package.sizes.text(node.meta["example_value"].node.expr)

    def define(node: fx.Node) -> None:
        if node in names:
            return
        for operand in node.all_input_nodes:
            define(operand)
        source = source_of(node)
        if source is not None and is_same_view(node, source):
            names[node] = names[source]
            return
        text = call_text(node, names)
        names[node] = namer.name(node.name)
        lines.append(f"{names[node]} = {text}")

    for node in nodes_in(package.returned.structure):
        define(node)
    lines.append(f"return {structure_text(package.returned.structure, names.__getitem__)}")
    text = "\n".join(lines)
    sizes = [
        line
        for line in package.sizes.statements(package.parameters)
        if re.search(rf"\b{line.partition(' = ')[0]}\b", text)
    ]
    first = opening(package.captured, found)
    if package.lists:  # the operator takes them whole
        used = set(re.findall(r"\w+", text))
        made = [re.match(r"(\w+) = ", line) for line in first]
        first = [
            line for line, one in zip(first, made, strict=True) if one is None or one[1] in used
        ]
    return "\n".join([*first, *sizes, text])

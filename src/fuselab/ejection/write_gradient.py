"""Write ``gradient.py``: the gradient as PyTorch formulas, from which second derivatives come."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import fx

from fuselab.ejection.calls import INFIX
from fuselab.ejection.capture import Captured, with_sources
from fuselab.ejection.dropout import KEPT, RUNTIME
from fuselab.ejection.graph_nodes import expression_of
from fuselab.ejection.lower import constant_tensor
from fuselab.ejection.package import Package
from fuselab.ejection.plan import Sizes
from fuselab.ejection.returned import comma
from fuselab.ejection.steps import as_written

aten = torch.ops.aten

# Autograd's own markers; with them the formulas would have no derivative.
_MARKERS = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)
_OMITTED = ("pin_memory", "layout")
# The arguments that have to be contiguous: torch.nn.functional sees to it, the operator refuses.
_CONTIGUOUS = {
    aten.native_group_norm.default: (0,),
    aten.native_group_norm_backward.default: (0, 1),
}


def gradient_text(package: Package) -> str:
    """Return the text of ``gradient.py``."""
    captured = package.formulas
    sizes = Sizes(captured)
    given = ", ".join(f"{name}: Tensor" for name in package.given_back)
    parameters = f"needs: Sequence[bool], grad_output: {upstream_type(package)}, {given}"
    again = ""
    held = package.given_back[len(package.saved) :]
    if held:
        kept = ", ".join(f"``{name}``" for name in held)
        again = (
            f"\n\n    What the forward has computed ({kept}) is computed again, such that second "
            "derivatives\n    flow through it.\n    "
        )
    upstream = [name for name in package.upstream_names if name is not None]
    lines = unpacked_upstream(package)
    lines.append(f"arithmetic = arithmetic_dtype({', '.join(upstream)})")
    places = [place for place, node in enumerate(captured.gradients) if node is not None]
    differentiable = [captured.arguments[place].name for place in places]
    lines.append(f"dtypes = [tensor.dtype for tensor in ({comma(differentiable)})]")
    names: dict[Any, str] = {torch.device: f"{upstream[0]}.device"}
    for argument in captured.arguments:
        names[argument.node] = argument.name
        if argument.name in package.saved and argument.tensor.is_floating_point():
            cut = ".detach()" if argument.name in package.non_differentiable else ""
            lines.append(f"{argument.name} = {argument.name}{cut}.to(arithmetic)")
    names.update(zip(captured.upstream, upstream, strict=True))
    lines += [f"{name} = {name}.to(arithmetic)" for name in upstream]
    lines += sizes.statements(package.saved)
    lines += _formulas(captured, captured.behind_gradients(), names, sizes)
    results = ["None"] * len(captured.gradients)
    for number, place in enumerate(places):
        node = captured.gradients[place]
        assert node is not None
        results[place] = f"{names[node]}.to(dtypes[{number}]) if needs[{place}] else None"
    lines += ["return (", *(f"    {text}," for text in results), ")"]
    computed = textwrap.indent("\n".join(lines), "    ") + "\n"
    if package.kept:
        computed += f"\n\n{_residuals(package)}"
    helpers = [one for one in ("largest", "quotient") if re.search(rf"\b{one}\(", computed)]
    imported = f"from fuselab.runtime.sweep import {', '.join(['arithmetic_dtype', *helpers])}"
    if captured.seed is not None:
        imported = f"from {RUNTIME} import dropout_mask\n{imported}"
    head = f'''\
"""The gradient of {package.name} as PyTorch formulas; second derivatives are theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

{imported}

aten = torch.ops.aten


def gradient({parameters}) -> tuple[Tensor | None, ...]:
    """Return the gradient of each argument, computed in float32 for 16-bit tensors.{again}"""
'''
    return head + computed


def _residuals(package: Package) -> str:
    """Return the text of ``residuals``, which computes what the forward keeps for the backward."""
    captured = package.captured
    sizes = Sizes(captured)
    wanted = with_sources([one.formula for one in package.residuals])
    names: dict[Any, str] = {torch.device: f"{package.parameters[0]}.device"}
    lines = [f"arithmetic = arithmetic_dtype({', '.join(package.parameters)})"]
    for argument in captured.arguments:
        names[argument.node] = argument.name
        if argument.node in wanted and argument.tensor.is_floating_point():
            lines.append(f"{argument.name} = {argument.name}.to(arithmetic)")
    formulas = _formulas(captured, wanted, names, sizes)
    results = []
    for one in package.residuals:
        shape = ", ".join(map(sizes.text, one.node.sizes)) + ("," * (len(one.node.sizes) == 1))
        cast = ".to(arithmetic)" if one.node.kind == "float" else ""
        results.append(f"{names[one.formula]}{cast}.reshape(({shape})).contiguous()")
    text = "\n".join([*formulas, *results])
    lines += [
        line
        for line in sizes.statements(package.parameters)
        if re.search(rf"\b{line.partition(' = ')[0]}\b", text)
    ]
    lines += [*formulas, "return (", *(f"    {one}," for one in results), ")"]
    parameters = ", ".join(f"{name}: Tensor" for name in package.parameters)
    types = ", ".join(["Tensor"] * len(results))
    return (
        f"def residuals({parameters}) -> tuple[{types}]:\n"
        f"{_docstring(package)}\n" + textwrap.indent("\n".join(lines), "    ") + "\n"
    )


def _docstring(package: Package) -> str:
    text = f'"""Return what the forward keeps for the backward: {", ".join(package.kept)}.'
    lines = textwrap.wrap(text, 96)
    return textwrap.indent("\n".join([*lines, '"""'] if len(lines) > 1 else [f'{text}"""']), "    ")


def _formulas(
    captured: Captured, wanted: Set[fx.Node], names: dict[Any, str], sizes: Sizes
) -> list[str]:
    """Return the statements that compute the nodes of a graph that are ``wanted`` and have no name
    yet, and add their names to ``names``."""
    lines = []
    for node in captured.graph.nodes:
        if node in wanted and node.op == "call_function" and node not in names:
            names[node] = _name(node, names, sizes)
            if node.target not in _MARKERS and not _is_number(node):
                lines.append(f"{names[node]} = {_call(node, names, sizes)}")
        elif node in wanted and node.op == "get_attr":
            held = constant_tensor(node)
            dtype = f"dtype={_text(held.dtype, names, sizes)}"
            device = f", device={names[torch.device]}" if held.dim() else ""
            names[node] = f"torch.tensor({held.tolist()}, {dtype}{device})"
    return lines


def upstream_type(package: Package) -> str:
    """Return the annotation of ``grad_output``."""
    return "Tensor" if len(package.output_names) == 1 else "Sequence[Tensor]"


def unpacked_upstream(package: Package) -> list[str]:
    """Return the statement that names the upstream gradients of several outputs."""
    if len(package.output_names) == 1:
        return []
    return [f"{', '.join(name or '_' for name in package.upstream_names)} = grad_output"]


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, int, float))


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))


def _name(node: fx.Node, names: Mapping[Any, str], sizes: Sizes) -> str:
    if node.target in _MARKERS:
        return names[node.args[0]]
    if _is_size(node):
        return sizes.number_text(node.meta["val"].node.expr)
    if _is_number(node):
        texts = [_text(value, names, sizes) for value in node.args]
        target: Any = node.target
        return texts[0] if len(texts) == 1 else f"({f' {INFIX[target]} '.join(texts)})"
    return f"{node.name}_" if node.name in names.values() else node.name


def _call(node: fx.Node, names: Mapping[Any, str], sizes: Sizes) -> str:
    target: Any = node.target
    if getattr(target, "__name__", "") == "getitem":
        return f"{_text(node.args[0], names, sizes)}[{node.args[1]}]"
    arguments = [_text(value, names, sizes) for value in node.args]
    if target is aten.split.Tensor:  # which returns a single part of an empty dimension
        dim = node.args[2] if len(node.args) > 2 else 0
        lengths = [sizes.text(expression_of(part.shape[dim])) for part in node.meta["val"]]
        return f"aten.split_with_sizes.default({arguments[0]}, [{', '.join(lengths)}], {dim})"
    arguments += [
        f"{key}={_text(value, names, sizes)}"
        for key, value in node.kwargs.items()
        if key not in _OMITTED
    ]
    for place in _CONTIGUOUS.get(target, ()):
        arguments[place] += ".contiguous()"
    if target is KEPT:
        return f"dropout_mask({', '.join(arguments)})"
    name = str(target)
    if target in (aten.view.default, aten._unsafe_view.default):
        name = "aten.reshape.default"  # of the example a view, of another layout a copy
    if target is aten.amax.default:  # of a softmax, which is defined for rows of no elements
        return f"largest({', '.join(arguments)})"
    return f"{name if name.startswith('aten.') else f'torch.ops.{name}'}({', '.join(arguments)})"


def _text(value: Any, names: Mapping[Any, str], sizes: Sizes) -> str:
    if isinstance(value, fx.Node):
        return names[value] if value in names else sizes.text(expression_of(value.meta["val"]))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, names, sizes) for item in value)}]"
    if isinstance(value, torch.device):
        return names[torch.device]
    if isinstance(value, torch.dtype):
        return "arithmetic" if value.is_floating_point else str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(as_written(value))

"""Write ``reference.py``: what is right, in the user's own code where that can be copied."""

from __future__ import annotations

import inspect
import json
import operator
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import fx

from fuselab.ejection.capture import argument_name
from fuselab.ejection.package import Package
from fuselab.ejection.plan import Sizes
from fuselab.ejection.returned import CONSTANTS, comma, namedtuples_in, structure_text

INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.matmul: "@",
    operator.pow: "**",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
    operator.and_: "&",
    operator.or_: "|",
}
_CONSTANTS = (*CONSTANTS, tuple)


def reference_text(package: Package) -> str:
    """Return the text of ``reference.py``."""
    function = package.captured.function
    annotated = ", ".join(f"{name}: Tensor" for name in package.parameters)
    copied = _copied(function, package) if isinstance(function, FunctionType) else None
    if copied is not None:
        imports, sources, called = copied
        return f'''\
"""The definition of {package.name}, in the code that it was ejected from."""

from __future__ import annotations

{imports}


{sources}


def reference({annotated}) -> {outputs_type(package)}:
    """Compute {called}."""
{textwrap.indent(_taken_apart(package, called), "    ")}
'''
    return f'''\
"""The definition of {package.name}: what {_label(function)} calls, one step after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def reference({annotated}) -> {outputs_type(package)}:
    """Compute {package.name}; parameters and buffers of the module are arguments."""
{textwrap.indent(_traced(package), "    ")}
'''


def _label(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


# --- a function's own code ------------------------------------------------------------------------


def defined_in_reference(package: Package) -> set[str]:
    """Return the named tuples that ``reference.py`` defines for the function copied into it."""
    function = package.captured.function
    copied = _copied(function, package) if isinstance(function, FunctionType) else None
    if copied is None:
        return set()
    found = namedtuples_in(package.returned.structure)
    return {name for name in found if f"{name} = namedtuple(" in copied[0]}


def outputs_type(package: Package) -> str:
    """Return the annotation of what the operator returns."""
    count = len(package.output_names)
    return "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"


def _taken_apart(package: Package, called: str) -> str:
    """Return the statements that call the user's function and return the operator's outputs."""
    names, returned = package.output_names, package.returned
    if returned.is_plain and len(names) == 1:
        return f"output: Tensor = {called}\nreturn output"
    if returned.is_plain:
        return f"{', '.join(names)} = {called}\nreturn {', '.join(names)}"
    paths = [f"returned{returned.path(node)}" for node in returned.results]
    if len(names) == 1:
        return f"returned = {called}\noutput: Tensor = {paths[0]}\nreturn output"
    return f"returned = {called}\nreturn {', '.join(paths)}"


def _call_of(function: FunctionType, package: Package) -> str | None:
    """Return the call of a function with the operator's arguments, and the example's values for
    what is no tensor; None where it takes something else."""
    texts: list[str] = []
    by_name = False
    parameters = inspect.signature(function).parameters
    if [name for name in parameters if name in package.parameters] != [*package.parameters]:
        return None
    for name, parameter in parameters.items():
        if name in package.parameters:
            value = name
        elif name in package.captured.fixed:
            fixed = package.captured.fixed[name]
            if not isinstance(fixed, CONSTANTS):
                return None
            value = structure_text(fixed, str)
        elif parameter.default is not parameter.empty:
            by_name = True  # those behind a default that stays
            continue
        else:
            return None
        by_name |= parameter.kind is parameter.KEYWORD_ONLY
        if by_name and parameter.kind is parameter.POSITIONAL_ONLY:
            return None
        texts.append(f"{name}={value}" if by_name else value)
    return f"{function.__name__}({', '.join(texts)})"


def _copied(function: FunctionType, package: Package) -> tuple[str, str, str] | None:
    """Return the import lines, the sources of a function and of those that it calls, and the call;
    or None if it cannot stand in another file (a closure, a class, an object among its globals)."""
    called = _call_of(function, package)
    if called is None or any(
        package.returned.path(one) is None for one in package.returned.results
    ):
        return None
    imports = {"import torch", "from torch import Tensor"}
    sources: dict[FunctionType, str] = {}

    def add(one: FunctionType) -> bool:
        if one in sources:
            return True
        if one.__closure__ or one.__name__ == "<lambda>":
            return False
        try:
            text = textwrap.dedent(inspect.getsource(one))
        except (OSError, TypeError):
            return False
        sources[one] = text[text.index("def ") :].rstrip()
        for name in _global_names(one.__code__):
            if name not in one.__globals__:
                continue  # a builtin, or an attribute
            value = one.__globals__[name]
            if inspect.ismodule(value):
                plain = value.__name__
                imports.add(f"import {plain} as {name}" if plain != name else f"import {name}")
            elif isinstance(value, FunctionType) and value.__globals__ is one.__globals__:
                if not add(value):
                    return False
            elif isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
                imports.add("from collections import namedtuple")
                imports.add(f'{name} = namedtuple("{name}", {json.dumps(value._fields)})')
            elif callable(value) and hasattr(value, "__module__") and hasattr(value, "__name__"):
                imports.add(f"from {value.__module__} import {value.__name__} as {name}")
            elif isinstance(value, _CONSTANTS):
                imports.add(f"{name} = {value!r}")
            else:
                return False
        return True

    if not add(function):
        return None
    lines = sorted(imports, key=lambda line: (line.startswith("from"), line))
    constants = [line for line in lines if "import" not in line.split()]
    lines = [line for line in lines if line not in constants]
    head = "\n".join([*lines, *([""] if constants else []), *constants])
    return head, "\n\n\n".join(reversed(sources.values())), called


def _global_names(code: Any) -> list[str]:
    found = list(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            found += _global_names(constant)
    return found


# --- the calls that a module makes ----------------------------------------------------------------


def _traced(package: Package) -> str:
    sizes = Sizes(package.formulas)
    lines = sizes.statements(package.parameters)
    names: dict[fx.Node, str] = {}
    for node in package.formulas.traced.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            names[node] = sizes.text(value.node.expr)
        elif node.op == "placeholder":
            names[node] = argument_name(node)
        elif node.op == "output":
            results = [names[result] for result in package.returned.results]
            if len(results) == 1:
                lines.append(f"output: Tensor = {results[0]}")
        else:
            names[node] = f"{node.name}_" if node.name in names.values() else node.name
            lines.append(f"{names[node]} = {call_text(node, names)}")
    used = "\n".join(lines)
    needless = [
        line
        for line in sizes.statements(package.parameters)
        if used.count(line.partition(" = ")[0]) == 1
    ]
    last = f"return {', '.join(results) if len(results) > 1 else 'output'}"
    return "\n".join([*(line for line in lines if line not in needless), last])


def call_text(node: fx.Node, names: dict[fx.Node, str]) -> str:
    """Return the text of a call of the traced graph."""
    arguments = [_text(value, names) for value in node.args]
    keywords = [f"{key}={_text(value, names)}" for key, value in node.kwargs.items()]
    target: Any = node.target
    if node.op == "call_method":
        return f"{arguments[0]}.{target}({', '.join([*arguments[1:], *keywords])})"
    if target in INFIX and len(arguments) == 2:
        return f"{arguments[0]} {INFIX[target]} {arguments[1]}"
    if target is operator.neg:
        return f"-{arguments[0]}"
    if target is operator.getitem:
        return f"{arguments[0]}[{_subscript(node.args[1], names)}]"
    if target is getattr:
        return f"{arguments[0]}.{node.args[1]}"
    return f"{_public_name(target)}({', '.join([*arguments, *keywords])})"


def _public_name(target: Any) -> str:
    """Return the name under which PyTorch documents a function."""
    for module, prefix in ((torch, "torch"), (torch.nn.functional, "torch.nn.functional")):
        for name in (getattr(target, "__name__", ""), *dir(module)):
            if name and getattr(module, name, None) is target:
                return f"{prefix}.{name}"
    return f"{target.__module__}.{target.__name__}"


def _subscript(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, tuple):
        return ", ".join(_subscript(item, names) for item in value)
    if isinstance(value, slice):
        parts = [value.start, value.stop, value.step]
        texts = ["" if part is None else _text(part, names) for part in parts]
        return ":".join(texts if texts[2] else texts[:2])
    return "..." if value is Ellipsis else _text(value, names)


def _text(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        inner = comma([_text(item, names) for item in value])
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return repr(value)

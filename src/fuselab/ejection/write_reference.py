"""Write ``reference.py``: what is right, in the user's own code where that can be copied."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import fx

from fuselab.ejection.calls import call_text
from fuselab.ejection.capture import Captured, argument_name
from fuselab.ejection.plan import Sizes

_CONSTANTS = (int, float, str, bool, tuple, type(None), torch.dtype)


def reference_text(captured: Captured) -> str:
    """Return the text of ``reference.py``."""
    function = captured.function
    parameters = captured.parameters
    names = ", ".join(parameters)
    annotated = ", ".join(f"{name}: Tensor" for name in parameters)
    copied = _copied(function, parameters) if isinstance(function, FunctionType) else None
    if copied is not None:
        imports, sources = copied
        return f'''\
"""The definition of {captured.name}, in the code that it was ejected from."""

from __future__ import annotations

{imports}


{sources}


def reference({annotated}) -> Tensor:
    """Compute {function.__name__}({names})."""
    output: Tensor = {function.__name__}({names})
    return output
'''
    return f'''\
"""The definition of {captured.name}: what {_label(function)} calls, one step after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def reference({annotated}) -> Tensor:
    """Compute {captured.name}; parameters and buffers of the module are arguments."""
{textwrap.indent(_traced(captured), "    ")}
'''


def _label(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


# --- a function's own code ------------------------------------------------------------------------


def _copied(function: FunctionType, wanted: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the import lines and the sources of a function and of those that it calls, or None if
    it cannot stand in another file (a closure, a class, an object among its globals)."""
    parameters = inspect.signature(function).parameters
    if tuple(parameters) != wanted:
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
    return "\n".join([*lines, *([""] if constants else []), *constants]), "\n\n\n".join(
        reversed(sources.values())
    )


def _global_names(code: Any) -> list[str]:
    found = list(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            found += _global_names(constant)
    return found


# --- the calls that a module makes ----------------------------------------------------------------


def _traced(captured: Captured) -> str:
    sizes = Sizes(captured)
    lines = sizes.statements(captured.parameters)
    names: dict[fx.Node, str] = {}
    for node in captured.traced.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            names[node] = sizes.text(value.node.expr)
        elif node.op == "placeholder":
            names[node] = argument_name(node)
        elif node.op == "output":
            (result,) = node.args[0]
            lines.append(f"output: Tensor = {names[result]}")
        else:
            names[node] = f"{node.name}_" if node.name in names.values() else node.name
            lines.append(f"{names[node]} = {call_text(node, names)}")
    used = "\n".join(lines)
    needless = [
        line
        for line in sizes.statements(captured.parameters)
        if used.count(line.partition(" = ")[0]) == 1
    ]
    return "\n".join([*(line for line in lines if line not in needless), "return output"])

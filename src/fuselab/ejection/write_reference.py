"""Write ``reference.py``: what is right, in the user's own code where that can be copied."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from fuselab.ejection.blocks import Blocks, blocks_of, in_blocks
from fuselab.ejection.calls import call_text
from fuselab.ejection.capture import Captured, argument_name
from fuselab.ejection.dropout import RUNTIME
from fuselab.ejection.followed_dtypes import (
    dtype_texts,
    dtypes_of_calls,
    follow_dtypes,
    followed,
)
from fuselab.ejection.plan import Sizes
from fuselab.ejection.returned import (
    CONSTANTS,
    class_texts,
    classes_in,
    is_installed,
    structure_text,
)
from fuselab.ejection.taken import annotation, rebuilt, tensors_in
from fuselab.op import dtype_name

_CONSTANTS = (*CONSTANTS, tuple)
_OWN = frozenset({"reference", "drawing"})  # functions that the file defines itself
_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


Taken = Mapping[
    str, Sequence[str]
]  # parameters of an operator, each with the tensors that it holds


def declared(taken: Taken) -> str:
    """Return the parameters of an operator, which are tensors and lists of them, as text."""
    kinds = {
        name: "Tensor" if (*held,) == (name,) else "Sequence[Tensor]"
        for name, held in taken.items()
    }
    return ", ".join(f"{name}: {kind}" for name, kind in kinds.items())


def unpacked(taken: Taken) -> list[str]:
    """Return the statements that give the tensors of lists their names."""
    return [
        f"{', '.join(held)}{',' if len(held) == 1 else ''} = {name}"
        for name, held in taken.items()
        if (*held,) != (name,)
    ]


def reference_text(captured: Captured, outputs: Sequence[str], taken: Taken | None = None) -> str:
    """Return the text of ``reference.py``. The reference returns the flat results of the operator,
    which are named ``outputs``; without names, what the function returns. It has the parameters
    ``taken``, by default one for each tensor."""
    function = captured.function
    taken = {name: (name,) for name in captured.parameters} if taken is None else taken
    copied = _copied(function, captured) if isinstance(function, FunctionType) else None
    importing = "" if outputs else "from typing import Any\n\n"
    if unpacked(taken):
        importing = "from collections.abc import Sequence\n\n"
    if copied is not None:
        imports, sources, called = copied
        told = f"Compute {called}" if captured.is_flat else f"Compute {function.__name__}"
        name, _, given = called.partition("(")
        if name in {*taken, *captured.parameters, *captured.given}:  # an argument hides it
            sources += f"\n\n\n{name}_function = {name}"
            called = f"{name}_function({given}"
        return f'''\
"""The definition of {captured.name}, in the code that it was ejected from."""

from __future__ import annotations

{importing}{imports}


{sources}


{_functions(captured, outputs, told, _taken_apart(captured, outputs, called), taken)}
'''
    told = f"Compute {captured.name}; parameters and buffers of the module are arguments"
    return f'''\
"""The definition of {captured.name}: what {_label(function)} calls, one step after the other."""

from __future__ import annotations

{importing}import torch
from torch import Tensor
{_import_of_replay(captured)}{_classes(captured, outputs)}

{_functions(captured, outputs, told, _traced(captured, outputs), taken)}
'''


def _label(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _import_of_replay(captured: Captured) -> str:
    """Return the lines that import what ``_functions`` writes; empty where nothing is dropped."""
    return "" if captured.seed is None else f"\nfrom {RUNTIME} import SeededDropout\n"


def _classes(captured: Captured, outputs: Sequence[str]) -> str:
    """Return the lines that import or define the classes of what the function returns, where the
    reference returns that, and not the ``outputs`` of an operator."""
    imports, definitions = class_texts({} if outputs else classes_in(captured.returned.structure))
    return "".join(f"{line}\n" for line in [*imports, *([""] if definitions else []), *definitions])


def _functions(
    captured: Captured, outputs: Sequence[str], told: str, body: str, taken: Taken
) -> str:
    """Return the function ``reference``, whose docstring begins with ``told``. One that drops
    elements replays, from the seed, the function ``drawing`` with PyTorch's own dropouts."""
    head = f"({declared(taken)}) -> {outputs_type(len(outputs))}:"
    body = textwrap.indent("\n".join([*unpacked(taken), body]), "    ")
    if captured.seed is None:
        return f'def reference{head}\n    """{told}."""\n{body}'
    numbers = ""
    if captured.numbers != (*range(len(captured.numbers)),):
        numbers = f", {captured.numbers}"
    return f'''\
def drawing{head}
    """{told}. PyTorch draws its masks."""
{body}


def reference{head}
    """Compute ``drawing`` with the masks that follow from ``{captured.seed}``."""
    with SeededDropout({captured.seed}{numbers}):
        return drawing({", ".join(captured.parameters)})'''


# --- a function's own code ------------------------------------------------------------------------


def defined_in_reference(captured: Captured) -> set[str]:
    """Return the named tuples that ``reference.py`` defines for the function copied into it."""
    function = captured.function
    copied = _copied(function, captured) if isinstance(function, FunctionType) else None
    if copied is None:
        return set()
    found = classes_in(captured.returned.structure)
    return {name for name in found if f"{name} = namedtuple(" in copied[0]}


def outputs_type(count: int) -> str:
    """Return the annotation of what an operator with so many outputs returns."""
    if not count:
        return "Any"
    return "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"


def _taken_apart(captured: Captured, names: Sequence[str], called: str) -> str:
    """Return the statements that call the user's function and return the operator's outputs."""
    returned = captured.returned
    if not names:
        return f"return {called}"
    if captured.written:
        results = [f"returned{returned.path(node)}" for node in returned.results]
        lines = [*_copies(captured), f"returned = {called}" if results else called]
        return "\n".join([*lines, f"return {', '.join([*results, *captured.written])}"])
    if returned.is_plain and len(names) == 1:
        return f"output: Tensor = {called}\nreturn output"
    if returned.is_plain:
        return f"{', '.join(names)} = {called}\nreturn {', '.join(names)}"
    paths = [f"returned{returned.path(node)}" for node in returned.results]
    if len(names) == 1:
        return f"returned = {called}\noutput: Tensor = {paths[0]}\nreturn output"
    return f"returned = {called}\nreturn {', '.join(paths)}"


def _call_of(function: FunctionType, captured: Captured) -> str | None:
    """Return the call of a function with the operator's arguments, and the example's values for
    what is no tensor; None where it takes something else."""
    texts: list[str] = []
    by_name = False
    parameters = inspect.signature(function).parameters
    held = tensors_in({name: captured.given[name] for name in parameters if name in captured.given})
    if [name for name in held if name in captured.of_users] != [*captured.of_users]:
        return None
    for name, parameter in parameters.items():
        if name in captured.of_users:
            value = name
        elif annotation(captured.given.get(name)) is not None:
            text = rebuilt(captured.given[name], name, captured.of_users)
            if text is None:
                return None
            value = text
        elif name in captured.fixed:
            fixed = captured.fixed[name]
            constants = [fixed]
            if parameter.kind in _STARS:
                constants = [*fixed.values()] if isinstance(fixed, dict) else [*fixed]
            if not all(isinstance(one, CONSTANTS) for one in constants):
                return None
            value = structure_text(fixed, str)
        elif parameter.kind in _STARS:
            continue
        elif parameter.default is not parameter.empty:
            by_name = True  # those behind a default that stays
            continue
        else:
            return None
        if parameter.kind in _STARS:
            texts.append(f"{_STARS[parameter.kind]}{value}")
            continue
        by_name |= parameter.kind is parameter.KEYWORD_ONLY
        if by_name and parameter.kind is parameter.POSITIONAL_ONLY:
            return None
        texts.append(f"{name}={value}" if by_name else value)
    return f"{function.__name__}({', '.join(texts)})"


def _copied(function: FunctionType, captured: Captured) -> tuple[str, str, str] | None:
    """Return the import lines, the sources of a function and of those that it calls, and the call;
    or None if it cannot stand in another file (a closure, an object among its globals, or what a
    module defines that is not installed)."""
    called = _call_of(function, captured)
    if called is None or any(
        captured.returned.path(one) is None for one in captured.returned.results
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
        if "def " not in text:  # a lambda under a name of its own
            return False
        text = text[text.index("def ") :].rstrip()
        sources[one] = text
        for name in (*_global_names(one.__code__), *_names_in_defaults(text)):
            if name not in one.__globals__:
                continue  # a builtin, or an attribute
            value = one.__globals__[name]
            if inspect.ismodule(value):
                plain = value.__name__
                if not is_installed(plain):
                    return False
                imports.add(f"import {plain} as {name}" if plain != name else f"import {name}")
            elif isinstance(value, FunctionType) and value.__globals__ is one.__globals__:
                if not add(value):
                    return False
            elif isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
                imports.add("from collections import namedtuple")
                imports.add(f'{name} = namedtuple("{name}", {json.dumps(value._fields)})')
            elif callable(value) and hasattr(value, "__module__") and hasattr(value, "__name__"):
                if not is_installed(value.__module__):
                    return False
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
    head = f"{head}\n{_import_of_replay(captured)}".rstrip()
    texts = list(reversed(sources.values()))
    for taken in _OWN & {one.__name__ for one in sources}:
        texts = [_renamed(text, taken, f"{taken}_function") for text in texts]
        if function.__name__ == taken:
            called = called.replace(taken, f"{taken}_function", 1)
    return head, "\n\n\n".join(texts), called


def _renamed(text: str, old: str, new: str) -> str:
    """Return a function's text with another name for a function of its module, be it itself."""
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    parts = list(ast.walk(function))
    named = [one for one in parts if isinstance(one, ast.Name) and one.id == old]
    is_local = any(isinstance(one, ast.arg) and one.arg == old for one in parts) or any(
        isinstance(one.ctx, ast.Store) for one in named
    )
    spots = [] if is_local else [(one.lineno, one.col_offset) for one in named]
    if function.name == old:
        spots.append((1, len("def ")))
    lines = [line.encode() for line in text.split("\n")]  # columns count bytes
    for line, column in sorted(spots, reverse=True):
        row = lines[line - 1]
        lines[line - 1] = row[:column] + new.encode() + row[column + len(old.encode()) :]
    return b"\n".join(lines).decode()


def _global_names(code: Any) -> list[str]:
    found = list(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            found += _global_names(constant)
    return found


def _names_in_defaults(text: str) -> list[str]:
    """Return the names that the defaults of a function's parameters read."""
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    defaults = [*function.args.defaults, *function.args.kw_defaults]
    parts = (part for one in defaults if one is not None for part in ast.walk(one))
    return [part.id for part in parts if isinstance(part, ast.Name)]


def _copies(captured: Captured) -> list[str]:
    """Return the statements that copy the arguments that the function writes over, because a
    reference writes over none."""
    return [f"{name} = {name}.clone()" for name in captured.written]


# --- the calls that a module makes ----------------------------------------------------------------


def _refused_dtypes(captured: Captured) -> list[str]:
    """Return the statements that refuse the dtypes in which a module makes other calls."""
    alike = dtypes_of_calls(captured)
    lines = []
    for text, dtypes in zip(dtype_texts(alike), alike.values(), strict=True):
        names = " or ".join(map(dtype_name, dtypes))
        lines += [
            f"if not {text}:",
            "    raise ValueError(",
            f'        "{captured.name} computes what it was ejected for in {names} alone; "',
            '        "eject it with an example in the dtype that you need."',
            "    )",
        ]
    return lines


def _traced(captured: Captured, outputs: Sequence[str]) -> str:
    sizes = Sizes(captured)
    lines: list[tuple[Blocks, str]] = [((), line) for line in sizes.statements(captured.parameters)]
    lines += [((), line) for line in _copies(captured)] if outputs else []
    lines = [*(((), line) for line in _refused_dtypes(captured)), *lines]
    names: dict[Any, str] = {torch.device: f"{captured.parameters[0]}.device"}
    follow_dtypes(captured, not any(captured.needs_gradient))
    for node in captured.traced.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            names[node] = sizes.text(value.node.expr)
        elif node.op == "placeholder":
            names[node] = argument_name(node)
            if torch.dtype not in names:
                names |= followed([node], names)
        elif node.op == "output":
            results = [names[result] for result in captured.returned.results]
            results += captured.written
            if len(outputs) == 1:
                lines.append(((), f"output: Tensor = {results[0]}"))
        else:
            names[node] = f"{node.name}_" if node.name in names.values() else node.name
            lines.append((blocks_of(node), f"{names[node]} = {call_text(node, names)}"))
    texts = in_blocks(lines)
    used = "\n".join(texts)
    needless = [
        line
        for line in sizes.statements(captured.parameters)
        if used.count(line.partition(" = ")[0]) == 1
    ]
    last = f"return {', '.join(results) if len(outputs) > 1 else 'output'}"
    if not outputs:
        last = f"return {structure_text(captured.returned.structure, names.__getitem__)}"
    return "\n".join([*(line for line in texts if line not in needless), last])

"""The tensors that a function takes: as arguments of their own, or in lists, tuples and dicts.

An operator takes each tensor as an argument of its own. The public function has the parameters of
the user's function, and takes lists and dicts apart.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch.utils import _pytree as pytree

from fuselab.ejection.returned import constant_text
from fuselab.errors import EjectError
from fuselab.structures import is_data

# Names that the text of a package uses for something else where arguments are parameters.
_USED = frozenset(
    (
        "accepted", "args", "arithmetic", "arithmetic_dtype", "aten", "bool", "check_items",
        "columns", "compute", "draw", "drawing", "dropout_mask", "dtypes", "empty_in_order",
        "F", "float", "getattr", "implementation", "int", "isinstance", "kept", "largest",
        "len", "list", "math", "max", "min", "mismatch", "name", "needs", "OP", "output",
        "output_like", "outputs_like", "partial", "quotient", "range", "reason", "reference",
        "refused_option", "repr", "returned", "rows", "seed_tensor", "self", "Sequence", "str",
        "sum", "sweeps", "swept", "Tensor", "torch", "tuple", "type", "zip",
    )
)  # fmt: skip


def argument_of(place: str) -> str:
    """Return the name that a tensor has as an argument of an operator, by its place in the call of
    the user's function: ``params[0]`` is ``params_0``, as Dynamo names the inputs of a graph.

    A name that the text of a package uses for something else (``output``, ``grad_x``) is another
    one there; the public function has the user's own.
    """
    name = re.sub(r"[^a-zA-Z0-9_]+", "_", place)
    if not place.isidentifier():
        name = name.strip("_")
    if name.startswith("_"):
        name = f"argument{name}"
    if name[:1].isdigit():  # of a child of an nn.Sequential
        name = f"layer_{name}"
    if name in _USED or name.startswith("grad_") or name.endswith("_"):
        name = f"{name.rstrip('_')}_argument"
    return name


def tensors_in(given: Mapping[str, Any]) -> dict[str, tuple[Tensor, str]]:
    """Return the tensors among the arguments ``given`` of a call, by their names as arguments of an
    operator, each with its place as Python text."""
    found: dict[str, tuple[Tensor, str]] = {}
    for name, value in given.items():
        for place, leaf in leaves_in(value, name):
            if isinstance(leaf, Tensor):
                found[argument_of(place)] = leaf, place
    return found


def leaves_in(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield what lists, dicts and objects of dataclasses hold, each with its place as text."""
    for path, leaf in pytree.tree_leaves_with_path(value):
        inner = f"{place}{pytree.keystr(path)}"
        if is_data(leaf):
            for one in dataclasses.fields(leaf):
                yield from leaves_in(getattr(leaf, one.name), f"{inner}.{one.name}")
        else:
            yield inner, leaf


def with_own_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorated function (``@torch.no_grad()``) such that its parameters are those of the
    function inside, by which Dynamo names the inputs of a graph; likewise one of PyTorch's modules
    (``nn.LayerNorm``), which Dynamo calls with ``*args``; others as they are."""
    if isinstance(function, nn.Module):
        if not trace_rules.check(function.forward):
            return function
        signature = inspect.signature(function.forward)
    elif isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        signature = inspect.signature(function)
    else:
        return function
    parameters = signature.parameters.values()
    bare = [one.replace(default=one.empty, annotation=one.empty) for one in parameters]
    kinds = inspect.Parameter
    stars: dict[Any, str] = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}
    given = ", ".join(
        f"{one.name}=" * (one.kind is one.KEYWORD_ONLY) + stars.get(one.kind, "") + one.name
        for one in parameters
    )
    declared = signature.replace(parameters=bare, return_annotation=signature.empty)
    made: dict[str, Any] = {}
    exec(f"def decorated{declared}:\n    return _decorated({given})\n", made)
    found: FunctionType = made["decorated"]
    found.__globals__["_decorated"] = function
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    by_name = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    found.__defaults__ = tuple(defaults[name] for name in defaults if name not in by_name) or None
    found.__kwdefaults__ = {name: defaults[name] for name in defaults if name in by_name} or None
    return found


def mapped(value: Any, function: Callable[[Tensor, str], Any], name: str) -> Any:
    """Return an argument called ``name`` with ``function`` applied to each tensor in it and the
    tensor's name as an argument of an operator."""
    names = iter(tensors_in({name: value}))  # in order, because one tensor may be there twice

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf, next(names))
        if not is_data(leaf):
            return leaf
        made = copy.copy(leaf)
        for one in dataclasses.fields(leaf):
            # A frozen dataclass refuses to be assigned to.
            object.__setattr__(made, one.name, pytree.tree_map(of, getattr(leaf, one.name)))
        return made

    return pytree.tree_map(of, value)


def annotation(value: Any) -> str | None:
    """Return the type of a parameter for an argument of the example, None if no tensor is in it."""
    if isinstance(value, Tensor):
        return "Tensor"
    leaves = [leaf for _, leaf in leaves_in(value, "") if isinstance(leaf, Tensor)]
    if not leaves:
        return None
    is_plain = isinstance(value, (list, tuple)) and len(leaves) == len(value)
    return "Sequence[Tensor]" if is_plain else "Any"


def taking_apart(given: Mapping[str, Any], wanted: Sequence[str]) -> list[str]:
    """Return the statements that give the tensors ``wanted`` in lists and dicts their names."""
    lines: list[str] = []
    for name, value in given.items():
        held = {
            key: place
            for key, (_, place) in tensors_in({name: value}).items()
            if place != key and key in wanted
        }
        if held and annotation(value) == "Sequence[Tensor]":
            lines += [
                f"if len({name}) != {len(value)}:",
                f'    raise ValueError(f"{name} must hold {len(value)} tensors, as in the example; '
                f'it holds {{len({name})}}.")',
            ]
        lines += [f"{key} = {place}" for key, place in held.items()]
    return lines


def rebuilt(value: Any, name: str, names: Sequence[str]) -> Any:
    """Return a list or dict of the example as Python text, its tensors by their names as arguments;
    None if a tensor is none of ``names``, or something else is no constant."""
    keys = iter(tensors_in({name: value}))  # in order, because one tensor may be there twice

    def text(one: Any) -> str:
        if isinstance(one, Tensor):
            if (key := next(keys)) not in names:
                raise EjectError(f"{name} holds a tensor that nothing reads.")
            return key
        if type(one) is dict:
            return "{" + ", ".join(f"{constant_text(k)}: {text(v)}" for k, v in one.items()) + "}"
        if type(one) in (list, tuple):
            inner = ", ".join(map(text, one))
            return f"[{inner}]" if type(one) is list else f"({inner}{',' * (len(one) == 1)})"
        if isinstance(one, (int, float, str, type(None))):
            return constant_text(one)
        raise EjectError(f"{name} holds an object of {type(one).__name__}.")

    try:
        return text(value)
    except EjectError:
        return None

"""Write the parameters of a public function, which is called as the user's own function is.

Tensors are arguments of the operator. Every other argument is an option: kernels hold for the value
that it was ejected with, which is its default, and another value is refused.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fuselab.ejection.capture import Captured
from fuselab.ejection.returned import CONSTANTS, constant_text, is_name, structure_text
from fuselab.ejection.taken import annotation, leaves_in, taking_apart
from fuselab.structures import is_data

CHOICE = "implementation"  # the parameter of an operator that names its implementation
OPTIONS = "fuselab.runtime.options"  # has the function that makes errors of refused options


@dataclass
class Parameters:
    """The parameters of a public function as text, in Python's order, and the statements that check
    the options. ``keys`` are those of ``**kwargs`` in the example, by the place of their values.
    ``of_tensors`` says that each tensor is a parameter of its own, which no list holds."""

    positional: list[str] = field(default_factory=list)
    by_name: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    of_tensors: bool = False

    def text(self, more: Sequence[str] = ()) -> str:
        """Return all of them, with ``more`` that are given by name."""
        named = [*self.by_name, *more]
        has_star = any(one.startswith("*") for one in self.positional)
        star = ["*"] if named and not has_star else []
        return ", ".join([*self.positional, *star, *named, *self.rest])


def public_signature(captured: Captured) -> Parameters:
    """Return the parameters of the public function: the user's, and the seed of dropouts."""
    found = Parameters()
    if isinstance(captured.function, nn.Module):
        found.positional = [f"{name}: {kind}" for name, kind in captured.public.items()]
        found.names = set(captured.public)
        for name in captured.public:
            if name in captured.given:
                _check_held(found, captured, name, captured.given[name])
    else:
        _add_declared(found, captured)
    has_star = any(one.startswith("*") for one in found.positional)
    (found.by_name if has_star else found.positional).extend(seed_parameter(captured))
    return found


def seed_parameter(captured: Captured) -> list[str]:
    """Return the parameter that takes the seed of dropouts, in a list; empty without dropouts."""
    return [] if captured.seed is None else [f"{captured.seed}: int | Tensor | None = None"]


def opening(captured: Captured, found: Parameters) -> list[str]:
    """Return the first statements of a public function: they refuse options, and give the tensors
    in lists and dicts their names."""
    if found.of_tensors:
        return []
    apart = taking_apart(captured.given, captured.of_users)
    for place, name in found.keys.items():
        apart = [line.replace(place, name) for line in apart]
    return [*found.checks, *apart]


def option_import(body: str) -> list[str]:
    """Return the line that imports what the statements of ``body`` check options with."""
    names = [one for one in ("check_items", "refused_option") if f"{one}(" in body]
    return [f"from {OPTIONS} import {', '.join(names)}"] if names else []


def _add_declared(found: Parameters, captured: Captured) -> None:
    """Add the parameters that the user's function declares."""
    public = captured.public
    declared = inspect.signature(captured.function).parameters
    held_apart = [name for name in public if name not in captured.given]
    last_only = ""
    for name, one in declared.items():
        value = captured.given.get(name, one.default)
        if name == captured.seed or _is_left_out(name, one, captured, held_apart):
            continue
        if one.kind is one.POSITIONAL_ONLY:
            last_only = name
        if one.kind is one.VAR_KEYWORD and all(map(is_name, value)):
            for key, item in value.items():
                found.keys[f"{name}[{key!r}]"] = key
                _add(found, captured, key, item, by_name=True)
        elif one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            star = "*" if one.kind is one.VAR_POSITIONAL else "**"
            texts = found.rest if star == "**" else found.positional
            texts.append(f"{star}{name}: {'Tensor' if _is_tensors(value) else 'Any'}")
            if annotation(value) is None:
                _check(found, captured, name, value, f"{name} and ")
            else:
                _check_held(found, captured, name, value)
            found.names.add(name)
        else:
            _add(found, captured, name, value, one.kind is one.KEYWORD_ONLY)
            if name == last_only:
                found.positional[:] = [text for text in found.positional if text != "/"]
                found.positional.append("/")
    for name in held_apart:  # tensors that the function finds outside of its arguments
        _add(found, captured, name, None, by_name=bool(found.checks or found.by_name), held=True)


def _is_left_out(
    name: str, one: inspect.Parameter, captured: Captured, held_apart: Sequence[str]
) -> bool:
    """Return whether a parameter is none of the public function's: nothing was given to it and it
    has no default, or the operator takes the tensors in it apart."""
    if name not in captured.given:
        return one.default is one.empty or annotation(one.default) is not None
    is_object = annotation(captured.given[name]) is None
    return is_object and any(other.startswith(f"{name}_") for other in held_apart)


def _is_tensors(value: Any) -> bool:
    return all(isinstance(one, Tensor) for one in value)


def _add(
    found: Parameters,
    captured: Captured,
    name: str,
    value: Any,
    by_name: bool,
    held: bool = False,
) -> None:
    """Add a parameter that has ``value`` in the example: a tensor, or an option."""
    kind = "Tensor" if held else annotation(value)
    if kind is None:
        text, condition = f"{name}: Any = None", f"{name} is not None and "
        if has_text(value):
            text, condition = f"{name}: Any = {option_text(value)}", ""
        _check(found, captured, name, value, condition)
    elif not by_name and any(" = " in one for one in found.positional):
        text = f"{name}: {kind} | None = None"  # it stands behind an option
        refused = _refused(captured, name, "a tensor", name)
        found.checks.append(f"if {name} is None:\n    {refused}")
    else:
        text = f"{name}: {kind}"
    (found.by_name if by_name else found.positional).append(text)
    found.names.add(name)
    if not held:
        _check_held(found, captured, name, value)


def _check_held(found: Parameters, captured: Captured, name: str, value: Any) -> None:
    """Add the statements that refuse an argument with tensors in it if it holds other options
    beside them, or other items."""
    kind = annotation(value)
    if kind in (None, "Tensor", "Sequence[Tensor]"):  # lists are counted where they are taken apart
        return
    for place, items in _containers_in(value, name):
        texts = ", ".join(map(json.dumps, (captured.name, place)))
        found.checks.append(f"check_items({texts}, {place}, {items!r})")
    for place, leaf in leaves_in(value, name):
        if not isinstance(leaf, Tensor):
            _check(found, captured, place, leaf, "")


def _containers_in(value: Any, place: str) -> Iterator[tuple[str, int | list[Any]]]:
    """Yield the place of each list, tuple and dict in a value, with the number of its items or with
    its keys."""
    if is_data(value):
        for one in dataclasses.fields(value):
            yield from _containers_in(getattr(value, one.name), f"{place}.{one.name}")
    elif isinstance(value, dict):
        yield place, list(value)
        for key, item in value.items():
            yield from _containers_in(item, f"{place}[{constant_text(key)}]")
    elif type(value) in (list, tuple):
        yield place, len(value)
        for number, item in enumerate(value):
            yield from _containers_in(item, f"{place}[{number}]")


def _check(found: Parameters, captured: Captured, name: str, value: Any, condition: str) -> None:
    """Add the statement that refuses another value of an option."""
    if has_text(value):
        wanted = option_text(value)
        differs = f"{name} != {wanted}"
        if value is None or isinstance(value, bool):
            differs = f"{name} is not {value}"
        elif isinstance(value, float) and value != value:
            differs = f"{name} == {name}"
    else:
        wanted, given = described(value, name)
        differs = f"{given} != {json.dumps(wanted)}"
    refused = _refused(captured, name, repr(value) if has_text(value) else wanted, name)
    found.checks.append(f"if {condition}{differs}:\n    {refused}")


def _refused(captured: Captured, name: str, wanted: str, given: str) -> str:
    texts = ", ".join(map(json.dumps, (captured.name, name, wanted)))
    return f"raise refused_option({texts}, {given})"


def has_text(value: Any) -> bool:
    """Return whether a value can be written: a constant, or constants in lists and dicts."""
    if type(value) in (tuple, list):
        return all(map(has_text, value))
    if type(value) is dict:
        return all(map(has_text, [*value, *value.values()]))
    return type(value) in CONSTANTS


def option_text(value: Any) -> str:
    return structure_text(value, str)


def described(value: Any, name: str) -> tuple[str, str]:
    """Return what tells an object from others, and the text that computes the same of the argument
    ``name``: its name, its repr if that has no address in it, else its class."""
    if hasattr(value, "__qualname__"):
        return value.__qualname__, f'getattr({name}, "__qualname__", None)'
    if " at 0x" not in repr(value):
        return repr(value), f"repr({name})"
    return type(value).__qualname__, f"type({name}).__qualname__"


def is_called_as_operator(captured: Captured) -> bool:
    """Return whether the public function takes what the operator does, and nothing else."""
    return captured.is_flat and not public_signature(captured).checks

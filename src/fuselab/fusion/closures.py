"""Functions that refer to modules: which ones, and the same function over copies of them.

A lambda in an attribute, a forward that was set on an instance or a plain function around a layer
keeps its modules in its closure or in its globals. Copies of a model need functions that refer to
the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CellType, FunctionType
from typing import Any

from torch import nn


def modules_in(function: Any) -> dict[str, nn.Module]:
    """Return the modules that a function refers to by their names in it; none for anything but a
    plain function."""
    if not isinstance(function, FunctionType):
        return {}
    held = {**dict(_globals_of(function)), **dict(_cells_of(function))}
    return {name: value for name, value in held.items() if isinstance(value, nn.Module)}


def rebound(function: FunctionType, twins: Mapping[int, nn.Module]) -> FunctionType:
    """Return the function with every module that it refers to replaced by its entry in ``twins``,
    by ``id``; the function itself if it refers to none of them."""

    def twin_of(value: Any) -> Any:
        if isinstance(value, FunctionType):
            return rebound(value, twins)
        return twins.get(id(value), value) if isinstance(value, nn.Module) else value

    cells = {name: value for name, value in _cells_of(function) if twin_of(value) is not value}
    names = {name: value for name, value in _globals_of(function) if id(value) in twins}
    if not cells and not names:
        return function
    closure = tuple(
        CellType(twin_of(cells[name])) if name in cells else cell
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        )
    )
    # Only a function that names such a module gets globals of its own.
    known = function.__globals__
    if names:
        known = {**known, **{name: twin_of(value) for name, value in names.items()}}
    made = FunctionType(function.__code__, known, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def rebind_attributes(twins: Mapping[int, nn.Module]) -> None:
    """Let the functions that are attributes of ``twins`` refer to these instead of the
    originals."""
    for twin in twins.values():
        for name, value in list(vars(twin).items()):
            if isinstance(value, FunctionType):
                twin.__dict__[name] = rebound(value, twins)


def _cells_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _globals_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]

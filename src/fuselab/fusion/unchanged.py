"""Whether a module, and the arguments of its call, still are as they were when it was traced."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.fusion.expression import has_hooks
from fuselab.fusion.layers import form_of

_missing = object()
_PLAIN = (bool, int, float, str, NoneType, torch.dtype, torch.device)
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_DEPTH = 3  # of objects in attributes of objects whose own attributes are watched
# What a forward may refer to without reading its attributes.
_NOT_READ = (Tensor, nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


@dataclass(frozen=True)
class State:
    """The plain attributes of an object (numbers, strings, and lists and dicts of them), which a
    trace takes as constants, and the states of the objects that it refers to."""

    kind: type
    plain: Mapping[str, Any]
    objects: Mapping[str, State]

    @classmethod
    def of_module(cls, module: nn.Module) -> State:
        """Return the state of a module, with its training mode and without its children."""
        held = {name: one for name, one in vars(module).items() if name not in _OF_EVERY_MODULE}
        return cls(type(module), *_split(held, _DEPTH))

    @classmethod
    def of(cls, value: Any, depth: int = _DEPTH) -> State | None:
        """Return the state of a configuration: of an object that has nothing but plain attributes
        and other configurations. None for anything else."""
        is_read = depth > 0 and not isinstance(value, _NOT_READ) and not is_plain(value)
        held = getattr(value, "__dict__", None) if is_read else None
        if not isinstance(held, dict):
            return None
        plain, objects = _split(held, depth - 1)
        return cls(type(value), plain, objects) if held.keys() == {*plain, *objects} else None

    def holds_for(self, value: Any) -> bool:
        """Return whether the state of an object is this one."""
        return type(value) is self.kind and self.holds_in(value.__dict__)

    def holds_in(self, attributes: Mapping[str, Any]) -> bool:
        """Return whether the attributes of an object have these values."""
        try:
            if len(attributes) == len(self.plain):  # a configuration: 60 values in one comparison
                return attributes == self.plain
            if not all(
                attributes.get(name, _missing) == value for name, value in self.plain.items()
            ):
                return False
        except (RuntimeError, ValueError):  # a tensor or an array is there now
            return False
        return all(one.holds_for(attributes.get(name)) for name, one in self.objects.items())


def _split(held: Mapping[str, Any], depth: int) -> tuple[dict[str, Any], dict[str, State]]:
    """Return copies of the plain values among attributes, and the states of the objects."""
    plain = {name: copy.deepcopy(value) for name, value in held.items() if is_plain(value)}
    states = {name: State.of(value, depth) for name, value in held.items() if name not in plain}
    return plain, {name: one for name, one in states.items() if one is not None}


def is_plain(value: Any) -> bool:
    """Return whether a value consists of numbers, strings, dtypes, devices and None."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def same_argument(value: Any, recorded: Any, state: State | None) -> bool:
    """Return whether an argument that is no tensor is the recorded one, whose ``state`` is given,
    or equal to it."""
    if isinstance(value, Tensor) or type(value) is not type(recorded):
        return False
    try:
        if value is not recorded and value != recorded:
            return False
    except (RuntimeError, ValueError):  # of tensors or arrays in an object of the user's
        return False
    return state is None or state.holds_for(value)


def outline_of(module: nn.Module, called: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return the children by name: type, settings and own outline of those that the graph does not
    call."""
    return {
        name: None
        if child is None or f"{prefix}{name}" in called
        else (type(child), _settings_of(child), outline_of(child, called, f"{prefix}{name}."))
        for name, child in module._modules.items()
    }


def _settings_of(child: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Return the settings of a layer that a kernel was written with, such as an eps; those of a
    linear layer's own are sizes, which its weight shows."""
    return tuple(State.of_module(child).plain.items()) if form_of(child) is not None else ()


def is_outlined(module: nn.Module, outline: Mapping[str, Any]) -> bool:
    """Return whether ``module`` still has these children, and no hook on those that are not
    called."""
    children = module._modules
    if tuple(children) != tuple(outline):
        return False
    for name, entry in outline.items():
        if entry is not None:
            child = children[name]
            if (
                child is None
                or type(child) is not entry[0]
                or has_hooks(child)
                or any(getattr(child, name, _missing) != value for name, value in entry[1])
                or not is_outlined(child, entry[2])
            ):
                return False
    return True

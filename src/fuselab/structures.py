"""The values inside what a function takes or returns: in lists, tuples, dicts, objects of
dataclasses, and in subclasses of these.

PyTorch's own trees end at an object of a dataclass and at a subclass of ``dict``, so that what is
computed of their leaves alone would leave out the tensors of a model that returns such an object.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def leaves(value: Any) -> list[Any]:
    """Return everything inside ``value`` that is no container, in order."""
    found = pytree.tree_leaves(value)
    if len(found) != 1 or found[0] is not value:
        return [leaf for inner in found for leaf in leaves(inner)]
    items = _items(value)
    return [value] if items is None else [leaf for item in items for leaf in leaves(item)]


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors inside ``value``, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def named(value: Any, name: str) -> list[tuple[str, Any]]:
    """Return every leaf of ``value`` with its place, which begins with ``name``: ``boxes[0]``,
    ``batch['ids']``, ``batch.ids``."""
    if isinstance(value, Mapping):
        inner = [(item, f"{name}[{key!r}]") for key, item in value.items()]
    elif is_data(value):
        fields = dataclasses.fields(value)
        inner = [(getattr(value, one.name), f"{name}.{one.name}") for one in fields]
    elif isinstance(value, list | tuple):
        inner = [(item, f"{name}[{place}]") for place, item in enumerate(value)]
    else:
        return [(name, value)]
    return [leaf for item, place in inner for leaf in named(item, place)]


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``function`` applied to each leaf, in containers of the same kind."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, function) for item in value)
    if isinstance(value, Mapping):
        found = {key: mapped(item, function) for key, item in value.items()}
        return found if type(value) is dict else _like(value, found)
    if is_data(value):
        made = copy.copy(value)
        for one in dataclasses.fields(value):
            # a frozen dataclass refuses to be assigned to
            object.__setattr__(made, one.name, mapped(getattr(value, one.name), function))
        return made
    return function(value)


def is_data(value: Any) -> bool:
    """Return whether a value is an object of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _items(value: Any) -> list[Any] | None:
    if isinstance(value, Mapping):
        return list(value.values())
    if is_data(value):
        return [getattr(value, one.name) for one in dataclasses.fields(value)]
    return list(value) if isinstance(value, list | tuple) else None


def _like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a copy of a mapping of another type with other items; a dict if it cannot be copied
    or changed."""
    try:
        made: Any = copy.copy(value)
        for key, item in items.items():
            made[key] = item
    except Exception:  # a mapping of the user's may raise anything
        return items
    return made

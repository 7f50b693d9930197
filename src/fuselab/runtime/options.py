"""Refuse options of ejected functions: arguments that are no tensors, whose values are fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

_LONGEST = 200  # characters of a value in a sentence


def refused_option(function: str, name: str, ejected: str, given: Any) -> ValueError:
    """Return the error of a call of ``function`` in which the option ``name`` is ``given``;
    ``ejected`` is the text of the value that it was ejected with."""
    return ValueError(
        f"{function} was ejected with {name} = {ejected}, and {name} is {_told(given)} here."
    )


def check_items(function: str, name: str, given: Any, items: int | Sequence[Any]) -> None:
    """Raise ValueError if the argument ``name`` of ``function``, which holds tensors, has not the
    ``items`` that it was ejected with: so many in a list or tuple, or these keys in a dict."""
    if isinstance(items, int):
        fits = isinstance(given, (list, tuple)) and len(given) == items
        wanted = f"a sequence of {items}"
    else:
        fits = isinstance(given, Mapping) and {*given} == {*items}
        wanted = _of_keys(items)
    if not fits:
        raise refused_option(function, name, wanted, given)


def _told(given: Any) -> str:
    """Return a value as text, without the elements of tensors."""
    if isinstance(given, Tensor):
        return f"a tensor of shape {tuple(given.shape)}"
    if isinstance(given, Mapping) and any(isinstance(one, Tensor) for one in given.values()):
        return _of_keys(list(given))
    if isinstance(given, (list, tuple)) and any(isinstance(one, Tensor) for one in given):
        return f"a sequence of {len(given)}"
    text = " ".join(repr(given).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _of_keys(keys: Sequence[Any]) -> str:
    return f"a dict of {', '.join(map(repr, keys)) or 'nothing'}"

"""Refuse options of ejected functions: arguments that are no tensors, whose values are fixed."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def refused_option(function: str, name: str, ejected: str, given: Any) -> ValueError:
    """Return the error of a call of ``function`` in which the option ``name`` is ``given``;
    ``ejected`` is the text of the value that it was ejected with."""
    told = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
    return ValueError(f"{function} was ejected with {name} = {ejected}, and {name} is {told} here.")

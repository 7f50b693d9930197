"""The definitions of operators on lists of tensors (``torch._foreach_add``) by those on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_PREFIX = "_foreach_"
# Where a list's operator is not that of a tensor with the same name.
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "addcdiv": lambda one, first, second, value=1: aten.addcdiv(one, first, second, value=value),
    "addcmul": lambda one, first, second, value=1: aten.addcmul(one, first, second, value=value),
    "copy": lambda one, source, *_: source.expand_as(one).to(one.dtype, copy=True),
    "max": torch.amax,
    "maximum": torch.clamp_min,
    "minimum": torch.clamp_max,
    "norm": lambda one, ord=2, dtype=None: torch.linalg.vector_norm(one, ord, dtype=dtype),
    "zero": torch.zeros_like,
}


def definitions_of_lists() -> dict[Any, Callable[..., Any]]:
    """Return the definition of every operator on lists that returns new ones."""
    found: dict[Any, Callable[..., Any]] = {}
    for name in _names():
        packet = getattr(aten, name)
        plain = name.removeprefix(_PREFIX)
        on_one = _ELEMENTWISE.get(plain) or getattr(aten, plain, None)
        if on_one is None:
            continue
        definition = _on_each(on_one)
        overloads = (one for one in packet.overloads() if "out" not in one)
        found |= {getattr(packet, one): definition for one in overloads}
    return found


def _names() -> list[str]:
    """Return the names of PyTorch's operators on lists that return new ones. ``dir(aten)`` has only
    those that something in the process has asked for."""
    schemas = {one.name.removeprefix("aten::") for one in torch._C._jit_get_all_schemas()}
    return sorted(one for one in schemas if one.startswith(_PREFIX) and not one.endswith("_"))


def _on_each(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return a function of lists that calls ``function`` for each place in them."""

    def on_each(*args: Any, **keywords: Any) -> list[Any]:
        given = [*args, *keywords.values()]
        length = next(len(one) for one in given if _is_list_of_tensors(one))

        def at(place: int, value: Any) -> Any:
            return value[place] if isinstance(value, (list, tuple)) else value

        return [
            function(
                *(at(place, value) for value in args),
                **{name: at(place, value) for name, value in keywords.items()},
            )
            for place in range(length)
        ]

    return on_each


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Tensor)

"""Find what the user's code has decided by sizes while it was traced: which way of an ``if`` it
took, and which numbers it computed by functions that no symbol follows (``math.log`` of a size).

A graph has only the way that the example's sizes took. Where other sizes would take another one,
the kernels must not run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import sympy
import torch

# Where PyTorch's tracer asks on behalf of the user's code. Other questions are those of PyTorch's
# operators, whether shapes fit; the kernels' own patterns ask them.
_TRACER = "_dynamo/"
_SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 64, 100, 1000, 4099, 1 << 20)
_DRAWS = 300


def decisions() -> tuple[sympy.Basic, ...]:
    """Return the conditions on sizes under which the graph that is being compiled is the one that
    the user's code gives, in the order in which they were met. Some sizes do not meet them."""
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    shape_env: Any = None if mode is None else mode.shape_env
    if shape_env is None:
        return ()
    found = [shape_env.replace(guard.expr) for guard in shape_env.guards if _is_the_users(guard)]
    return tuple(one for one in dict.fromkeys(found) if not _holds_always(one))


def _is_the_users(guard: Any) -> bool:
    return _TRACER in str(getattr(getattr(guard, "sloc", None), "framework_loc", ""))


def _holds_always(condition: sympy.Basic) -> bool:
    """Return whether a condition holds for all sizes, as far as some hundred draws show."""
    symbols = sorted(condition.free_symbols, key=str)
    return all(condition.subs(sizes) == sympy.true for sizes in _drawn(symbols))


def _drawn(symbols: list[sympy.Symbol]) -> Iterator[dict[sympy.Symbol, int]]:
    if len(symbols) == 1:
        for size in _SIZES:
            yield {symbols[0]: size}
        return
    source = random.Random(0)
    for _ in itertools.repeat(None, _DRAWS):
        yield {symbol: source.choice(_SIZES) for symbol in symbols}

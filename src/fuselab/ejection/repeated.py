"""Upsampling to the nearest element by a whole factor: each element, repeated.

PyTorch computes the position of each element in floating point. Where a tracer takes that apart,
elements are chosen by numbers, and gradients are scattered. Where the factor is whole whatever the
sizes are, views say the same, and the gradient is a sum.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuselab.ejection.equal_sizes import hint_of

_MODES = ("nearest", "nearest-exact")


@contextlib.contextmanager
def upsampling_as_views(module: fx.GraphModule) -> Iterator[None]:
    """Let the calls of a traced module that upsample by a whole factor compute views meanwhile."""
    nodes = [node for node in module.graph.nodes if node.target is F.interpolate]
    if not nodes:
        yield
        return
    for node in nodes:
        node.target = interpolated
    module.recompile()
    try:
        yield
    finally:
        for node in nodes:
            node.target = F.interpolate
        module.recompile()


def interpolated(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    *args: Any,
    **keywords: Any,
) -> Tensor:
    """Return what ``torch.nn.functional.interpolate`` returns for these arguments, as views of
    ``input`` where it takes the nearest element and the factors are whole."""
    lead, sizes = input.shape[:2], input.shape[2:]
    factors = None
    if mode in _MODES and (size is None) != (scale_factor is None):
        factors = _whole_factors(sizes, _each(size, sizes), _each(scale_factor, sizes))
    if factors is None:
        return F.interpolate(input, size, scale_factor, mode, *args, **keywords)
    apart, wide, whole = [*lead], [*lead], [*lead]
    for size, factor in zip(sizes, factors, strict=True):
        apart += [size, 1]
        wide += [size, factor]
        whole.append(size * factor)
    return input.reshape(apart).expand(wide).reshape(whole)


def _each(given: Any, sizes: Sequence[Any]) -> list[Any] | None:
    """Return an option that is given for all dimensions or for each as that of each."""
    if given is None:
        return None
    return list(given) if isinstance(given, (list, tuple)) else [given] * len(sizes)


def _whole_factors(
    sizes: Sequence[Any], output_size: Sequence[Any] | None, scales: Sequence[Any] | None
) -> list[int] | None:
    """Return how often each element is repeated along each dimension, or None unless that is the
    same for all elements, whatever the sizes are.

    PyTorch takes the element at ``floor(position * step)``, where ``step`` is 1 / factor in
    float32: rounded down, it would miss the first position of an element.
    """
    if len(scales or output_size or ()) != len(sizes):
        return None
    if scales is not None:
        # One that is computed from sizes differs from call to call.
        factors = [
            int(one) if isinstance(one, (int, float)) and one % 1 == 0 else 0 for one in scales
        ]
    else:
        assert output_size is not None
        pairs = zip(sizes, output_size, strict=True)
        factors = [hint_of(output) // max(1, hint_of(size)) for size, output in pairs]
        pairs = zip(sizes, output_size, strict=True)
        if not all(
            statically_known_true(output == size * factor)
            for (size, output), factor in zip(pairs, factors, strict=True)
        ):
            return None
    return factors if all(map(_is_exact, factors)) else None


def _is_exact(factor: int) -> bool:
    if factor < 1:
        return False
    (step,) = struct.unpack("f", struct.pack("f", 1 / factor))
    return bool(step * factor >= 1)

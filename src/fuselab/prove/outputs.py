"""The outputs of an operator, which are one tensor or several, and their upstream gradients.

An upstream gradient belongs to each floating output, in order; the others have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import tensors_in
from fuselab.prove.facts import Declared


def outputs_in(returned: Any) -> tuple[Tensor, ...]:
    """Return the tensors that a call returned."""
    return tensors_in((returned,))


def floating(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the floating ones of ``outputs``, which are those that can have a gradient."""
    return [output for output in outputs if output.is_floating_point()]


def output_names(op: Declared) -> list[str]:
    """Return the names of the outputs: ``output``, or ``output 0``, ``output 1`` of several."""
    if op.output_count == 1:
        return ["output"]
    return [f"output {place}" for place in range(op.output_count)]


def upstream_names(op: Declared, outputs: Sequence[Tensor]) -> list[str]:
    """Return the name of the upstream gradient of each floating output."""
    if len(outputs) == 1:
        return ["the upstream gradient"]
    return [
        f"the upstream gradient of {name}"
        for name, output in zip(output_names(op), outputs, strict=True)
        if output.is_floating_point()
    ]


def pulled_back(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
    **options: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``inputs`` under the ``upstream`` gradients of the floating outputs.

    An output whose upstream gradient is None is left out. Of several outputs, so is one that needs
    no gradient, as a constant does not. ``options`` go to ``torch.autograd.grad``.
    """
    pairs = [
        (output, gradient)
        for output, gradient in zip(floating(outputs), upstream, strict=True)
        if gradient is not None and (output.requires_grad or len(outputs) == 1)
    ]
    if not pairs:
        return (None,) * len(inputs)
    roots, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(roots, inputs, gradients, allow_unused=True, **options)


def as_declared(op: Declared, outputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> Any:
    """Return ``upstream`` as a backward takes it: the one gradient, or a tuple of one per output,
    zeros for those that are not floating."""
    given = iter(upstream)
    every = tuple(
        next(given) if output.is_floating_point() else torch.zeros_like(output)
        for output in outputs
    )
    return every[0] if op.output_count == 1 else every


def sum_over(outputs: Sequence[Tensor], term: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sum of ``term(output)``, a number, over the floating outputs."""
    first, *rest = map(term, floating(outputs))
    return sum(rest, first)

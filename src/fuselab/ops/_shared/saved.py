"""Gradients whose backward gets the forward's own arguments: saved, asked about and allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.matrices import empty_gradients


def save_arguments(output: Tensor, *args: Any) -> tuple[Any, ...]:
    """Save all arguments of the forward, and nothing else, for ``Gradient.save``."""
    return args


def save_layer(
    output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Any, ...]:
    """Save the operands of a linear layer whose last argument is its activation: the output if the
    derivative is a function of it, and the bias only if the pre-activation is computed again."""
    derivative_of = activation_named(rest[-1]).derivative_of
    kept_output = output if derivative_of == "output" else None
    return kept_output, input, weight, bias if derivative_of == "preactivation" else None, *rest


def empty_like_saved(*places: int) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return ``Gradient.fake`` of contiguous gradients of the saved tensors at ``places``."""

    def fake(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
        return empty_gradients(needs, *(saved[place] for place in places))

    return fake


def of_saved(
    supports: Callable[..., str | None], first: int = 0, *more: Any
) -> Callable[..., str | None]:
    """Return ``supports_backward`` that asks ``supports`` about the saved values from place
    ``first`` on, and then ``more``."""

    def supports_backward(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> str | None:
        return supports(*saved[first:], *more)

    return supports_backward

"""DLRM's interactions as modules, between the embeddings and the prediction layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fuselab.errors import ArgumentError, OperandError, ShapeError
from fuselab.nn.plain_module import more_than
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops.dot_interaction import dot_interaction
from fuselab.ops.outer_interaction_linear import outer_interaction_linear


class DotInteraction(nn.Module):
    """``dot_interaction``: the dense vector, then the products of all pairs, then zeros.

    Args:
        padding: columns of zeros after the pairs.
        implementation: as for every operator.

    It has no parameters, and so nothing in a state_dict.
    """

    def __init__(self, padding: int = 0, *, implementation: str = "auto") -> None:
        super().__init__()
        self.padding = padding
        self.implementation = implementation

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Return ``(B, D + (T + 1) T / 2 + padding)`` from ``(B, D)`` and ``(B, T, D)``."""
        return dot_interaction(dense, embeddings, self.padding, implementation=self.implementation)

    def extra_repr(self) -> str:
        return f"padding={self.padding}"


class OuterInteraction(nn.Linear):
    """The outer product interaction and the linear layer after it, without storing the product.

    It is that ``nn.Linear``: the same ``weight``, ``bias`` and state_dict, with two inputs in place
    of one.

    Args:
        vectors: T + 1, including the dense vector.
        width: D, elements of a vector.
        out_features: outputs of the layer.
        bias, device, dtype: as for ``nn.Linear``.
        activation: its name; it is applied after the layer.
        implementation: as for every operator.

    Raises:
        UnknownNameError: activation.
        ArgumentError: ``vectors`` or ``width`` is below 1; ``of`` got something other than a plain
            linear layer (one with its own forward, hooks or a computed weight is not), or one whose
            input is not the square of vectors x width.
    """

    def __init__(
        self,
        vectors: int,
        width: int,
        out_features: int,
        bias: bool = True,
        activation: str = "identity",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        implementation: str = "auto",
    ) -> None:
        activation_named(activation)
        if vectors < 1 or width < 1:
            raise OperandError(
                f"OuterInteraction: 'vectors' is {vectors} and 'width' {width}; expected 1 or more."
            )
        super().__init__((vectors * width) ** 2, out_features, bias, device, dtype)
        self.vectors, self.width = vectors, width
        self.activation = activation
        self.implementation = implementation

    @classmethod
    def of(
        cls, linear: nn.Linear, vectors: int, width: int, activation: str = "identity"
    ) -> OuterInteraction:
        """Return the layer that replaces ``linear``, sharing its parameters."""
        problem = more_than(linear, nn.Linear)
        if problem is not None:
            raise ArgumentError(
                f"OuterInteraction.of: 'linear' {problem}, which this layer would drop; expected a "
                "plain nn.Linear."
            )
        if linear.in_features != (vectors * width) ** 2:
            raise ShapeError(
                f"OuterInteraction.of: 'linear' has {linear.in_features} inputs; expected "
                f"{(vectors * width) ** 2}, the square of {vectors} vectors of {width}."
            )
        layer = cls(
            vectors,
            width,
            linear.out_features,
            linear.bias is not None,
            activation,
            device="meta",
            dtype=linear.weight.dtype,
        )
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:  # type: ignore[override]
        """Return ``(B, out_features)`` from ``(B, D)`` and ``(B, T, D)``."""
        return outer_interaction_linear(
            dense,
            embeddings,
            self.weight,
            self.bias,
            self.activation,
            implementation=self.implementation,
        )

    def extra_repr(self) -> str:
        return (
            f"vectors={self.vectors}, width={self.width}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, activation={self.activation}"
        )

"""DLRM by fuselab's operators, over the parameters of the plain model.

The parameters are those of the ``Dlrm``, so its ``state_dict`` contains what is trained here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fuselab.models.branch import Branch, beside, linear_loss, linear_relu
from fuselab.models.dlrm import Dlrm
from fuselab.ops import (
    cat_interaction,
    dot_interaction,
    embedding_lookup,
    linear_activation,
    linear_binary_cross_entropy,
    linear_sigmoid,
    mlp,
    outer_interaction_linear,
)
from fuselab.ops.mlp.op import MOST_ROWS

# 16-bit matrix products need rows of a multiple of 16 bytes: dot's 367 columns become 368.
_COLUMNS = 8


class FusedDlrm:
    """Forward and loss of ``model``.

    ``leaves`` are its dense parameters by name, as an optimizer should see them. If the first
    prediction layer of the dot interaction is padded with columns of zeros, the leaf has them too,
    and the model's parameter becomes a view of it. In ``half`` precision the products use bfloat16
    ``operands``: copies of the leaves that must be updated whenever the leaves change (``refresh``
    does so). Otherwise the operands are the leaves themselves. A ``branch`` runs the work that the
    chain of products does not wait for; join it after the backward.
    """

    def __init__(self, model: Dlrm, half: bool = False, branch: Branch | None = None) -> None:
        self.model, self.half, self.branch = model, half, branch
        self.dtype = torch.bfloat16 if half else torch.float32  # dtype of the products
        self.tables = [table.detach() for table in tables(model)]
        width = model.config.interaction_width
        self.padding = -width % _COLUMNS if model.config.interaction == "dot" else 0
        self.names = [name for name, _ in dense_parameters(model)]
        self.leaves = [self._leaf(name, value) for name, value in dense_parameters(model)]
        self.operands = self.leaves
        if half:
            self.operands = [leaf.detach().to(self.dtype).requires_grad_() for leaf in self.leaves]
        pairs = list(zip(self.operands[::2], self.operands[1::2], strict=True))
        bottom = len(model.config.dense_hidden) + 1
        self.bottom, self.top = pairs[:bottom], pairs[bottom:]
        # The step was timed with the loss in CUDA, while "auto" takes Triton in float32.
        on_gpu = self.leaves[0].is_cuda
        narrow = model.config.prediction_hidden[-1] <= 1024  # the kernel holds a row in registers
        self.of_logit = "cuda" if on_gpu and narrow else "auto"

    def refresh(self) -> None:
        """Copy the leaves into the operands."""
        if self.half:
            torch._foreach_copy_([operand.detach() for operand in self.operands], self.leaves)

    def narrowed(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return tensors like the leaves by name, without the columns that a leaf has beyond its
        parameter."""
        shapes = dict(dense_parameters(self.model))
        return {
            name: tensor[..., : shapes[name].shape[-1]]
            for name, tensor in zip(self.names, tensors, strict=True)
        }

    def vectors(self, rows: Tensor) -> Tensor:
        """Look up the embeddings of rows [B, 26]: [B, 26, D] in the products' dtype.

        The result has no gradient: it is a leaf of the graph. It is computed on the branch, which
        the interaction joins.
        """
        with beside(self.branch):
            return embedding_lookup(self.tables, rows, dtype=self.dtype)

    def loss(self, dense: Tensor, vectors: Tensor | Callable[[], Tensor], labels: Tensor) -> Tensor:
        """Return the mean binary cross-entropy, 0-d; ``labels`` [B].

        A callable gives the vectors when the interaction needs them: they may still be on their
        way while the bottom layers run.
        """
        operands = self._hidden(dense, vectors), *self.top[-1], labels[:, None]
        if self.branch is not None:
            return linear_loss(*operands, self.branch, self.of_logit)
        return linear_binary_cross_entropy(*operands, implementation=self.of_logit)

    def probabilities(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Return the probabilities, [B, 1], float32, with one launch per MLP if rows are few and
        16-bit."""
        vectors = self.vectors(rows)
        if self.half and len(rows) <= MOST_ROWS:
            hidden, layers = self._interact(_in_one_launch(dense, self.bottom, "relu"), vectors)
            last = [*layers, self.top[-1]]
            return _in_one_launch(hidden, last, "sigmoid", torch.float32)
        hidden = self._hidden(dense, vectors)
        weight, bias = self.top[-1]
        return linear_sigmoid(hidden, weight, bias, implementation=self.of_logit).float()

    def _hidden(self, dense: Tensor, vectors: Tensor | Callable[[], Tensor]) -> Tensor:
        """Return the input of the last layer."""
        dense = dense.to(self.dtype)
        for weight, bias in self.bottom:
            dense = self._layer(dense, weight, bias)
        hidden, layers = self._interact(dense, vectors() if callable(vectors) else vectors)
        for weight, bias in layers:
            hidden = self._layer(hidden, weight, bias)
        return hidden

    def _layer(self, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.branch is None or not torch.is_grad_enabled():
            return linear_activation(input, weight, bias, "relu")
        return linear_relu(input, weight, bias, self.branch)

    def _interact(
        self, dense: Tensor, vectors: Tensor
    ) -> tuple[Tensor, Sequence[tuple[Tensor, Tensor]]]:
        """Return the interaction, and the hidden layers that remain after it."""
        if self.branch is not None:
            self.branch.join()  # the look-up runs beside the earlier layers
        hidden = self.top[:-1]
        match self.model.config.interaction:
            case "dot":
                return dot_interaction(dense, vectors, self.padding), hidden
            case "cat":
                return cat_interaction(dense, vectors), hidden
        weight, bias = hidden[0]
        return outer_interaction_linear(dense, vectors, weight, bias, "relu"), hidden[1:]

    def _leaf(self, name: str, parameter: nn.Parameter) -> Tensor:
        if not self.padding or name != "prediction_mlp.0.weight":
            return parameter
        wide = torch.nn.functional.pad(parameter.detach(), (0, self.padding))
        parameter.data = wide[:, : -self.padding]
        return wide.requires_grad_()


def _in_one_launch(
    input: Tensor,
    layers: Sequence[tuple[Tensor, Tensor]],
    output_activation: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    weights, biases = zip(*layers, strict=True)
    return mlp(input, weights, biases, "relu", output_activation, dtype)


def dense_parameters(model: Dlrm) -> list[tuple[str, nn.Parameter]]:
    """Return name and value of all parameters but the tables: weight and bias of each linear layer,
    in order."""
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if not name.startswith("embeddings.")
    ]


def tables(model: Dlrm) -> list[nn.Parameter]:
    """Return the weights of the 26 embeddings."""
    return [value for name, value in model.named_parameters() if name.startswith("embeddings.")]

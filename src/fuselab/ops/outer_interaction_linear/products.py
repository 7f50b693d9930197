"""The layer and its gradients around three matrix products, which an implementation provides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.matrices import empty_gradients, empty_output, row_readable
from fuselab.ops.add_mul_activation.layout import preactivation_gradient
from fuselab.ops.add_mul_activation.triton_launch import backward as pull_back
from fuselab.ops.cat_interaction.triton_launch import forward as joined
from fuselab.ops.outer_interaction_linear import triton_kernels
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.triton_launch import launch

_FINISH_ROWS, _FINISH_COLUMNS = 16, 128
_MOST_ELEMENTS = 32768  # of z: pairs and offsets in a row of the weight are 32-bit


@dataclass(frozen=True)
class Products:
    """The three products of an implementation. z is ``(B, K)`` and total, the pre-activation's
    gradient, ``(B, N)``; both are contiguous, and the weight's rows are. ``scratch`` is None, or a
    tensor of the weight's dtype that may be overwritten. No dimension has size 0.

    ``output(z, weight, scratch)`` returns the sum over pairs in float32 shares ``(splits, B, N)``.
    ``input_gradient(z, total, weight, scratch)`` returns z's gradient in shares ``(splits, B, K)``.
    ``weight_gradient(z, total, grad_weight)`` writes the weight's gradient.
    """

    output: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Tensor], None]

    def forward(
        self,
        dense: Tensor,
        embeddings: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        scratch: Tensor | None = None,
    ) -> Tensor:
        output = empty_output(dense, weight)
        if output.numel() == 0:
            return output
        z, weight = joined(dense, embeddings), row_readable(weight)
        _finish_output(self.output(z, weight, scratch), z, weight, bias, activation, output)
        return output

    def backward(
        self,
        needs: Sequence[bool],
        grad_output: Tensor,
        output: Tensor | None,
        dense: Tensor,
        embeddings: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of dense, embeddings, weight and bias. The weight's gradient serves
        as scratch memory for the folded weight, and is written last."""
        grad_dense, grad_embeddings, grad_weight, _ = empty_gradients(
            (*needs[:3], False), dense, embeddings, weight, bias
        )
        recompute = functools.partial(
            self.forward, dense, embeddings, weight, bias, "identity", grad_weight
        )
        pulled, grad_bias = preactivation_gradient(
            pull_back, (True, needs[3]), grad_output, output, activation, recompute
        )
        assert pulled is not None
        total = pulled.contiguous()
        if total.numel() == 0:
            for empty in (grad_dense, grad_embeddings, grad_weight):
                if empty is not None:
                    empty.zero_()
            return grad_dense, grad_embeddings, grad_weight, grad_bias
        z = joined(dense, embeddings)
        if grad_dense is not None or grad_embeddings is not None:
            weight = row_readable(weight)
            _finish_input(
                self.input_gradient(z, total, weight, grad_weight),
                *(z, total, weight, grad_dense, grad_embeddings, dense.shape[1]),
            )
        if grad_weight is not None:
            self.weight_gradient(z, total, grad_weight)
        return grad_dense, grad_embeddings, grad_weight, grad_bias


def supports(dense: Tensor, embeddings: Tensor, *rest: Any) -> str | None:
    """Return None if a sample has elements and their pairs can be counted in 32 bits, else the
    reason."""
    if dense.dtype == torch.float64:
        return "it has no float64 kernels"
    if embeddings.dim() != 3:
        return None  # `validate` refuses it
    elements = (embeddings.shape[1] + 1) * embeddings.shape[2]
    if 0 < elements <= _MOST_ELEMENTS:
        return None
    return f"a sample has {elements} elements; it takes 1 to {_MOST_ELEMENTS}"


def shares(tiles: int, steps: int, least_steps: int, device: torch.device) -> int:
    """Return the programs per tile that fill the device's multiprocessors, with at least
    ``least_steps`` steps each if possible."""
    most = max(2, multiprocessors(device))  # 2 under the interpreter: sums are split there too
    return max(1, min(most // tiles, steps // least_steps))


def _finish_output(
    partial: Tensor,
    z: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    output: Tensor,
) -> None:
    """Add the shares ``(splits, rows, columns)``, the bias and the activation into ``output``."""
    (splits, rows, columns), width = partial.shape, z.shape[1]
    launch(
        triton_kernels.finish_output,
        (ceil_div(rows, _FINISH_ROWS), ceil_div(columns, _FINISH_COLUMNS)),
        *(partial, z, weight, None if bias is None else bias.contiguous(), output),
        *(rows, width, columns, weight.stride(0), splits, rows * columns),
        ACTIVATION=activation,
        BLOCK_ROWS=_FINISH_ROWS,
        BLOCK_COLUMNS=_FINISH_COLUMNS,
        num_warps=4,
    )


def _finish_input(
    partial: Tensor,
    z: Tensor,
    total: Tensor,
    weight: Tensor,
    grad_dense: Tensor | None,
    grad_embeddings: Tensor | None,
    dense_width: int,
) -> None:
    """Add the shares ``(splits, rows, width)`` into the gradients that are asked for."""
    splits, rows, width = partial.shape
    launch(
        triton_kernels.finish_input,
        (ceil_div(rows, _FINISH_ROWS), ceil_div(width, _FINISH_COLUMNS)),
        *(partial, z, total, weight, grad_dense, grad_embeddings),
        *(rows, width, total.shape[1], dense_width, weight.stride(0), splits, rows * width),
        BLOCK_ROWS=_FINISH_ROWS,
        BLOCK_COLUMNS=_FINISH_COLUMNS,
        num_warps=4,
    )

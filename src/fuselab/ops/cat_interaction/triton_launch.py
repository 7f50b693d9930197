"""Launching the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fuselab.ops.cat_interaction import triton_kernels
from fuselab.ops.dot_interaction.tensors import readable
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.triton_launch import launch

_ROWS, _COLUMNS = 8, 512  # 32 elements of each of 128 threads: DLRM's 432 columns in one program


def empty_output(dense: Tensor, embeddings: Tensor) -> Tensor:
    return dense.new_empty(dense.shape[0], (embeddings.shape[1] + 1) * dense.shape[1])


def empty_gradients(
    needs: Sequence[bool], grad_output: Tensor, tables: int, width: int
) -> tuple[Tensor | None, Tensor | None]:
    batch = grad_output.shape[0]
    return (
        grad_output.new_empty(batch, width) if needs[0] else None,
        grad_output.new_empty(batch, tables, width) if needs[1] else None,
    )


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return ceil_div(rows, _ROWS), ceil_div(columns, _COLUMNS)


def forward(dense: Tensor, embeddings: Tensor) -> Tensor:
    output = empty_output(dense, embeddings)
    if output.numel() == 0:
        return output
    dense, embeddings = readable(dense), readable(embeddings)
    launch(
        triton_kernels.forward,
        _grid(*output.shape),
        dense,
        embeddings,
        output,
        output.shape[0],
        dense.shape[1],
        output.shape[1],
        dense.stride(0),
        *embeddings.stride()[:2],
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return output


def backward(
    needs: Sequence[bool], grad_output: Tensor, tables: int, width: int
) -> tuple[Tensor | None, ...]:
    grads = empty_gradients(needs, grad_output, tables, width)
    if grad_output.numel():
        launch(
            triton_kernels.backward,
            _grid(*grad_output.shape),
            grad_output,
            *grads,
            grad_output.shape[0],
            width,
            grad_output.shape[1],
            *grad_output.stride(),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
    return grads


def supports(dense: Tensor, embeddings: Tensor) -> str | None:
    """The second number of a grid ends at 65535."""
    if embeddings.dim() != 3:
        return None  # which `validate` refuses
    return _too_wide((embeddings.shape[1] + 1) * embeddings.shape[2])


def supports_backward(
    needs: Sequence[bool], grad_output: Tensor, tables: int, width: int
) -> str | None:
    return _too_wide(grad_output.shape[1])


def _too_wide(columns: int) -> str | None:
    return None if columns <= 65535 * _COLUMNS else f"a row has {columns} columns"

"""The launcher of the Triton kernel."""

from __future__ import annotations

from torch import Tensor

from fuselab.ops._shared.matrices import row_readable
from fuselab.ops.cat_interaction import triton_kernels
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.triton_launch import launch

_ROWS, _COLUMNS = 8, 512  # 32 elements per thread of 128: DLRM's 432 columns in one program


def empty_output(dense: Tensor, embeddings: Tensor) -> Tensor:
    return dense.new_empty(dense.shape[0], (embeddings.shape[1] + 1) * dense.shape[1])


def forward(dense: Tensor, embeddings: Tensor) -> Tensor:
    output = empty_output(dense, embeddings)
    if output.numel() == 0:
        return output
    dense, embeddings = row_readable(dense), row_readable(embeddings)
    launch(
        triton_kernels.forward,
        (ceil_div(output.shape[0], _ROWS), ceil_div(output.shape[1], _COLUMNS)),
        *(dense, embeddings, output, output.shape[0], dense.shape[1], output.shape[1]),
        *(dense.stride(0), *embeddings.stride()[:2]),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return output


def supports(dense: Tensor, embeddings: Tensor) -> str | None:
    """Return None if the columns fit the grid, whose second size is at most 65535, else the
    reason."""
    if embeddings.dim() != 3:
        return None  # `validate` refuses it
    columns = (embeddings.shape[1] + 1) * embeddings.shape[2]
    return None if columns <= 65535 * _COLUMNS else f"a row has {columns} columns"

"""Launching the C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fuselab.ops._shared.dtypes import CPP_NAMES
from fuselab.ops._shared.matrices import empty_gradients, row_readable
from fuselab.ops.dot_interaction.layout import empty_output
from fuselab.runtime.cpp_source import CppSource, i64

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))


def forward(dense: Tensor, embeddings: Tensor, padding: int) -> Tensor:
    output = empty_output(dense, embeddings, padding)
    if output.numel() == 0:
        return output
    dense, embeddings = row_readable(dense), row_readable(embeddings)
    batch, tables, width = embeddings.shape
    sizes = (batch, tables + 1, width, output.shape[1])
    strides = (dense.stride(0), *embeddings.stride()[:2])
    CPP.launch(
        f"forward<{CPP_NAMES[dense.dtype]}>",
        (dense, embeddings, output, *map(i64, (*sizes, *strides))),
    )
    return output


def backward(
    needs: Sequence[bool], grad_output: Tensor, dense: Tensor, embeddings: Tensor
) -> tuple[Tensor | None, ...]:
    grads = empty_gradients(needs, dense, embeddings)
    if not any(grad is not None and grad.numel() for grad in grads):
        return grads
    grad_output, dense, embeddings = (
        row_readable(tensor) for tensor in (grad_output, dense, embeddings)
    )
    batch, tables, width = embeddings.shape
    strides = (grad_output.stride(0), dense.stride(0), *embeddings.stride()[:2])
    CPP.launch(
        f"backward<{CPP_NAMES[dense.dtype]}>",
        (grad_output, dense, embeddings, *grads, *map(i64, (batch, tables + 1, width, *strides))),
    )
    return grads

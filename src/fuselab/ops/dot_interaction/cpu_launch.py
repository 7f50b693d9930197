"""Launching the C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.ops.dot_interaction.tensors import empty_gradients, empty_output, readable
from fuselab.runtime.cpp_source import CppSource, i64

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))
_TYPES = {
    torch.float32: "float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float64: "double",
}


def forward(dense: Tensor, embeddings: Tensor, padding: int) -> Tensor:
    output = empty_output(dense, embeddings, padding)
    if output.numel() == 0:
        return output
    dense, embeddings = readable(dense), readable(embeddings)
    batch, tables, width = embeddings.shape
    sizes = (batch, tables + 1, width, output.shape[1])
    strides = (dense.stride(0), *embeddings.stride()[:2])
    CPP.launch(
        f"forward<{_TYPES[dense.dtype]}>",
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
        readable(tensor) for tensor in (grad_output, dense, embeddings)
    )
    batch, tables, width = embeddings.shape
    strides = (grad_output.stride(0), dense.stride(0), *embeddings.stride()[:2])
    CPP.launch(
        f"backward<{_TYPES[dense.dtype]}>",
        (grad_output, dense, embeddings, *grads, *map(i64, (batch, tables + 1, width, *strides))),
    )
    return grads

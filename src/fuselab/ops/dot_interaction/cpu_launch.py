"""Launchers of the C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fuselab.ops._shared.dtypes import CPP_NAMES
from fuselab.ops.dot_interaction.layout import backward_of, forward_of
from fuselab.runtime.cpp_source import CppSource, i64

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))


@forward_of
def forward(dense: Tensor, embeddings: Tensor, padding: int, output: Tensor) -> None:
    batch, tables, width = embeddings.shape
    sizes = (batch, tables + 1, width, output.shape[1])
    strides = (dense.stride(0), *embeddings.stride()[:2])
    CPP.launch(
        f"forward<{CPP_NAMES[dense.dtype]}>",
        (dense, embeddings, output, *map(i64, (*sizes, *strides))),
    )


@backward_of
def backward(
    grad_output: Tensor, dense: Tensor, embeddings: Tensor, grads: Sequence[Tensor | None]
) -> None:
    batch, tables, width = embeddings.shape
    strides = (grad_output.stride(0), dense.stride(0), *embeddings.stride()[:2])
    CPP.launch(
        f"backward<{CPP_NAMES[dense.dtype]}>",
        (grad_output, dense, embeddings, *grads, *map(i64, (batch, tables + 1, width, *strides))),
    )

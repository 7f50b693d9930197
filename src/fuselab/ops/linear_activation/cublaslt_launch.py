"""The library's product with its epilogue (cuBLASLt), and our activation where it has none."""

from __future__ import annotations

import torch
from torch import Tensor

from fuselab.ops._shared.matrices import as_rows, linear
from fuselab.ops.add_mul_activation import op as pointwise
from fuselab.ops.add_mul_activation.cuda_launch import forward as activate
from fuselab.ops.linear_activation import cuda_launch

# torch._addmm_activation: relu, or by use_gelu cuBLASLt's GELU, which is the tanh form: where
# cuBLASLt cannot take the operands PyTorch itself does at::gelu_(result, "tanh") in its place
# (addmm_out_cuda_impl in aten/src/ATen/native/cuda/Blas.cpp). On a CPU use_gelu is the erf form.
EPILOGUES = {"relu": False, "gelu_tanh": True}
_WORD_BYTES = 16


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """In 16 bits one library call where its epilogue has the activation, there is a bias and the
    operands lie on 16 bytes; else eager's own product, rounded, and one pass of ours over it in
    place.

    Beyond 16 bits the epilogue is too coarse (H200, CUDA 13.0, 2026-11-21): gelu_tanh is off by
    21.6 ulp in float32, where eager is by 2.2, and by 5.8e5 in float64.
    """
    rows, weight = _dense(as_rows(input)), _dense(weight)
    shape = (*input.shape[:-1], weight.shape[0])
    has_work = rows.numel() > 0 and weight.numel() > 0
    if bias is not None and activation in EPILOGUES and has_work and _fuses(rows, weight, bias):
        return torch._addmm_activation(bias, rows, weight.t(), use_gelu=EPILOGUES[activation]).view(
            shape
        )
    output = linear(rows, weight, bias)
    if activation != "identity":
        activate(pointwise.CUDA, output, None, None, 1.0, activation, output=output)
    return output.view(shape)


def _fuses(rows: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether cuBLASLt adds the bias before it rounds.

    Its kernels with an epilogue want 16-bit operands whose rows, and the output's, are whole words
    of 16 bytes. For others it rounds the product first, then adds the bias in a kernel of its own:
    of -0.5023 + 0.4812 that leaves 0.6 % of error, where eager rounds the sum once.
    """
    in_words = (
        bias.data_ptr() % _WORD_BYTES == 0
        and weight.shape[0] * weight.element_size() % _WORD_BYTES == 0
        and all(_in_words(matrix) for matrix in (rows, weight))
    )
    return rows.element_size() == 2 and in_words


def _in_words(matrix: Tensor) -> bool:
    """Whether a matrix, the way it lies, has a start and lines that are whole words."""
    if matrix.stride(1) == 1:
        length, step = matrix.shape[1], matrix.stride(0)
    elif matrix.stride(0) == 1:
        length, step = matrix.shape[0], matrix.stride(1)
    else:
        return False
    return matrix.data_ptr() % _WORD_BYTES == 0 and all(
        numbers * matrix.element_size() % _WORD_BYTES == 0 for numbers in (length, step)
    )


def _dense(matrix: Tensor) -> Tensor:
    """A copy where elements share memory. PyTorch would make one too, but of an expanded Wᵀ the way
    it lies (prepare_matrix_for_cublas in aten/src/ATen/native/cuda/Blas.cpp), of which cuBLAS sums
    in another order: of 48 equal products 7.6 ulp off in float32, and 1.3 of copies (H200)."""
    return matrix.contiguous() if 0 in matrix.stride() else matrix


backward = cuda_launch.backward

"""cuBLASLt's product with its epilogue, and our activation where cuBLASLt has none."""

from __future__ import annotations

import torch
from torch import Tensor

from fuselab.ops._shared.matrices import as_rows, depth_aligned, linear
from fuselab.ops.add_mul_activation import op as pointwise
from fuselab.ops.add_mul_activation.cuda_launch import forward as activate
from fuselab.ops.linear_activation import cuda_launch

# The use_gelu argument of torch._addmm_activation. relu is the default; use_gelu is cuBLASLt's
# GELU, the tanh form. Where cuBLASLt cannot take the operands, PyTorch calls
# at::gelu_(result, "tanh") instead (addmm_out_cuda_impl in aten/src/ATen/native/cuda/Blas.cpp).
# On a CPU use_gelu is the erf form.
EPILOGUES = {"relu": False, "gelu_tanh": True}
_WORD_BYTES = 16


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return the activation of the product.

    In 16 bits it is one library call if cuBLASLt's epilogue has the activation, there is a bias and
    the operands are aligned to 16 bytes. Otherwise it is eager's product, rounded, and one pass of
    our activation in place. The epilogue is too coarse for wider dtypes: gelu_tanh in float32 is
    off by 21.6 ulp, where eager is off by 2.2.
    """
    rows, weight = _dense(as_rows(input)), _dense(weight)
    rows, weight = depth_aligned(rows.shape[0], weight.shape[0], rows, weight)
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
    """Return whether cuBLASLt adds the bias before it rounds.

    Its kernels with an epilogue need 16-bit operands whose rows, and the output's, are multiples of
    16 bytes. For others it rounds the product first and then adds the bias in a second kernel:
    -0.5023 + 0.4812 is then off by 0.6 %, where eager rounds the sum once.
    """
    in_words = (
        bias.data_ptr() % _WORD_BYTES == 0
        and weight.shape[0] * weight.element_size() % _WORD_BYTES == 0
        and all(_in_words(matrix) for matrix in (rows, weight))
    )
    return rows.element_size() == 2 and in_words


def _in_words(matrix: Tensor) -> bool:
    """Return whether a matrix starts, and has rows or columns that start, on 16-byte words."""
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
    """Return a contiguous copy of a matrix whose elements share memory, else the matrix itself.

    PyTorch would copy an expanded Wᵀ too, but keep it transposed (prepare_matrix_for_cublas in
    aten/src/ATen/native/cuda/Blas.cpp). cuBLAS sums such an operand in another order: over 48 equal
    products it is 7.6 ulp off in float32, and 1.3 ulp with our copy (H200).
    """
    return matrix.contiguous() if 0 in matrix.stride() else matrix


backward = cuda_launch.backward

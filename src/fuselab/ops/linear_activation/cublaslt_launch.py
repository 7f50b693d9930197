"""The library's product with its epilogue (cuBLASLt), and our activation where it has none."""

from __future__ import annotations

import torch
from torch import Tensor

from fuselab.ops.add_mul_activation import op as pointwise
from fuselab.ops.add_mul_activation.launch import forward_cuda
from fuselab.ops.linear_activation import cuda_launch
from fuselab.ops.linear_activation.product import as_rows, linear

# torch._addmm_activation: relu, or by use_gelu cuBLASLt's GELU, which is the tanh form: where
# cuBLASLt cannot take the operands PyTorch itself does at::gelu_(result, "tanh") in its place
# (addmm_out_cuda_impl in aten/src/ATen/native/cuda/Blas.cpp). On a CPU use_gelu is the erf form.
EPILOGUES = {"relu": False, "gelu_tanh": True}


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """In 16 bits one library call where its epilogue has the activation and there is a bias; else
    eager's own product, rounded, and one pass of ours over it in place.

    Beyond 16 bits the epilogue is too coarse (H200, CUDA 13.0, 2026-11-21): gelu_tanh is off by
    21.6 ulp in float32, where eager is by 2.2, and by 5.8e5 in float64.
    """
    rows, weight = _dense(as_rows(input)), _dense(weight)
    shape = (*input.shape[:-1], weight.shape[0])
    has_work = rows.numel() > 0 and weight.numel() > 0
    if bias is not None and activation in EPILOGUES and input.element_size() == 2 and has_work:
        return torch._addmm_activation(bias, rows, weight.t(), use_gelu=EPILOGUES[activation]).view(
            shape
        )
    output = linear(rows, weight, bias)
    if activation != "identity":
        forward_cuda(pointwise.CUDA, output, None, None, 1.0, activation, output=output)
    return output.view(shape)


def _dense(matrix: Tensor) -> Tensor:
    """A copy where elements share memory. PyTorch would make one too, but of an expanded Wᵀ the way
    it lies (prepare_matrix_for_cublas in aten/src/ATen/native/cuda/Blas.cpp), of which cuBLAS sums
    in another order: of 48 equal products 7.6 ulp off in float32, and 1.3 of copies (H200)."""
    return matrix.contiguous() if 0 in matrix.stride() else matrix


backward = cuda_launch.backward

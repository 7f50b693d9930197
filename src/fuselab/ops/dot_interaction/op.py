"""The contract of ``fuselab::dot_interaction``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fuselab.errors import OperandError
from fuselab.op import Cost, FusedOp, Gradient
from fuselab.ops._shared.cost import arithmetic_unit, bytes_behind, bytes_of
from fuselab.ops._shared.dense_and_embeddings import autocast, check_shapes
from fuselab.ops._shared.dtypes import FLOATING, check_floating, check_same_dtype
from fuselab.ops._shared.launched import launched
from fuselab.ops._shared.saved import empty_like_saved
from fuselab.ops.dot_interaction import cases, cpu_launch, cuda_launch, triton_launch
from fuselab.ops.dot_interaction.layout import empty_output, pair_count
from fuselab.ops.dot_interaction.reference import flat_indices, gradient, reference
from fuselab.ops.dot_interaction.rewrites import rewrites


def validate(dense: Tensor, embeddings: Tensor, padding: int) -> None:
    check_shapes("dot_interaction", dense, embeddings)
    check_floating("dot_interaction", dense=dense, embeddings=embeddings)
    check_same_dtype("dot_interaction", dense=dense, embeddings=embeddings)
    if padding < 0:
        raise OperandError(
            f"dot_interaction: 'padding' is {padding}; expected 0 or more columns of zeros."
        )


def save(output: Tensor, dense: Tensor, embeddings: Tensor, padding: int) -> tuple[Any, ...]:
    return dense, embeddings


def prefer(dense: Tensor, embeddings: Tensor, padding: int) -> Sequence[str]:
    """Return Triton first for 16-bit vectors wider than 16, else CUDA. On an H200, 16384 x 26 x 128
    in bfloat16 takes Triton 76 us and CUDA 130; 65536 x 26 x 16 takes CUDA 32 and Triton 74."""
    wide_half = dense.element_size() == 2 and dense.shape[1] > 16
    return ("triton", "cuda") if wide_half else ("cuda", "triton")


def prefer_backward(
    needs: Sequence[bool], grad_output: Tensor, dense: Tensor, embeddings: Tensor
) -> Sequence[str]:
    """Return CUDA first on a GPU. Triton is faster only for wide float32 (16384 x 26 x 128 on an
    H200: 173 us for 199)."""
    return ("cuda", "triton") if dense.is_cuda else ("cpp",)


# The arithmetic is float32's for all but float64: 16-bit inputs are converted, or multiplied at
# twice that rate or more, and memory is the limit in either case.


def cost(dense: Tensor, embeddings: Tensor, padding: int) -> Cost:
    """Return the least traffic, both inputs read once and the row written once, and a
    multiplication and an addition per element of every pair."""
    batch, tables, width = embeddings.shape
    pairs = pair_count(tables + 1)
    return Cost(
        bytes_behind(dense, embeddings),
        batch * (width + pairs + padding) * dense.element_size(),
        2 * batch * pairs * width,
        arithmetic_unit(dense.dtype),
    )


def cost_backward(dense: Tensor, embeddings: Tensor, padding: int) -> Cost:
    """Return the least traffic, the row's upstream gradient and both inputs read once and both
    gradients written once; every pair's gradient is multiplied with both of its vectors."""
    batch, tables, width = embeddings.shape
    pairs = pair_count(tables + 1)
    return Cost(
        bytes_behind(dense, embeddings) + batch * (width + pairs) * dense.element_size(),
        bytes_of(dense, embeddings),
        4 * batch * pairs * width + dense.numel(),
        arithmetic_unit(dense.dtype),
    )


OP = FusedOp(
    name="fuselab::dot_interaction",
    reference=reference,
    implementations={
        "cuda": launched("cuda", cuda_launch),
        "triton": launched("cuda", triton_launch),
        "cpp": launched("cpu", cpu_launch),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=cases.CASES,
    gradient=Gradient(save, gradient, empty_like_saved(0, 1), prefer_backward),
    draw=cases.draw,
    space=cases.space,
    validate=validate,
    fake=empty_output,
    prefer=prefer,
    cpu_cases=cases.CPU_CASES,
    rewrites=tuple(rewrites()),
    autocast=autocast,
    peers={"index_select": flat_indices},
    dtypes=FLOATING,
    configs={
        "cuda": cuda_launch.configs,
        "cuda_backward": cuda_launch.configs_backward,
        "triton": triton_launch.configs,
        "triton_backward": triton_launch.configs_backward,
    },
)

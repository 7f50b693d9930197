"""The contract of ``fuselab::add``, and its launchers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import ShapeError
from fuselab.op import Case, Cost, Draw, FusedOp, Gradient, Implementation, Inputs
from fuselab.ops._shared.cost import arithmetic_unit, bytes_behind, bytes_of
from fuselab.ops._shared.dtypes import FLOATING, check_floating
from fuselab.ops._shared.grid import (
    flat_tile,
    launch_by_packs,
    nest_numbers,
    tile_of,
    triton_arithmetic,
)
from fuselab.ops._shared.layout import MAX_RANK, Nest, nest
from fuselab.ops.add import broadcast_gradient
from fuselab.ops.add.reference import gradient, reference
from fuselab.runtime.cuda_source import CudaSource
from fuselab.runtime.triton_launch import launch

CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
# Every dtype; packed and not, 32-bit and 64-bit offsets, one loop and five.
CUDA_EXPRESSIONS = (
    "add<float, float, float, int32_t, 1, 4, true, true>",
    "add<double, double, double, int32_t, 2, 2, true, false>",
    "add<__half, __half, __half, int64_t, 1, 8, true, true>",
    "add<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, int32_t, 5, 8, false, true>",
    "add<float, __half, __nv_bfloat16, int64_t, 3, 1, false, false>",
)


def validate(input: Tensor, other: Tensor) -> None:
    check_floating("add", input=input, other=other)
    try:
        torch.broadcast_shapes(input.shape, other.shape)
    except RuntimeError:
        raise ShapeError(
            f"add: 'other' has shape {tuple(other.shape)} and 'input' {tuple(input.shape)}; they "
            "must broadcast: counted from the last, sizes are equal or one of them is 1."
        ) from None


def empty_output(input: Tensor, other: Tensor) -> Tensor:
    """The output, not yet written, as the reference's docstring says; also the contract's fake."""
    shape = torch.broadcast_shapes(input.shape, other.shape)
    dtype = torch.result_type(input, other)
    for like in (input, other):
        if like.shape == shape:
            return torch.empty_like(like, dtype=dtype)
    return input.new_empty(shape, dtype=dtype)


def save(output: Tensor, input: Tensor, other: Tensor) -> tuple[Any, ...]:
    """No tensor: a sum's gradient is the upstream one."""
    return tuple(input.shape), tuple(other.shape), input.dtype, other.dtype


def _nest(output: Tensor, input: Tensor, other: Tensor) -> tuple[Nest, Tensor, Tensor]:
    """The loop nest; beyond rank 5, over copies laid out as the output is."""
    operands = [tensor.expand(output.shape) for tensor in (input, other)]
    loops = nest(output, [operand.stride() for operand in operands])
    if len(loops.sizes) > MAX_RANK:
        operands = [torch.empty_like(output, dtype=op.dtype).copy_(op) for op in operands]
        loops = nest(output, [operand.stride() for operand in operands])
    return loops, operands[0], operands[1]


def forward_triton(input: Tensor, other: Tensor) -> Tensor:
    """One launch of ``add`` where all tensors are dense alike, else of ``add_strided``."""
    from fuselab.ops.add import triton_kernels as kernels

    output = empty_output(input, other)
    if output.numel() == 0:
        return output
    loops, input, other = _nest(output, input, other)
    compute = triton_arithmetic(output.dtype)
    if loops.is_flat:
        grid, tile = flat_tile(loops, output.dtype)
        kernel, numbers = kernels.add, [loops.numel]
    else:
        grid, tile = tile_of(loops)
        kernel, numbers = kernels.add_strided, nest_numbers(loops)
    launch(kernel, grid, input, other, output, *numbers, COMPUTE=compute, **tile)
    return output


def forward_cuda(input: Tensor, other: Tensor) -> Tensor:
    """One launch of ``add`` in cuda_kernels.cu."""
    output = empty_output(input, other)
    if output.numel() == 0:
        return output
    loops, input, other = _nest(output, input, other)
    dtypes = (output.dtype, input.dtype, other.dtype)
    launch_by_packs(CUDA, "add", loops, dtypes, (input, other), output)
    return output


def cost(input: Tensor, other: Tensor) -> Cost:
    """Both read once, the output written once; one addition."""
    numel = torch.broadcast_shapes(input.shape, other.shape).numel()
    dtype = torch.result_type(input, other)
    read = bytes_behind(input, other)
    return Cost(read, numel * dtype.itemsize, numel, arithmetic_unit(dtype))


def cost_backward(input: Tensor, other: Tensor) -> Cost:
    """Nothing where neither was broadcast: both gradients are the upstream one. Else that is read
    once, and what was broadcast written once."""
    dtype = torch.result_type(input, other)
    numel = torch.broadcast_shapes(input.shape, other.shape).numel()
    summed = [tensor for tensor in (input, other) if tensor.numel() != numel]
    written = bytes_of(*summed)
    read = numel * dtype.itemsize if summed else 0
    return Cost(read, written, len(summed) * numel, arithmetic_unit(dtype))


def prefer(input: Tensor, other: Tensor) -> Sequence[str]:
    """torch.add runs at the limit of memory, but for a broadcast: 65536 x 512 float32 and one row
    take it 102 us, CUDA 68.5 and Triton 67.7 (H200; 97 all three where both are whole)."""
    return ("reference",) if input.shape == other.shape else ("cuda", "triton")


_SWEEP = ((4, 4), (256, 256), (4096, 128), (16384, 256), (65536, 512), (262144, 1024))
# Around a block's edge: 1024 elements in Triton and in CUDA C++, in float32.
_BOUNDARY = (
    ((), ()),
    ((1,), ()),
    ((0, 8), (8,)),
    ((1023,), (1023,)),
    ((1024,), (1024,)),
    ((1025,), (1025,)),
    ((7, 1), (1, 9)),
    ((33, 31), (31,)),
    ((33, 32), (32,)),
    ((33, 32), (33, 1)),
    ((32,), (41, 32)),
    ((2, 1, 5), (3, 1)),
    ((129, 257), ()),
)
_LAYOUTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "transposed": lambda input, other: (input.t(), other.t()),
    "transposed_other": lambda input, other: (input, other.t().contiguous().t()),
    "expanded": lambda input, other: (input[:1].expand_as(input), other[:, :1].expand_as(other)),
    "offset_rows": lambda input, other: (input[1:, 3:], other[1:, 3:]),
    "every_other_column": lambda input, other: (input[:, ::2], other[:, ::2]),
    "rank_6": lambda input, other: (
        input.view(2, 3, 2, 3, 2, 34)[..., :17].transpose(0, 4),
        other.view(2, 3, 2, 3, 2, 34)[..., 1::2].transpose(0, 4).contiguous(),
    ),
}

Make = Callable[[torch.device, torch.dtype, torch.Generator], Inputs]


def _case(
    input_shape: Sequence[int],
    other_shape: Sequence[int],
    lay_out: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda *pair: pair,
) -> Make:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        pair = (
            torch.randn(tuple(shape), generator=generator).to(device, dtype)
            for shape in (input_shape, other_shape)
        )
        return Inputs(lay_out(*pair))

    return make


def _cases() -> Iterator[Case]:
    for shape in _SWEEP:
        tags = {"bench", "sweep"}
        tags |= {"tiny"} if shape == (4, 4) else {"huge"} if shape[0] == 262144 else set()
        yield Case("x".join(map(str, shape)), _case(shape, shape), frozenset(tags))
    rows = _case((65536, 512), (512,))
    yield Case("65536x512_one_row", rows, frozenset({"bench"}))
    boundary = frozenset({"boundary"})
    for input_shape, other_shape in _BOUNDARY:
        name = "_and_".join(
            "x".join(map(str, shape)) or "0d" for shape in (input_shape, other_shape)
        )
        yield Case(f"boundary_{name}", _case(input_shape, other_shape), boundary)
    for name, lay_out in _LAYOUTS.items():
        yield Case(f"layout_{name}", _case((72, 34), (72, 34), lay_out), boundary)


def draw(source: Draw) -> Inputs:
    """Any shape and layout; any dimension of either may be broadcast, or leading ones missing."""
    shape = [source.size(1, 3, 4, 33, 256, 257) for _ in range(source.choice((2, 1, 0, 3)))]

    def broadcast() -> list[int]:
        kept = [1 if source.choice((False, False, True)) else size for size in shape]
        return kept[source.choice(range(len(shape) + 1)) if source.choice((False, True)) else 0 :]

    one, other = broadcast(), broadcast()
    return Inputs((source.tensor(*one), source.tensor(*other)))


OP = FusedOp(
    name="fuselab::add",
    reference=reference,
    implementations={
        "triton": Implementation(
            "cuda",
            forward_triton,
            partial(broadcast_gradient.backward, broadcast_gradient.sums_triton),
            supports_backward=broadcast_gradient.refusal,
        ),
        "cuda": Implementation(
            "cuda",
            forward_cuda,
            partial(broadcast_gradient.backward, broadcast_gradient.sums_cuda),
            supports_backward=broadcast_gradient.refusal,
        ),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=tuple(_cases()),
    gradient=Gradient(
        save,
        gradient,
        prefer=broadcast_gradient.prefer,
        unchanged=broadcast_gradient.unchanged,
    ),
    draw=draw,
    validate=validate,
    fake=empty_output,
    prefer=prefer,
    dtypes=FLOATING,
)

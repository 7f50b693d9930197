"""Launchers of act(input + scale * update + bias): they allocate outputs and start kernels.

``update`` or ``bias`` may be None; ``bias_activation`` is the operator without update. Every
launcher takes the kernels' source first, so that a package passes its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.dtypes import CUDA_NAMES, cpp_types, cuda_types, promoted
from fuselab.ops._shared.grid import THREADS, flat_tile, nest_numbers, tile_of, triton_arithmetic
from fuselab.ops._shared.layout import MAX_RANK, Nest, is_dense, nest, row_strides
from fuselab.ops._shared.packs import is_aligned, pack_width
from fuselab.ops._shared.template_arguments import flags, index_type, numbers
from fuselab.ops.add_mul_activation import bias_gradient
from fuselab.runtime.cpp_source import CppSource
from fuselab.runtime.cuda_source import CudaSource
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.parameters import Scalar, f32, f64, i64
from fuselab.runtime.triton_launch import launch as launch_triton
from fuselab.runtime.tuning import Config

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def empty_output(input: Tensor, update: Tensor | None, bias: Tensor | None) -> Tensor:
    """The output: type promotion's dtype and the strides of ``torch.empty_like(input)``."""
    return torch.empty_like(input, dtype=promoted(input, update, bias))


@dataclass(frozen=True)
class Saved:
    """What the forward left for the backward: the output, or what the pre-activation is made of."""

    activation: str
    scale: float | Tensor
    output: Tensor | None
    input: Tensor | None
    update: Tensor | None
    bias: Tensor | None
    input_dtype: torch.dtype
    update_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None

    @cached_property
    def first(self) -> Tensor | None:
        """The tensor whose shape and strides the gradients take; None for identity."""
        return self.output if self.output is not None else self.input

    def empty_gradients(self, needs: Sequence[bool], grad_output: Tensor) -> Gradients:
        """The gradients that are needed, of input, update and bias, not yet written.

        The first two have the strides of ``torch.empty_like`` of the output where that was saved,
        of the input where that was, and of the upstream gradient for identity, which saves nothing.
        """
        like = self.first if self.first is not None else grad_output
        columns = grad_output.shape[-1:]
        return (
            torch.empty_like(like, dtype=self.input_dtype) if needs[0] else None,
            torch.empty_like(like, dtype=self.update_dtype) if needs[1] else None,
            grad_output.new_empty(columns, dtype=self.bias_dtype) if needs[2] else None,
        )


def _broadcast(bias: Tensor | None, rank: int) -> tuple[int, ...]:
    return (0,) * rank if bias is None else (0,) * (rank - 1) + bias.stride()


def overwrite(
    forward: Callable[..., Tensor],
    input: Tensor,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float | Tensor,
    activation: str,
) -> None:
    """Write the output of ``forward`` over ``input``.

    The kernels may: a thread reads an element of the input before it writes that one, and no other
    thread reads it. That an update or a bias shares memory with the input has been refused. They
    write dense tensors of the promoted dtype only; any other input is copied to once more.
    """
    if is_dense(input) and promoted(input, update, bias) == input.dtype:
        forward(input, update, bias, scale, activation, output=input)
    else:
        input.copy_(forward(input, update, bias, scale, activation))


def _forward_nest(
    output: Tensor, input: Tensor, update: Tensor | None, bias: Tensor | None
) -> tuple[Nest, Tensor, Tensor | None]:
    """The nest with operands input, update, bias; beyond rank 5, over copies laid out alike."""
    first = update if update is not None else input
    strides = (input.stride(), first.stride(), _broadcast(bias, output.dim()))
    loops = nest(output, strides)
    if len(loops.sizes) <= MAX_RANK:
        return loops, input, update
    input = torch.empty_like(output, dtype=input.dtype).copy_(input)
    if update is not None:
        update = torch.empty_like(output, dtype=update.dtype).copy_(update)
    strides = (input.stride(), input.stride(), _broadcast(bias, output.dim()))
    return nest(output, strides), input, update


Operands = Sequence[Tensor | None]
Elementwise = Callable[[Nest, Operands, Gradients], None]


def _run_backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    saved: Saved,
    elementwise: Elementwise,
    with_bias: Callable[[_Matrices], None],
) -> Gradients:
    """Allocate the gradients and have them written: by ``with_bias`` where that of the bias is
    needed, else by ``elementwise`` over a nest of grad_output, first, update and bias."""
    grads = saved.empty_gradients(needs, grad_output)
    if grad_output.numel() == 0:
        return (*grads[:2], grads[2].zero_() if grads[2] is not None else None)
    if needs[2]:
        matrices = _Matrices(grad_output, saved, grads)
        with_bias(matrices)
        return matrices.finished()
    template = grads[0] if grads[0] is not None else grads[1]
    if template is not None:
        operands: Operands = (grad_output, saved.first, saved.update, saved.bias)
        loops = _backward_nest(template, operands)
        if len(loops.sizes) > MAX_RANK:
            operands = _dense_operands(template, operands)
            loops = _backward_nest(template, operands)
        elementwise(loops, operands, grads)
    return grads


def _backward_nest(template: Tensor, operands: Operands) -> Nest:
    """The nest with operands grad_output, first, update, bias; one that is not read takes the
    strides of grad_output and so asks for no loop of its own."""
    *dense, bias = operands
    assert dense[0] is not None
    upstream = dense[0].stride()
    strides = [upstream if tensor is None else tensor.stride() for tensor in dense]
    strides.append(upstream if bias is None else _broadcast(bias, template.dim()))
    return nest(template, strides)


def _dense_operands(template: Tensor, operands: Operands) -> Operands:
    """The operands but the last, the bias, copied to the template's layout."""
    *dense, bias = operands
    return [
        operand
        if operand is None
        else torch.empty_like(template, dtype=operand.dtype).copy_(operand)
        for operand in dense
    ] + [bias]


def _kind(activation: str, has_update: bool, has_bias: bool) -> str:
    """The first template arguments of every kernel in C++ and CUDA C++."""
    return f"{activation_named(activation).functor}, Terms<{flags(has_update, has_bias)}>"


def _backward_kind(saved: Saved) -> str:
    if saved.input is None:  # the terms are not read
        return _kind(saved.activation, True, True)
    return _kind(saved.activation, saved.update is not None, saved.bias is not None)


def _forward_dtypes(output: Tensor, input: Tensor, *terms: Tensor | None) -> list[torch.dtype]:
    """Of output, input, update, bias; one that is not there has the input's."""
    return [output.dtype, input.dtype, *((input if t is None else t).dtype for t in terms)]


def _backward_dtypes(grad_output: Tensor, saved: Saved) -> list[torch.dtype]:
    """Of output, first, input, update, bias."""
    return [
        grad_output.dtype,
        saved.first.dtype if saved.first is not None else grad_output.dtype,
        saved.input_dtype,
        saved.update_dtype or saved.input_dtype,
        saved.bias_dtype or saved.input_dtype,
    ]


# C++.


def _cpp_scale(scale: float | Tensor, output_dtype: torch.dtype) -> Scalar:
    value = scale.item() if isinstance(scale, Tensor) else scale
    return f64(value) if output_dtype == torch.float64 else f32(value)


def forward_cpp(
    source: CppSource,
    input: Tensor,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float | Tensor,
    activation: str,
    output: Tensor | None = None,
) -> Tensor:
    """One launch of ``forward`` in cpu_kernels.cpp."""
    output = empty_output(input, update, bias) if output is None else output
    if output.numel() == 0:
        return output
    loops, input, update = _forward_nest(output, input, update, bias)
    loops = loops.padded()
    kind = _kind(activation, update is not None, bias is not None)
    source.launch(
        f"forward<{kind}, {cpp_types(_forward_dtypes(output, input, update, bias))}>",
        args=(
            input,
            update,
            bias,
            output,
            _cpp_scale(scale, output.dtype),
            *numbers(loops.sizes, *loops.strides),
        ),
    )
    return output


def backward_cpp(
    source: CppSource, needs: Sequence[bool], grad_output: Tensor, saved: Saved
) -> Gradients:
    """One launch of ``backward``, or of ``backward_with_bias`` where the bias's gradient is needed.

    The latter's workspace is float64: the columns, and up to 64 partial rows of them (one for every
    1024 columns less). It writes row-major gradients, so a gradient whose strides are others is
    copied once more, and an operand whose rows have no common stride is copied first.
    """
    kind = f"{_backward_kind(saved)}, {cpp_types(_backward_dtypes(grad_output, saved))}"
    scale = _cpp_scale(saved.scale, grad_output.dtype)

    def elementwise(loops: Nest, operands: Operands, grads: Gradients) -> None:
        loops = loops.padded()
        shape = numbers(loops.sizes, *loops.strides)
        source.launch(f"backward<{kind}>", args=(*operands, *grads[:2], scale, *shape))

    def with_bias(matrices: _Matrices) -> None:
        source.launch(
            f"backward_with_bias<{kind}>",
            args=(
                *matrices.operands,
                saved.bias,
                *matrices.written,
                scale,
                *numbers((matrices.rows, matrices.columns), matrices.strides),
            ),
        )

    return _run_backward(needs, grad_output, saved, elementwise, with_bias)


class _Matrices:
    """The operands of a backward with bias as matrices (rows, columns), and where it writes."""

    def __init__(self, grad_output: Tensor, saved: Saved, grads: Gradients) -> None:
        def matrix(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.reshape(-1, tensor.shape[-1])

        upstream = matrix(grad_output)
        assert upstream is not None and grads[2] is not None
        self.rows, self.columns = upstream.shape
        self.operands = (upstream, matrix(saved.first), matrix(saved.update))
        self.bias_stride = 0 if saved.bias is None else saved.bias.stride(0)
        self.grads, self.grad_bias = grads, grads[2]
        self.written = tuple(
            grad
            if grad is None or grad.is_contiguous()
            else torch.empty_like(grad, memory_format=torch.contiguous_format)
            for grad in grads
        )

    @property
    def strides(self) -> tuple[int, ...]:
        """Row and column stride of each operand, and the stride of the bias."""
        pairs = (
            (0, 0) if operand is None else row_strides(self.rows, self.columns, operand)
            for operand in self.operands
        )
        return (*(stride for pair in pairs for stride in pair), self.bias_stride)

    def needs_64_bit_offsets(self) -> bool:
        # The margin: a tile's offsets are computed before they are masked.
        furthest = (
            (self.rows + 2048) * row + (self.columns + 2048) * column
            for row, column in (
                (self.columns, 1),
                (0, self.bias_stride),
                *zip(self.strides[:-1:2], self.strides[1::2], strict=True),
            )
        )
        # The other: a row counts on by a step of all blocks' tiles before it is compared.
        return max(*furthest, self.rows + 2**24) > 2**31 - 1

    def empty_sums(self, blocks: int) -> Tensor:
        """Where the blocks' column sums go: the bias's gradient itself if there is one block."""
        if blocks == 1:
            return self.grad_bias
        return self.grad_bias.new_empty((blocks, self.columns), dtype=torch.float64)

    def finished(self) -> Gradients:
        """The gradients, filled from the tensors that were written in their place."""
        for grad, source in zip(self.grads, self.written, strict=True):
            if grad is not None and source is not None and grad is not source:
                grad.copy_(source)
        return self.grads


# Triton and CUDA C++.


def _triton_scale(scale: float | Tensor) -> tuple[Tensor | None, float]:
    return (scale, 0.0) if isinstance(scale, Tensor) else (None, scale)


def _flat_columns(
    loops: Nest, bias_place: int | None, read: Sequence[int]
) -> tuple[int, int] | None:
    """(columns, stride of the bias) where a flat kernel can walk the nest, else None.

    ``read`` are the places of the operands that must count up like the output; the bias repeats
    every ``columns`` elements.
    """
    linear = [1] * len(loops.sizes)
    for dim in range(len(linear) - 1, 0, -1):
        linear[dim - 1] = linear[dim] * loops.sizes[dim]
    if any(loops.strides[place] != tuple(linear) for place in read):
        return None
    if bias_place is None:
        return 1, 0
    *outer, inner = loops.strides[bias_place]
    if any(outer):
        return None
    return loops.sizes[-1] if inner else 1, inner


def _triton_walk(
    loops: Nest, flat: tuple[int, int] | None, output_dtype: torch.dtype
) -> tuple[str, tuple[int, ...], list[int], dict[str, Any]]:
    """(suffix of the kernel's name, grid, numbers, constants) of a flat or a strided kernel."""
    if flat is None:
        grid, constants = tile_of(loops)
        return "_strided", grid, nest_numbers(loops), constants
    grid, constants = flat_tile(loops, output_dtype)
    block, columns = constants["BLOCK"], flat[0]
    constants |= {
        "VECTOR": math.gcd(columns, 8),
        "WRAPS_ONCE": block <= columns,
        "WIDE": loops.needs_64_bit_offsets() or loops.numel + block > 2**31 - 1,
    }
    return "", grid, [loops.numel, *flat], constants


def forward_triton(
    input: Tensor,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float | Tensor,
    activation: str,
    output: Tensor | None = None,
) -> Tensor:
    """One launch of ``forward`` where all tensors are dense alike, else of ``forward_strided``."""
    from fuselab.ops.add_mul_activation import triton_kernels as kernels

    output = empty_output(input, update, bias) if output is None else output
    if output.numel() == 0:
        return output
    loops, input, update = _forward_nest(output, input, update, bias)
    flat = _flat_columns(loops, None if bias is None else 2, (0, 1))
    suffix, grid, shape, constants = _triton_walk(loops, flat, output.dtype)
    launch_triton(
        getattr(kernels, f"forward{suffix}"),
        grid,
        *(input, update, bias, output),
        *_triton_scale(scale),
        *shape,
        ACTIVATION=activation,
        COMPUTE=triton_arithmetic(output.dtype),
        **constants,
    )
    return output


def backward_triton(needs: Sequence[bool], grad_output: Tensor, saved: Saved) -> Gradients:
    """One launch of ``backward`` or ``backward_strided``; where the bias's gradient is needed, of
    ``backward_with_bias``, and of ``column_sums`` if there is more than one block of rows.

    The latter's workspace is (row blocks, columns) in float64: 4 programs of up to 256 columns per
    multiprocessor, so at most 1 MB on 132 of them. It writes row-major gradients, so a gradient
    whose strides are others is copied once more, and an operand whose rows have no common stride is
    copied first. The order of the sums depends on shape and device only.
    """
    from fuselab.ops.add_mul_activation import triton_kernels as kernels

    scale = _triton_scale(saved.scale)
    constants = {
        "ACTIVATION": saved.activation,
        "COMPUTE": triton_arithmetic(grad_output.dtype),
        "FROM_OUTPUT": saved.output is not None,
    }

    def elementwise(loops: Nest, operands: Operands, grads: Gradients) -> None:
        flat = _flat_columns(loops, None if saved.bias is None else 3, (0, 1, 2))
        suffix, grid, shape, tile = _triton_walk(loops, flat, grad_output.dtype)
        kernel = getattr(kernels, f"backward{suffix}")
        arguments = (*operands, *grads[:2], *scale, *shape)
        launch_triton(kernel, grid, *arguments, **constants, **tile)

    def with_bias(matrices: _Matrices) -> None:
        rows, columns = matrices.rows, matrices.columns
        across = max(16, min(power_of_two(columns), 256))  # few shapes: each is to be compiled
        down = bias_gradient.TRITON_ELEMENTS // across
        tiles = ceil_div(columns, across)
        programs = multiprocessors(grad_output.device) * bias_gradient.TRITON_PROGRAMS
        blocks, tiles_per_block = bias_gradient.row_blocks(rows, down, programs // tiles)
        sums = matrices.empty_sums(blocks)
        launch_triton(
            kernels.backward_with_bias,
            (blocks * tiles,),
            *matrices.operands,
            saved.bias,
            *matrices.written[:2],
            sums,
            *scale,
            *(rows, columns, tiles_per_block * down),
            *matrices.strides,
            num_warps=bias_gradient.TRITON_WARPS,
            **constants,
            WIDE=matrices.needs_64_bit_offsets(),
            BLOCK_ROWS=down,
            BLOCK_COLUMNS=across,
        )
        if blocks > 1:
            launch_triton(
                kernels.column_sums,
                (ceil_div(columns, 16),),
                *(sums, matrices.grad_bias, blocks, columns),
                BLOCK_ROWS=256,
                BLOCK_COLUMNS=16,
            )

    return _run_backward(needs, grad_output, saved, elementwise, with_bias)


# CUDA C++. Threads of a block: 256, as cuda_nest.h says.


def _cuda_scale(scale: float | Tensor, output_dtype: torch.dtype) -> tuple[str, Tensor | Scalar]:
    """The type that the kernel is told, and the argument."""
    if isinstance(scale, Tensor):
        return f"const {CUDA_NAMES[scale.dtype]}*", scale
    return ("double", f64(scale)) if output_dtype == torch.float64 else ("float", f32(scale))


def _launch_cuda(
    source: CudaSource,
    kernel: str,
    loops: Nest,
    flat: tuple[int, int] | None,
    width: int,
    aligned: tuple[bool, bool, Tensor | None, bool],
    operands: Sequence[Tensor | Scalar | None],
) -> None:
    """Launch ``kernel``, an open template argument list, or its strided form.

    ``aligned`` is Access of cuda_kernels.cu, with the bias in place of what is said of it.
    """
    numel = loops.numel
    is_wide = loops.needs_64_bit_offsets()  # of flat kernels only the bias's, by a long stride
    if flat is None:
        padded = loops.padded()
        is_wide |= numel + 4 * THREADS > 2**31 - 1
        kernel = kernel.replace("<", "_strided<", 1)
        kernel += f", {index_type(is_wide)}, {len(loops.sizes)}>"
        blocks, shape = ceil_div(numel, 4 * THREADS), (*padded.sizes, *sum(padded.strides, ()))
    else:
        first, second, bias, written = aligned
        bias_packed = bias is not None and flat[1] == 1 and flat[0] % width == 0
        access = flags(first, second, bias_packed and is_aligned(bias), written)
        index = index_type(is_wide or numel + THREADS * width > 2**31 - 1)
        kernel += f", {index}, Access<{access}>, {width}>"
        blocks, shape = ceil_div(numel, THREADS * width), flat
    arguments = (*operands, i64(numel), *numbers(shape))
    source.launch(kernel, grid=(blocks, 1, 1), block=(THREADS, 1, 1), args=arguments)


def forward_cuda(
    source: CudaSource,
    input: Tensor,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float | Tensor,
    activation: str,
    output: Tensor | None = None,
) -> Tensor:
    """One launch of ``forward`` where all tensors are dense alike, else of ``forward_strided``."""
    output = empty_output(input, update, bias) if output is None else output
    if output.numel() == 0:
        return output
    loops, input, update = _forward_nest(output, input, update, bias)
    scale_type, scale_argument = _cuda_scale(scale, output.dtype)
    dtypes = _forward_dtypes(output, input, update, bias)
    kind = _kind(activation, update is not None, bias is not None)
    _launch_cuda(
        source,
        f"forward<{kind}, {cuda_types(dtypes)}, {scale_type}",
        loops,
        _flat_columns(loops, None if bias is None else 2, (0, 1)),
        pack_width(*dtypes[:3]),
        (is_aligned(input), is_aligned(update), bias, is_aligned(output)),
        (input, update, bias, output, scale_argument),
    )
    return output


def backward_cuda(
    source: CudaSource,
    needs: Sequence[bool],
    grad_output: Tensor,
    saved: Saved,
    config: Config | None = None,
) -> Gradients:
    """One launch of ``backward`` or ``backward_strided``; where the bias's gradient is needed, of
    ``backward_with_bias``, and of ``column_sums`` if there is more than one block of rows.

    The workspace and the copies are those of ``backward_triton``, with ``blocks`` per
    multiprocessor of ``config``, one of bias_gradient.CUDA, by default what tuning chose; the order
    of the sums depends on it too.
    """
    dtypes = _backward_dtypes(grad_output, saved)
    types = f"{_backward_kind(saved)}, {cuda_types(dtypes)}"
    scale_type, scale = _cuda_scale(saved.scale, grad_output.dtype)
    width = pack_width(*dtypes[:4])

    def elementwise(loops: Nest, operands: Operands, grads: Gradients) -> None:
        _launch_cuda(
            source,
            f"backward<{types}, {scale_type}",
            loops,
            _flat_columns(loops, None if saved.bias is None else 3, (0, 1, 2)),
            width,
            (is_aligned(*operands[:2]), is_aligned(operands[2]), saved.bias, is_aligned(*grads)),
            (*operands, *grads[:2], scale),
        )

    def with_bias(matrices: _Matrices) -> None:
        how = config
        if how is None and matrices.rows > bias_gradient.SHORT_ROWS:
            how = bias_gradient.tuned(grad_output)
        _launch_with_bias(source, types, scale_type, scale, width, matrices, saved.bias, how)

    return _run_backward(needs, grad_output, saved, elementwise, with_bias)


def _launch_with_bias(
    source: CudaSource,
    types: str,
    scale_type: str,
    scale: Tensor | Scalar,
    width: int,
    matrices: _Matrices,
    bias: Tensor | None,
    config: Config | None,
) -> None:
    """``config`` is None where one block of rows is to do."""
    rows, columns = matrices.rows, matrices.columns
    read = [operand for operand in matrices.operands if operand is not None]
    if columns % width or not all(operand.is_contiguous() for operand in read):
        width = 1
    if not is_aligned(*read, *matrices.written[:2]):
        width = 1
    how = config or bias_gradient.SHORT
    most_across = (64 if width > 1 else 128) if config else (8 if width > 1 else 32)
    across = min(power_of_two(ceil_div(columns, width)), most_across)
    down = how.threads // across
    unroll = bias_gradient.rows_in_flight(how, width)
    column_tiles = ceil_div(columns, across * width)
    programs = multiprocessors(matrices.grad_bias.device) * how.blocks if config else 1
    blocks, _ = bias_gradient.row_blocks(rows, unroll * down, programs // column_tiles)
    sums = matrices.empty_sums(blocks)
    index = index_type(matrices.needs_64_bit_offsets())
    source.launch(
        f"backward_with_bias<{types}, {CUDA_NAMES[sums.dtype]}, {scale_type}, {index}, "
        f"{width}, {how.threads}, {unroll}>",
        grid=(column_tiles, blocks, 1),
        block=(across, down, 1),
        args=(
            *matrices.operands,
            bias,
            *matrices.written[:2],
            sums,
            scale,
            *numbers((rows, columns), matrices.strides),
        ),
    )
    if blocks > 1:
        source.launch(
            f"column_sums<{CUDA_NAMES[matrices.grad_bias.dtype]}>",
            grid=(ceil_div(columns, 8), 1, 1),
            block=(8, 128, 1),
            args=(sums, matrices.grad_bias, i64(blocks), i64(columns)),
        )


def cuda_expressions(has_update: bool) -> tuple[str, ...]:
    """Instantiations that between them reach every line of cuda_kernels.cu: each kernel, activation
    and dtype, both offset widths, aligned and not, the scale by value and through a pointer."""
    terms = f"Terms<{flags(has_update, True)}>"
    aligned = f"Access<{flags(True, True, True, True)}>"
    unaligned = f"Access<{flags(False, False, False, False)}>"

    def spread(width: int, config: Config = bias_gradient.CUDA[0]) -> str:
        return f"{width}, {config.threads}, {bias_gradient.rows_in_flight(config, width)}"

    short = bias_gradient.SHORT
    found = []
    for entry in ACTIVATIONS.values():
        kind, single = f"{entry.functor}, {terms}", ", ".join(["float"] * 4)
        found += [
            f"forward<{kind}, {single}, float, int32_t, {aligned}, 4>",
            f"backward<{kind}, float, {single}, float, int32_t, {aligned}, 4>",
        ]
    for dtype, name in CUDA_NAMES.items():
        width = pack_width(dtype)
        kind = f"{'Gelu' if dtype == torch.float64 else 'Relu'}, {terms}"
        scale = "double" if dtype == torch.float64 else "float"
        four, five = ", ".join([name] * 4), ", ".join([name] * 5)
        found += [
            f"forward<{kind}, {four}, {scale}, int64_t, {aligned}, {width}>",
            f"forward<{kind}, {four}, const {scale}*, int32_t, {unaligned}, {width}>",
            f"forward_strided<{kind}, {four}, {scale}, int32_t, 5>",
            f"backward_strided<{kind}, {five}, {scale}, int64_t, 3>",
            f"backward_with_bias<{kind}, {five}, double, {scale}, int32_t, {spread(width)}>",
            f"backward_with_bias<{kind}, {five}, {name}, {scale}, int64_t, {spread(1)}>",
            f"backward_with_bias<{kind}, {five}, {name}, {scale}, int32_t, {spread(width, short)}>",
            f"column_sums<{name}>",
        ]
    return tuple(found)

"""Launchers of act(input + scale * update + bias): they allocate outputs and start kernels.

``update`` or ``bias`` may be None; ``bias_activation`` is the operator without update. Every
launcher takes the kernels' source first, so that a package passes its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.activations import ACTIVATIONS
from fuselab.ops.activations import activation as activation_named
from fuselab.ops.activations.layout import MAX_RANK, Nest, nest, promoted, row_strides
from fuselab.runtime.cpp_source import CppSource
from fuselab.runtime.cuda_source import CudaSource
from fuselab.runtime.parameters import Scalar, f32, f64, i64
from fuselab.runtime.triton_launch import launch as launch_triton

_CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
}

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


def _terms(update: Tensor | None, bias: Tensor | None) -> str:
    return f"Terms<{str(update is not None).lower()}, {str(bias is not None).lower()}>"


def _numbers(*groups: Sequence[int]) -> list[Scalar]:
    return [i64(number) for group in groups for number in group]


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
) -> Tensor:
    """One launch of ``forward`` in cpu_kernels.cpp."""
    output = empty_output(input, update, bias)
    if output.numel() == 0:
        return output
    loops, input, update = _forward_nest(output, input, update, bias)
    loops = loops.padded()
    types = ", ".join(
        _CPP_NAMES[(tensor if tensor is not None else input).dtype]
        for tensor in (output, input, update, bias)
    )
    functor = activation_named(activation).functor
    source.launch(
        f"forward<{functor}, {_terms(update, bias)}, {types}>",
        args=(
            input,
            update,
            bias,
            output,
            _cpp_scale(scale, output.dtype),
            *_numbers(loops.sizes, *loops.strides),
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
    grads = saved.empty_gradients(needs, grad_output)
    if grad_output.numel() == 0:
        return (*grads[:2], grads[2].zero_() if grads[2] is not None else None)
    if needs[2]:
        return _backward_with_bias_cpp(source, grad_output, saved, grads)
    grad_input, grad_update, _ = grads
    template = grad_input if grad_input is not None else grad_update
    if template is None:
        return grads
    operands = [grad_output, saved.first, saved.update, saved.bias]
    loops = _backward_nest(template, operands)
    if len(loops.sizes) > MAX_RANK:
        operands = _dense_operands(template, operands)
        loops = _backward_nest(template, operands)
    loops = loops.padded()
    source.launch(
        f"backward<{_backward_types(grad_output, saved)}>",
        args=(
            *operands,
            grad_input,
            grad_update,
            _cpp_scale(saved.scale, grad_output.dtype),
            *_numbers(loops.sizes, *loops.strides),
        ),
    )
    return grads


def _backward_nest(template: Tensor, operands: Sequence[Tensor | None]) -> Nest:
    """The nest with operands grad_output, first, update, bias; one that is not read takes the
    strides of grad_output and so asks for no loop of its own."""
    *dense, bias = operands
    assert dense[0] is not None
    upstream = dense[0].stride()
    strides = [upstream if tensor is None else tensor.stride() for tensor in dense]
    strides.append(upstream if bias is None else _broadcast(bias, template.dim()))
    return nest(template, strides)


def _backward_types(grad_output: Tensor, saved: Saved) -> str:
    """Template arguments of the backward kernels of cpu_kernels.cpp."""
    functor = activation_named(saved.activation).functor
    first = saved.first.dtype if saved.first is not None else grad_output.dtype
    dtypes = (
        grad_output.dtype,
        first,
        saved.input_dtype,
        saved.update_dtype or saved.input_dtype,
        saved.bias_dtype or saved.input_dtype,
    )
    terms = _terms(saved.update, saved.bias) if saved.input is not None else "Terms<true, true>"
    return f"{functor}, {terms}, {', '.join(_CPP_NAMES[dtype] for dtype in dtypes)}"


class _Matrices:
    """The operands of a backward with bias as matrices (rows, columns), and where it writes."""

    def __init__(self, grad_output: Tensor, saved: Saved, grads: Gradients) -> None:
        def matrix(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.reshape(-1, tensor.shape[-1])

        upstream = matrix(grad_output)
        assert upstream is not None
        self.rows, self.columns = upstream.shape
        self.operands = (upstream, matrix(saved.first), matrix(saved.update))
        self.grads = grads
        self.written = tuple(
            grad
            if grad is None or grad.is_contiguous()
            else torch.empty_like(grad, memory_format=torch.contiguous_format)
            for grad in grads
        )

    @property
    def strides(self) -> tuple[int, ...]:
        """Row and column stride of each operand."""
        pairs = (
            (0, 0) if operand is None else row_strides(self.rows, self.columns, operand)
            for operand in self.operands
        )
        return tuple(stride for pair in pairs for stride in pair)

    def needs_64_bit_offsets(self) -> bool:
        # The margin: a tile's offsets are computed before they are masked.
        furthest = (
            (self.rows + 2048) * row + (self.columns + 2048) * column
            for row, column in (
                (self.columns, 1),
                *zip(self.strides[::2], self.strides[1::2], strict=True),
            )
        )
        return max(furthest) > 2**31 - 1

    def empty_sums(self, blocks: int) -> Tensor:
        """Where the blocks' column sums go: the bias's gradient itself if there is one block."""
        grad_bias = self.grads[2]
        assert grad_bias is not None
        if blocks == 1:
            return grad_bias
        return grad_bias.new_empty((blocks, self.columns), dtype=torch.float64)

    def finished(self) -> Gradients:
        """The gradients, filled from the tensors that were written in their place."""
        for grad, source in zip(self.grads, self.written, strict=True):
            if grad is not None and source is not None and grad is not source:
                grad.copy_(source)
        return self.grads


def _backward_with_bias_cpp(
    source: CppSource, grad_output: Tensor, saved: Saved, grads: Gradients
) -> Gradients:
    matrices = _Matrices(grad_output, saved, grads)
    source.launch(
        f"backward_with_bias<{_backward_types(grad_output, saved)}>",
        args=(
            *matrices.operands,
            saved.bias,
            *matrices.written,
            _cpp_scale(saved.scale, grad_output.dtype),
            *_numbers((matrices.rows, matrices.columns), matrices.strides),
            i64(0 if saved.bias is None else saved.bias.stride(0)),
        ),
    )
    return matrices.finished()


# Triton. Threads of a program: 4 warps.

_TRITON_BLOCK_BYTES = 4096  # of the output in a tile: two 16-byte stores per thread
_TRITON_TILE = 1024  # elements of a tile of the strided kernels
_TRITON_REDUCE_TILE = 2048  # elements that backward_with_bias handles at a time
_PROGRAMS_PER_MULTIPROCESSOR = 4


@cache
def _multiprocessors(device: torch.device) -> int:
    """1 under the Triton interpreter, whose programs run one after the other."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _arithmetic(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


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


def _flat_constants(numel: int, columns: int, output_dtype: torch.dtype) -> dict[str, Any]:
    block = _TRITON_BLOCK_BYTES // output_dtype.itemsize
    return {
        "VECTOR": math.gcd(columns, 8),
        "WRAPS_ONCE": block <= columns,
        "WIDE": numel + block > 2**31 - 1,
        "BLOCK": block,
    }


def _tile_constants(loops: Nest) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Grid and tile shape of a strided kernel: square tiles where an operand is transposed, so that
    the lines it touches are used while they are in L1."""
    rows, columns = math.prod(loops.sizes[:-1]), loops.sizes[-1]
    transposed = any(strides[-1] > 1 for strides in loops.strides)
    across = min(32 if transposed else _TRITON_TILE, _power_of_two(columns))
    down = min(_TRITON_TILE // across, _power_of_two(rows))
    constants = {
        "MATRIX": math.prod(loops.sizes[:-2]) == 1,
        "WIDE": loops.needs_64_bit_offsets() or loops.numel + 2 * _TRITON_TILE > 2**31 - 1,
        "BLOCK_ROWS": down,
        "BLOCK_COLUMNS": across,
    }
    return (_ceil_div(rows, down) * _ceil_div(columns, across),), constants


def forward_triton(
    input: Tensor,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float | Tensor,
    activation: str,
) -> Tensor:
    """One launch of ``forward`` where all tensors are dense alike, else of ``forward_strided``."""
    from fuselab.ops.add_mul_activation import triton_kernels as kernels

    output = empty_output(input, update, bias)
    numel = output.numel()
    if numel == 0:
        return output
    loops, input, update = _forward_nest(output, input, update, bias)
    constants = {"ACTIVATION": activation, "COMPUTE": _arithmetic(output.dtype)}
    flat = _flat_columns(loops, None if bias is None else 2, (0, 1))
    if flat is not None:
        constants |= _flat_constants(numel, flat[0], output.dtype)
        grid: tuple[int, ...] = (_ceil_div(numel, constants["BLOCK"]),)
        numbers: tuple[int, ...] = (numel, *flat)
        kernel = kernels.forward
    else:
        grid, tile = _tile_constants(loops)
        constants |= tile
        numbers = _nest_numbers(loops)
        kernel = kernels.forward_strided
    launch_triton(
        kernel, grid, input, update, bias, output, *_triton_scale(scale), *numbers, **constants
    )
    return output


def _nest_numbers(loops: Nest) -> tuple[int, ...]:
    """rows, the inner four sizes, and five strides per operand."""
    padded = loops.padded()
    rows = math.prod(padded.sizes[:-1])
    strides = (stride for strides in padded.strides for stride in strides)
    return (rows, *padded.sizes[1:], *strides)


def _dense_operands(template: Tensor, operands: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The operands but the last, the bias, copied to the template's layout."""
    *dense, bias = operands
    return [
        operand
        if operand is None
        else torch.empty_like(template, dtype=operand.dtype).copy_(operand)
        for operand in dense
    ] + [bias]


def backward_triton(needs: Sequence[bool], grad_output: Tensor, saved: Saved) -> Gradients:
    """One launch of ``backward`` or ``backward_strided``; where the bias's gradient is needed, of
    ``backward_with_bias``, and of ``column_sums`` if there is more than one block of rows.

    The latter's workspace is (row blocks, columns) in float64: 4 programs of up to 256 columns per
    multiprocessor, so at most 1 MB on 132 of them. It writes row-major gradients, so a
    gradient whose strides are others is copied once more, and an operand whose rows have no common
    stride is copied first. The order of the sums depends on shape and device only.
    """
    from fuselab.ops.add_mul_activation import triton_kernels as kernels

    grads = saved.empty_gradients(needs, grad_output)
    numel = grad_output.numel()
    if numel == 0:
        return (*grads[:2], grads[2].zero_() if grads[2] is not None else None)
    constants = {
        "ACTIVATION": saved.activation,
        "COMPUTE": _arithmetic(grad_output.dtype),
        "FROM_OUTPUT": saved.output is not None,
    }
    if needs[2]:
        return _backward_with_bias_triton(grad_output, saved, grads, constants)
    grad_input, grad_update, _ = grads
    template = grad_input if grad_input is not None else grad_update
    if template is None:
        return grads
    operands = [grad_output, saved.first, saved.update, saved.bias]
    loops = _backward_nest(template, operands)
    if len(loops.sizes) > MAX_RANK:
        operands = _dense_operands(template, operands)
        loops = _backward_nest(template, operands)
    flat = _flat_columns(loops, None if saved.bias is None else 3, (0, 1, 2))
    if flat is not None:
        constants |= _flat_constants(numel, flat[0], grad_output.dtype)
        grid: tuple[int, ...] = (_ceil_div(numel, constants["BLOCK"]),)
        numbers: tuple[int, ...] = (numel, *flat)
        kernel = kernels.backward
    else:
        grid, tile = _tile_constants(loops)
        constants |= tile
        numbers = _nest_numbers(loops)
        kernel = kernels.backward_strided
    launch_triton(
        kernel,
        grid,
        *operands,
        grad_input,
        grad_update,
        *_triton_scale(saved.scale),
        *numbers,
        **constants,
    )
    return grads


def _backward_with_bias_triton(
    grad_output: Tensor, saved: Saved, grads: Gradients, constants: dict[str, Any]
) -> Gradients:
    from fuselab.ops.add_mul_activation import triton_kernels as kernels

    matrices = _Matrices(grad_output, saved, grads)
    rows, columns = matrices.rows, matrices.columns
    across = min(_power_of_two(columns), 256)
    down = min(_TRITON_REDUCE_TILE // across, _power_of_two(rows))
    blocks, rows_per_block = _row_blocks(
        grad_output.device, rows, down, _ceil_div(columns, across), _PROGRAMS_PER_MULTIPROCESSOR
    )
    sums = matrices.empty_sums(blocks)
    launch_triton(
        kernels.backward_with_bias,
        (blocks * _ceil_div(columns, across),),
        *matrices.operands,
        saved.bias,
        *matrices.written[:2],
        sums,
        *_triton_scale(saved.scale),
        rows,
        columns,
        rows_per_block,
        *matrices.strides,
        0 if saved.bias is None else saved.bias.stride(0),
        **constants,
        WIDE=matrices.needs_64_bit_offsets(),
        BLOCK_ROWS=down,
        BLOCK_COLUMNS=across,
    )
    if blocks > 1:
        launch_triton(
            kernels.column_sums,
            (_ceil_div(columns, 16),),
            sums,
            grads[2],
            blocks,
            columns,
            BLOCK_ROWS=min(_power_of_two(blocks), 256),
            BLOCK_COLUMNS=16,
        )
    return matrices.finished()


def _row_blocks(
    device: torch.device, rows: int, step: int, column_tiles: int, per_multiprocessor: int
) -> tuple[int, int]:
    """(blocks, rows per block): as many blocks as fill the device, each a multiple of ``step``."""
    programs = _multiprocessors(device) * per_multiprocessor
    blocks = max(1, min(_ceil_div(rows, step), programs // column_tiles))
    rows_per_block = _ceil_div(_ceil_div(rows, blocks), step) * step
    return _ceil_div(rows, rows_per_block), rows_per_block


# CUDA C++. Threads of a block: 256, as cuda_kernels.cu says.

_CUDA_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}
_THREADS = 256


@dataclass(frozen=True, slots=True)
class BiasGradientConfig:
    """How ``backward_with_bias`` is spread: threads per block, blocks per multiprocessor, and packs
    that a thread has in flight per operand (half of them where a pack holds 8 elements)."""

    threads: int
    blocks: int
    in_flight: int

    def rows_in_flight(self, width: int) -> int:
        return max(1, self.in_flight // 2) if width > 4 else self.in_flight


# More blocks leave column_sums more to add: 149 us with 2, 154 with 4, 165 with 8 (H200,
# 65536 x 512 float32, 256 threads; column_sums then had 256 threads too, not 1024).
BIAS_GRADIENT = BiasGradientConfig(threads=256, blocks=2, in_flight=4)
# What else is worth timing, by ``backward_cuda(..., config=...)``: more bytes in flight per
# multiprocessor (64 KB above) or fewer blocks to add up. relu in float32 does not spill in any.
BIAS_GRADIENT_CANDIDATES = (
    BiasGradientConfig(threads=512, blocks=1, in_flight=4),
    BiasGradientConfig(threads=512, blocks=2, in_flight=4),
    BiasGradientConfig(threads=1024, blocks=1, in_flight=2),
    BiasGradientConfig(threads=1024, blocks=1, in_flight=4),
    BiasGradientConfig(threads=256, blocks=2, in_flight=8),
)


def _cuda_scale(scale: float | Tensor, output_dtype: torch.dtype) -> tuple[str, Tensor | Scalar]:
    """The type that the kernel is told, and the argument."""
    if isinstance(scale, Tensor):
        return f"const {_CUDA_NAMES[scale.dtype]}*", scale
    return ("double", f64(scale)) if output_dtype == torch.float64 else ("float", f32(scale))


def _is_aligned(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _width(*dtypes: torch.dtype | None) -> int:
    """Elements per thread and pack: 16 bytes of the narrowest type."""
    return 16 // min(dtype.itemsize for dtype in dtypes if dtype is not None)


def _flags(*values: bool) -> str:
    return ", ".join(str(value).lower() for value in values)


def _index(is_wide: bool) -> str:
    return "int64_t" if is_wide else "int32_t"


def forward_cuda(
    source: CudaSource,
    input: Tensor,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float | Tensor,
    activation: str,
) -> Tensor:
    """One launch of ``forward`` where all tensors are dense alike, else of ``forward_strided``."""
    output = empty_output(input, update, bias)
    numel = output.numel()
    if numel == 0:
        return output
    loops, input, update = _forward_nest(output, input, update, bias)
    scale_type, scale_argument = _cuda_scale(scale, output.dtype)
    types = ", ".join(
        _CUDA_NAMES[(tensor if tensor is not None else input).dtype]
        for tensor in (output, input, update, bias)
    )
    functor = activation_named(activation).functor
    common = f"{functor}, {_terms(update, bias)}, {types}, {scale_type}"
    operands = (input, update, bias, output, scale_argument, i64(numel))
    flat = _flat_columns(loops, None if bias is None else 2, (0, 1))
    if flat is None:
        _launch_strided(source, f"forward_strided<{common}", loops, operands)
        return output
    width = _width(output.dtype, input.dtype, None if update is None else update.dtype)
    access = _flags(
        _is_aligned(input),
        _is_aligned(update),
        _is_bias_packed(bias, flat, width),
        _is_aligned(output),
    )
    index = _index(numel + _THREADS * width > 2**31 - 1)
    source.launch(
        f"forward<{common}, {index}, Access<{access}>, {width}>",
        grid=(_ceil_div(numel, _THREADS * width), 1, 1),
        block=(_THREADS, 1, 1),
        args=(*operands, *_numbers(flat)),
    )
    return output


def _is_bias_packed(bias: Tensor | None, flat: tuple[int, int], width: int) -> bool:
    columns, bias_stride = flat
    return bias is not None and bias_stride == 1 and columns % width == 0 and _is_aligned(bias)


def _launch_strided(
    source: CudaSource, kernel: str, loops: Nest, operands: Sequence[Tensor | Scalar | None]
) -> None:
    padded = loops.padded()
    is_wide = loops.needs_64_bit_offsets() or loops.numel + 4 * _THREADS > 2**31 - 1
    source.launch(
        f"{kernel}, {_index(is_wide)}, {len(loops.sizes)}>",
        grid=(_ceil_div(loops.numel, 4 * _THREADS), 1, 1),
        block=(_THREADS, 1, 1),
        args=(*operands, *_numbers(padded.sizes, *padded.strides)),
    )


def _cuda_backward_types(grad_output: Tensor, saved: Saved) -> tuple[str, str, list[torch.dtype]]:
    """(functor and terms, type names, dtypes): output, first, input, update, bias."""
    functor = activation_named(saved.activation).functor
    terms = _terms(saved.update, saved.bias) if saved.input is not None else "Terms<true, true>"
    dtypes = [
        grad_output.dtype,
        saved.first.dtype if saved.first is not None else grad_output.dtype,
        saved.input_dtype,
        saved.update_dtype or saved.input_dtype,
        saved.bias_dtype or saved.input_dtype,
    ]
    return f"{functor}, {terms}", ", ".join(_CUDA_NAMES[dtype] for dtype in dtypes), dtypes


def backward_cuda(
    source: CudaSource,
    needs: Sequence[bool],
    grad_output: Tensor,
    saved: Saved,
    config: BiasGradientConfig = BIAS_GRADIENT,
) -> Gradients:
    """One launch of ``backward`` or ``backward_strided``; where the bias's gradient is needed, of
    ``backward_with_bias``, and of ``column_sums`` if there is more than one block of rows.

    The workspace and the copies are those of ``backward_triton``, with ``config.blocks`` blocks per
    multiprocessor.
    """
    grads = saved.empty_gradients(needs, grad_output)
    numel = grad_output.numel()
    if numel == 0:
        return (*grads[:2], grads[2].zero_() if grads[2] is not None else None)
    if needs[2]:
        return _backward_with_bias_cuda(source, grad_output, saved, grads, config)
    grad_input, grad_update, _ = grads
    template = grad_input if grad_input is not None else grad_update
    if template is None:
        return grads
    operands = [grad_output, saved.first, saved.update, saved.bias]
    loops = _backward_nest(template, operands)
    if len(loops.sizes) > MAX_RANK:
        operands = _dense_operands(template, operands)
        loops = _backward_nest(template, operands)
    kind, types, dtypes = _cuda_backward_types(grad_output, saved)
    scale_type, scale_argument = _cuda_scale(saved.scale, grad_output.dtype)
    common = f"{kind}, {types}, {scale_type}"
    arguments = (*operands, grad_input, grad_update, scale_argument, i64(numel))
    flat = _flat_columns(loops, None if saved.bias is None else 3, (0, 1, 2))
    if flat is None:
        _launch_strided(source, f"backward_strided<{common}", loops, arguments)
        return grads
    width = _width(*dtypes[:4])
    access = _flags(
        _is_aligned(operands[0], operands[1]),
        _is_aligned(operands[2]),
        _is_bias_packed(saved.bias, flat, width),
        _is_aligned(grad_input, grad_update),
    )
    index = _index(numel + _THREADS * width > 2**31 - 1)
    source.launch(
        f"backward<{common}, {index}, Access<{access}>, {width}>",
        grid=(_ceil_div(numel, _THREADS * width), 1, 1),
        block=(_THREADS, 1, 1),
        args=(*arguments, *_numbers(flat)),
    )
    return grads


def _backward_with_bias_cuda(
    source: CudaSource,
    grad_output: Tensor,
    saved: Saved,
    grads: Gradients,
    config: BiasGradientConfig,
) -> Gradients:
    matrices = _Matrices(grad_output, saved, grads)
    rows, columns = matrices.rows, matrices.columns
    kind, types, dtypes = _cuda_backward_types(grad_output, saved)
    scale_type, scale_argument = _cuda_scale(saved.scale, grad_output.dtype)
    width = _width(*dtypes[:4])
    read = [operand for operand in matrices.operands if operand is not None]
    if columns % width or not all(operand.is_contiguous() for operand in read):
        width = 1
    if not _is_aligned(*read, *matrices.written[:2]):
        width = 1
    across = min(_power_of_two(_ceil_div(columns, width)), 64 if width > 1 else 128)
    down = config.threads // across
    unroll = config.rows_in_flight(width)
    column_tiles = _ceil_div(columns, across * width)
    blocks, rows_per_block = _row_blocks(
        grad_output.device, rows, unroll * down, column_tiles, config.blocks
    )
    sums = matrices.empty_sums(blocks)
    index = _index(matrices.needs_64_bit_offsets())
    source.launch(
        f"backward_with_bias<{kind}, {types}, {_CUDA_NAMES[sums.dtype]}, {scale_type}, {index}, "
        f"{width}, {config.threads}, {unroll}>",
        grid=(blocks * column_tiles, 1, 1),
        block=(across, down, 1),
        args=(
            *matrices.operands,
            saved.bias,
            *matrices.written[:2],
            sums,
            scale_argument,
            *_numbers((rows, columns, rows_per_block), matrices.strides),
            i64(0 if saved.bias is None else saved.bias.stride(0)),
        ),
    )
    if blocks > 1:
        grad_bias = grads[2]
        assert grad_bias is not None
        source.launch(
            f"column_sums<{_CUDA_NAMES[grad_bias.dtype]}>",
            grid=(_ceil_div(columns, 32), 1, 1),
            block=(32, 32, 1),
            args=(sums, grad_bias, i64(blocks), i64(columns)),
        )
    return matrices.finished()


def cuda_expressions(has_update: bool) -> tuple[str, ...]:
    """Instantiations that between them reach every line of cuda_kernels.cu: each kernel, activation
    and dtype, both offset widths, aligned and not, the scale by value and through a pointer."""
    terms = f"Terms<{_flags(has_update, True)}>"
    aligned = f"Access<{_flags(True, True, True, True)}>"
    unaligned = f"Access<{_flags(False, False, False, False)}>"

    def spread(width: int) -> str:
        return f"{width}, {BIAS_GRADIENT.threads}, {BIAS_GRADIENT.rows_in_flight(width)}"

    found = []
    for entry in ACTIVATIONS.values():
        kind, single = f"{entry.functor}, {terms}", ", ".join(["float"] * 4)
        found += [
            f"forward<{kind}, {single}, float, int32_t, {aligned}, 4>",
            f"backward<{kind}, float, {single}, float, int32_t, {aligned}, 4>",
        ]
    for dtype, name in _CUDA_NAMES.items():
        width = _width(dtype)
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
            f"column_sums<{name}>",
        ]
    return tuple(found)

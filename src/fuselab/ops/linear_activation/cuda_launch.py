"""Launching the CUDA C++ kernels of shallow products, and the gradients beside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.activations import ACTIVATIONS
from fuselab.ops.activations import activation as activation_named
from fuselab.ops.add_mul_activation import op as pointwise
from fuselab.ops.add_mul_activation.launch import backward_cuda
from fuselab.ops.linear_activation.product import (
    SHALLOW_DEPTH,
    as_rows,
    empty_output,
    gradients,
)
from fuselab.ops.linear_activation.tiles import sizes
from fuselab.runtime.cuda_source import CudaSource, i64
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tuning import Config, chosen

CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
_TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
_WARPS = 4  # block_warps of cuda_kernels.cu


NAME = "fuselab::linear_activation"

# A warp owns ``groups`` groups of 32 columns (4 in float32), and ``blocks`` blocks per
# multiprocessor share the rows: by default as many as registers let it hold, 128 threads each.
# Registers for sm_90, relu: bfloat16 to a depth of 16 70, 104, 168 with 1, 2, 4 groups, to 32 128
# with 2; float32 to 16 123, to 32 219. Nothing spills there; gelu to 32 with 4 groups does on
# sm_100. By (16-bit, depth above 16).
_DEFAULTS = {
    (True, False): Config(groups=2, blocks=4),
    (True, True): Config(groups=2, blocks=4),
    (False, False): Config(groups=4, blocks=4),
    (False, True): Config(groups=4, blocks=2),
}
# The same product with the weights as operand A, for 16 bits: a block owns ``groups`` groups of 64
# columns. Registers for sm_90 to a depth of 16: 80 and 120 with 1 and 2 groups, to 32 104 and 180
# (at most 128 with every activation but in the last). Not timed.
_TRANSPOSED = {
    False: tuple(
        Config(groups=groups, blocks=blocks, transposed=1)
        for groups, blocks in ((2, 4), (2, 3), (2, 2), (1, 6), (1, 4))
    ),
    True: (Config(groups=1, blocks=4, transposed=1),),
}


def candidates(dtype: torch.dtype, columns: int, depth: int) -> Sequence[Config]:
    """What tuning may choose from, the default first; no warp is wider than the output."""
    half = dtype != torch.float32
    needed = power_of_two(ceil_div(columns, 32)) if half else 4
    first = _DEFAULTS[half, depth > 16]
    more = (
        Config(groups=groups, blocks=blocks)
        for groups in ((1, 2, 4) if half else (4,))
        for blocks in (2, 3, 4, 5, 6, 7)
    )
    found = tuple(
        dict.fromkeys(
            Config(groups=min(config.groups, needed), blocks=config.blocks)
            for config in (first, *more)
        )
    )
    return found + (_TRANSPOSED[depth > 16] if half else ())


def configs(input: Tensor, weight: Tensor, *rest: Any) -> Sequence[Config]:
    """``candidates`` for these arguments."""
    return candidates(input.dtype, *weight.shape)


def supports(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> str | None:
    if input.dtype == torch.float64:
        return "it accumulates in float32"
    if weight.shape[1] > SHALLOW_DEPTH:
        return f"its depth K is above {SHALLOW_DEPTH}"
    return None


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    config: Config | None = None,
) -> Tensor:
    """One launch of ``forward_shallow_half`` or ``forward_shallow_float``; ``config`` replaces the
    tuned or default one."""
    output = empty_output(input, weight)
    if output.numel() == 0:
        return output
    x = as_rows(input)
    (rows, depth), columns = x.shape, weight.shape[0]
    functor = activation_named(activation).functor
    resident = multiprocessors(input.device)
    pack = 16 // input.element_size()
    packed = columns % pack == 0
    # Exact in float32 whatever is allowed: to ask would keep the launch from being a plan.
    key = (input.dtype, *sizes(x, weight))
    config = config or chosen(NAME, "cuda", key, candidates(input.dtype, columns, depth))
    if input.dtype == torch.float32:
        padded = next(size for size in (8, 16, 32) if size >= depth)
        expression = _single(functor, padded, packed)
        warp_columns, warp_rows = 128, 2
    else:
        steps = 1 if depth <= 16 else 2
        kernel = "transposed" if "transposed" in config else "shallow_half"
        expression = _half(functor, _TYPES[input.dtype], steps, config.groups, packed, kernel)
        warp_columns, warp_rows = 32 * config.groups, 16
    if "transposed" in config:
        # As many blocks to every tile of columns, each with a tile of rows for every warp.
        across = ceil_div(columns, 64 * config.groups)
        down = min(ceil_div(rows, 16 * _WARPS), max(1, resident * config.blocks // across))
        blocks = across * down
    else:
        across = ceil_div(columns, warp_columns)
        # At least one warp for every tile of columns; no more warps than there are tiles.
        tiles = across * ceil_div(rows, warp_rows)
        most = max(resident * config.blocks, ceil_div(across, _WARPS))
        blocks = min(most, ceil_div(tiles, _WARPS))
    numbers = (rows, columns, depth, *x.stride(), *weight.stride())
    CUDA.launch(
        expression,
        (blocks, 1, 1),
        (32 * _WARPS, 1, 1),
        (
            *(x, weight, bias, output),
            *(i64(number) for number in numbers),
            i64(0 if bias is None else bias.stride(0)),
        ),
    )
    return output


def backward(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
    """``gradients``, with the CUDA C++ pass of ``add_mul_activation``."""
    return gradients(partial(backward_cuda, pointwise.CUDA), needs, grad_output, *saved)


def _single(functor: str, padded_depth: int, packed: bool) -> str:
    return f"forward_shallow_float<{functor}, {padded_depth}, {str(packed).lower()}>"


def _half(
    functor: str,
    element: str,
    steps: int,
    groups: int,
    packed: bool,
    kernel: str = "shallow_half",
) -> str:
    flag = str(packed).lower()
    return f"forward_{kernel}<{functor}, {element}, {steps}, {groups}, {flag}>"


def _representative_expressions() -> tuple[str, ...]:
    """Every activation, and every kernel at its other types, depths and stores."""
    found = []
    for entry in ACTIVATIONS.values():
        found.append(_single(entry.functor, 16, True))
        found.append(_half(entry.functor, "__nv_bfloat16", 1, 4, True))
        found.append(_half(entry.functor, "__nv_bfloat16", 1, 2, True, "transposed"))
    for packed in (True, False):
        found += [_single("Relu", depth, packed) for depth in (8, 32)]
        found += [
            _half("Relu", element, steps, groups, packed)
            for element in _TYPES.values()
            for steps in (1, 2)
            for groups in (1, 2, 4)
        ]
        found += [
            _half("Relu", element, steps, groups, packed, "transposed")
            for element in _TYPES.values()
            for steps, groups in ((1, 1), (1, 2), (2, 1))
        ]
    return tuple(dict.fromkeys(found))


CUDA_EXPRESSIONS = _representative_expressions()

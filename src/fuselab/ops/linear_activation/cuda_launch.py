"""Launching the CUDA C++ kernels of shallow products, and the gradients beside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.dtypes import CUDA_HALF_NAMES
from fuselab.ops._shared.matrices import as_rows, empty_output
from fuselab.ops._shared.packs import is_aligned
from fuselab.ops._shared.template_arguments import flags
from fuselab.ops.add_mul_activation import op as pointwise
from fuselab.ops.add_mul_activation.cuda_launch import backward as pull_back_cuda
from fuselab.ops.linear_activation.configs import SHALLOW_DEPTH, sizes
from fuselab.ops.linear_activation.product_gradients import gradients
from fuselab.runtime.cuda_source import CudaSource, i32, i64
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.tuning import Config, chosen

CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
_WARPS, _HALF_WARPS = 4, 8  # block_warps and half_warps of cuda_kernels.cu


NAME = "fuselab::linear_activation"

# ``blocks`` per multiprocessor share the rows. float32, by depth above 16: registers for sm_90 123
# to a depth of 16, to 32 219; nothing spills.
_SINGLE = {False: (4, 2, 3, 5, 6, 7), True: (2, 3, 4, 5, 6, 7)}
# 16 bits: 96 and 114 registers for sm_90, relu; nothing spills. 65536x13->512 takes 21.5 us with
# one block and 21.9 with two (bfloat16, H200, 2026-11-22; 23.0 on a machine whose limit is 19.5
# where this one's is 18.1). What only writes as much takes 18.7 in blocks that stay, 17.4 in blocks
# of 4 KB, and an empty kernel 3.5. As a share of the time, tried on earlier forms: lines of 128
# bytes put together in shared memory 1.01, blocks of 64 columns whose input comes through registers
# 1.06, 4 to 32 blocks 1.01 to 1.9, stores that are evicted first 0.99 to 1.02.
_HALF = (1, 2)


def candidates(dtype: torch.dtype, depth: int) -> Sequence[Config]:
    """What tuning may choose from, the default first."""
    counts = _SINGLE[depth > 16] if dtype == torch.float32 else _HALF
    return tuple(Config(blocks=blocks) for blocks in counts)


def configs(input: Tensor, weight: Tensor, *rest: Any) -> Sequence[Config]:
    """``candidates`` for these arguments."""
    return candidates(input.dtype, weight.shape[1])


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
    # Exact in float32 whatever is allowed.
    key = (input.dtype, *sizes(x, weight))
    config = config or chosen(NAME, "cuda", key, candidates(input.dtype, depth))
    more: tuple[Any, ...] = ()
    warps = _WARPS
    if input.dtype == torch.float32:
        padded = next(size for size in (8, 16, 32) if size >= depth)
        expression = _single(functor, padded, packed)
        # At least one warp for every 128 columns; no more warps than there are pairs of rows.
        across = ceil_div(columns, 128)
        most = max(resident * config.blocks, ceil_div(across, warps))
        grid = (min(most, ceil_div(across * ceil_div(rows, 2), warps)), 1, 1)
    else:
        warps = _HALF_WARPS
        dense = x.is_contiguous() and weight.is_contiguous() and is_aligned(x, weight)
        steps = 1 if depth <= 16 else 2
        expression = _half(functor, CUDA_HALF_NAMES[input.dtype], steps, dense, packed)
        # Groups of 64 columns, a warp each, in as many to a block; warps that are left take rows.
        groups = ceil_div(columns, 64)
        across = ceil_div(groups, warps)
        wide = ceil_div(groups, across)
        most = max(1, resident * config.blocks // across)
        grid = (across, min(most, ceil_div(rows, 16 * (warps // wide))), 1)
        share, extra = divmod(ceil_div(rows, 8), grid[1])
        more = (i32(wide), i64(share), i32(extra))
    numbers = (rows, columns, depth, *x.stride(), *weight.stride())
    CUDA.launch(
        expression,
        grid,
        (32 * warps, 1, 1),
        (
            *(x, weight, bias, output),
            *(i64(number) for number in numbers),
            i64(0 if bias is None else bias.stride(0)),
            *more,
        ),
    )
    return output


def backward(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
    """``gradients``, with the CUDA C++ pass of ``add_mul_activation``."""
    return gradients(partial(pull_back_cuda, pointwise.CUDA), needs, grad_output, *saved)


def _single(functor: str, padded_depth: int, packed: bool) -> str:
    return f"forward_shallow_float<{functor}, {padded_depth}, {str(packed).lower()}>"


def _half(functor: str, element: str, steps: int, dense: bool, packed: bool) -> str:
    return f"forward_shallow_half<{functor}, {element}, {steps}, {flags(dense, packed)}>"


def _representative_expressions() -> tuple[str, ...]:
    """Every activation, and every kernel at its other types, depths and stores."""
    found = []
    for entry in ACTIVATIONS.values():
        found.append(_single(entry.functor, 16, True))
        found.append(_half(entry.functor, "__nv_bfloat16", 1, True, True))
    for packed in (True, False):
        found += [_single("Relu", depth, packed) for depth in (8, 32)]
        found += [
            _half("Relu", element, steps, dense, packed)
            for element, steps, dense in product(CUDA_HALF_NAMES.values(), (1, 2), (True, False))
        ]
    return tuple(dict.fromkeys(found))


CUDA_EXPRESSIONS = _representative_expressions()

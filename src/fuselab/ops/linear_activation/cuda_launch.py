"""Launchers of the CUDA C++ kernels for shallow products, and the gradients beside them."""

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

# ``blocks`` per multiprocessor share the rows; the key says whether the depth is above 16. float32
# takes 123 registers on sm_90 up to a depth of 16, and 219 up to 32; nothing spills.
_SINGLE = {False: (4, 2, 3, 5, 6, 7), True: (2, 3, 4, 5, 6, 7)}
# In 16 bits, relu takes 96 and 114 registers on sm_90; nothing spills. 65536x13->512 in bfloat16
# takes 21.5 us with one block per multiprocessor (H200), where a kernel that only writes as much
# takes 17.4. Output lines put together in shared memory, narrower blocks and more blocks were no
# faster.
_HALF = (1, 2)


def candidates(dtype: torch.dtype, depth: int) -> Sequence[Config]:
    """Return the configurations that tuning may choose from, the default first."""
    counts = _SINGLE[depth > 16] if dtype == torch.float32 else _HALF
    return tuple(Config(blocks=blocks) for blocks in counts)


def configs(input: Tensor, weight: Tensor, *rest: Any) -> Sequence[Config]:
    """Return ``candidates`` for these arguments."""
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
    """Launch ``forward_shallow_half`` or ``forward_shallow_float`` once. ``config`` replaces the
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
    # The float32 kernel is exact, so the key does not depend on allow_tf32.
    key = (input.dtype, *sizes(x, weight))
    config = config or chosen(NAME, "cuda", key, candidates(input.dtype, depth))
    more: tuple[Any, ...] = ()
    warps = _WARPS
    if input.dtype == torch.float32:
        padded = next(size for size in (8, 16, 32) if size >= depth)
        expression = _single(functor, padded, packed)
        # At least one warp for every 128 columns, and no more warps than pairs of rows.
        across = ceil_div(columns, 128)
        most = max(resident * config.blocks, ceil_div(across, warps))
        grid = (min(most, ceil_div(across * ceil_div(rows, 2), warps)), 1, 1)
    else:
        warps = _HALF_WARPS
        dense = x.is_contiguous() and weight.is_contiguous() and is_aligned(x, weight)
        steps = 1 if depth <= 16 else 2
        expression = _half(functor, CUDA_HALF_NAMES[input.dtype], steps, dense, packed)
        # A warp takes a group of 64 columns. A block has a warp for each of its groups; the other
        # warps of the block take further rows.
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
    """Return ``gradients``, with the CUDA C++ pass of ``add_mul_activation`` as its pullback."""
    return gradients(partial(pull_back_cuda, pointwise.CUDA), needs, grad_output, *saved)


def _single(functor: str, padded_depth: int, packed: bool) -> str:
    return f"forward_shallow_float<{functor}, {padded_depth}, {str(packed).lower()}>"


def _half(functor: str, element: str, steps: int, dense: bool, packed: bool) -> str:
    return f"forward_shallow_half<{functor}, {element}, {steps}, {flags(dense, packed)}>"


def _representative_expressions() -> tuple[str, ...]:
    """Return the expressions of every activation, and of every kernel at its other types, depths
    and stores."""
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

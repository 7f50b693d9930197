"""Launchers of the Triton kernels: which one runs, and how many rows and warps a program has."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fuselab.ops.softmax import triton_kernels
from fuselab.ops.softmax.configs import backward_configs, chosen, forward_configs
from fuselab.ops.softmax.layout import Form, Rows, positive
from fuselab.ops.softmax.operands import Launcher
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.triton_launch import launch
from fuselab.runtime.tuning import Config


def _row(block: int, rows: int, warps: int) -> Config:
    """Return a program of ``warps`` warps that takes ``rows`` whole rows of up to ``block``
    elements."""
    return Config(block=block, rows=rows, warps=warps)


_NARROW = (
    _row(16, 128, 4),
    _row(32, 64, 4),
    _row(64, 32, 4),
    _row(128, 16, 4),
    _row(256, 8, 4),
    _row(512, 4, 4),
)
# A thread has 16 elements, as in CUDA_ROWS, and 32 in rows of 32768, because a block has 1024
# threads at most. (16384 elements in 16 warps would take 85 registers in float32, and only one
# block would fit a multiprocessor.) On sm_90 nothing spills, and all accesses are 128 bits wide.
TRITON_ROWS = {
    "forward": (
        *_NARROW,
        _row(1024, 2, 4),
        _row(2048, 1, 4),
        _row(4096, 1, 8),
        _row(8192, 1, 16),
        _row(16384, 1, 32),
        _row(32768, 1, 32),
    ),
    "backward": (
        *_NARROW,
        _row(1024, 1, 4),
        _row(2048, 1, 4),
        _row(4096, 1, 8),
        _row(8192, 1, 16),
        _row(16384, 1, 32),
    ),
}
# Wider rows are walked twice by one program, ``looped`` elements at a time.
_LOOPED = (
    Config(looped=4096, warps=8),
    Config(looped=8192, warps=16),
    Config(looped=4096, warps=16),
)
# A tile of columns has at most this many elements, 8 to 32 columns across, and 8 warps.
TRITON_COLUMNS_TILE = 8192


def triton_candidates(step: str, width: int) -> tuple[Config, ...]:
    """Return what tuning may choose from for rows of ``width``, the table's choice first."""
    block = power_of_two(width)
    default = next((line for line in TRITON_ROWS[step] if line.block >= width), None)
    if default is None:
        return _LOOPED
    if width <= 512:
        return (default,)
    spreads = [
        _row(block, rows, warps)
        for rows in (1, 2)
        for warps in (4, 8, 16, 32)
        if 8 <= rows * block // (warps * 32) <= (32 if step == "forward" else 16)
    ]
    return tuple(dict.fromkeys((default, *spreads)))


def _configs(step: str, itemsize: int, width: int, device: torch.device) -> tuple[Config, ...]:
    return triton_candidates(step, width)


def _launch(step: str, form: Form, rows: Rows, tensors: tuple[Tensor, ...]) -> None:
    places = (rows.inner_count, rows.outer_stride, rows.inner_stride, rows.dim_stride)
    double = max(tensor.element_size() for tensor in tensors) == 8
    accumulator = tl.float64 if double else tl.float32
    how: dict[str, Any] = {"LOG": form == "log_softmax", "ACCUMULATOR": accumulator}
    if rows.columns:
        resident, block, columns = triton_columns(rows)
        launch(
            getattr(triton_kernels, f"{step}_columns"),
            (rows.outer_count * ceil_div(rows.inner_count, columns),),
            *(*tensors, rows.width, *places),
            **how,
            INDEX=_triton_index(rows.widest_offset),
            RESIDENT=resident,
            BLOCK=block,
            COLUMNS=columns,
            num_warps=8,
        )
        return
    config = chosen("triton", _configs, step, form, rows, tensors)
    if "rows" in config:
        launch(
            getattr(triton_kernels, f"{step}_rows"),
            (ceil_div(rows.rows, config.rows),),
            *(*tensors, rows.rows, rows.width, *places),
            **how,
            ROWS=config.rows,
            BLOCK=power_of_two(rows.width),
            num_warps=config.warps,
        )
        return
    launch(
        getattr(triton_kernels, f"{step}_looped"),
        (rows.rows,),
        *(*tensors, rows.width, *places),
        **how,
        INDEX=_triton_index(rows.width * max(rows.dim_stride, 1)),
        BLOCK=config.looped,
        num_warps=config.warps,
    )


def _triton_index(largest: int) -> object:
    return tl.int64 if largest >= 2**30 else tl.int32


def triton_columns(rows: Rows) -> tuple[bool, int, int]:
    """Return whether columns stay in registers, the tile's length along the dimension, and the
    number of its columns."""
    neighbours = power_of_two(rows.inner_count)
    length = power_of_two(rows.width)
    for columns in (32, 16, 8):
        columns = min(columns, neighbours)
        if length * columns <= TRITON_COLUMNS_TILE:
            return True, length, columns
    columns = min(32, neighbours)
    return False, TRITON_COLUMNS_TILE // 4 // columns, columns


_LAUNCHER = Launcher(_launch)
forward, forward_in_place = _LAUNCHER.forward, _LAUNCHER.forward_in_place
backward = _LAUNCHER.backward
configs = functools.partial(forward_configs, _configs)
configs_backward = functools.partial(backward_configs, _configs)


def supports(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> str | None:
    """Return None if the rows fit CUDA's grid, which ends at 2^31 - 1, else the reason. There is a
    program per row or tile."""
    width = input.shape[positive(dim, input)] if input.dim() else 1
    if input.numel() and input.numel() // width >= 2**31:
        return "it has 2^31 rows or more"
    return None

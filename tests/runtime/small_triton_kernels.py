"""Small Triton kernels for the tests of the runtime, and functions for its interpreter."""

from __future__ import annotations

import os
import time

import torch
import triton
import triton.language as tl
from torch import Tensor

from fuselab.errors import ShapeError, UnknownNameError
from fuselab.runtime.triton_float import float_value
from fuselab.runtime.triton_launch import launch, triton_float


@triton.jit
def combine(
    input,
    bias,
    output,
    numel,
    stride,
    scale,
    wide: tl.float64,
    offset,
    BLOCK: tl.constexpr,
    RELU: tl.constexpr = False,
):
    """output[i] = input[i * stride] * scale + offset + wide (+ bias[0])"""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    value = tl.load(input + index * stride, mask=mask).to(tl.float32) * scale + offset + wide
    if bias is not None:
        value += tl.load(bias)
    if RELU:
        value = tl.where(value > 0, value, 0.0)
    tl.store(output + index, value, mask=mask)


@triton.jit
def scaled(input, output, numel, scale, BLOCK: tl.constexpr):
    """output[i] = input[i] * scale"""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    tl.store(output + index, tl.load(input + index, mask=mask) * scale, mask=mask)


@triton.jit
def shifted(input, output, numel, by_pointer, by: tl.float64, BLOCK: tl.constexpr):
    """output[i] = input[i] + by"""
    index = tl.arange(0, BLOCK)
    mask = index < numel
    value = tl.load(input + index, mask=mask)
    tl.store(output + index, value + float_value(by_pointer, by, input.dtype.element_ty), mask=mask)


def run_shifted(value: Tensor, by: float | Tensor) -> Tensor:
    output = torch.empty_like(value)
    launch(shifted, (1,), value, output, value.numel(), *triton_float(by), BLOCK=64)
    return output


def run_scaled(value: Tensor, scale: float) -> Tensor:
    output = torch.empty_like(value)
    grid = (triton.cdiv(value.numel(), 64),)
    launch(scaled, grid, value, output, value.numel(), scale, BLOCK=64, num_warps=2)
    return output


def run_combined(value: Tensor, scale: float) -> Tensor:
    print("a kernel may print")
    output = value.new_empty(value.numel())
    launch(combine, (1,), value, None, output, value.numel(), value.stride(0), scale, 0.5, 3, 64)
    return output


def refuses() -> None:
    raise ShapeError("the sentence with the mend")


def names_nothing_known() -> None:
    raise UnknownNameError("operator", "sofmax", ["softmax"])


def divides_by_zero() -> float:
    return 1 / 0


def exits() -> None:
    os._exit(3)


def sleeps() -> None:
    time.sleep(60)


def environment() -> str:
    return os.environ["TRITON_INTERPRET"]


def process() -> int:
    return os.getpid()


@triton.jit
def read_beyond(input, table, output, numel, beyond, TABLE: tl.constexpr, KIND: tl.constexpr):
    """output[i] = input[i], with the mask open for ``beyond`` elements on either side."""
    index = tl.arange(0, 8)
    low = tl.minimum(beyond, 0)
    mask = (index + low < numel + tl.maximum(beyond, 0)) & (index < 8)
    if TABLE:
        input = tl.load(table).to(tl.pointer_type(tl.float32))
    place = index + low
    if KIND == "load":
        value = tl.load(input + place, mask=mask)
        tl.store(output + index, value, mask=index < numel)
    elif KIND == "store":
        tl.store(output + place, 1.0, mask=mask)
    else:
        tl.atomic_add(output + place, 1.0, mask=mask)


def run_beyond(numel: int, beyond: int, kind: str = "load", of_table: bool = False) -> Tensor:
    """Run ``read_beyond`` on tensors of ``numel`` elements in their own memory."""
    input, output = torch.ones(numel), torch.zeros(numel)
    table = torch.tensor([input.data_ptr()])
    read_beyond[1,](input, table, output, numel, beyond, TABLE=of_table, KIND=kind)
    return output

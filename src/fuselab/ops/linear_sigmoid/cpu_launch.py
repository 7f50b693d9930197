"""Launchers of the C++ kernels of one logit per row."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import cpp_types
from fuselab.ops.linear_sigmoid.layout import Rows, backward_of, forward_of
from fuselab.runtime.cpp_source import CppSource, f32, f64, i64
from fuselab.runtime.grid import ceil_div

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))
_PARALLEL_FROM = 1 << 16  # parallel_from of cpu_kernels.cpp
_MOST_PARTS = 64  # parts of the rows: enough for 64 threads, and few partial sums to add


def _dense_rows(of: Rows) -> tuple[Rows, int, int]:
    """Return the operands with contiguous rows, the number of parts of the rows, and the rows of a
    part, a multiple of 16. If one thread does all, there is one part, which needs no workspace for
    its sum."""
    rows = of.input if of.input.stride(1) == 1 or of.depth == 1 else of.input.contiguous()
    of = Rows(rows, of.weight.contiguous(), of.bias, of.kind, of.mean)
    most = _MOST_PARTS if of.rows * of.depth >= _PARALLEL_FROM else 1
    per_part = ceil_div(ceil_div(of.rows, most), 16) * 16
    return of, ceil_div(of.rows, per_part), per_part


@forward_of
def forward(of: Rows, target: Tensor | None, output: Tensor) -> None:
    """Compute the output in one launch; an input whose rows are not contiguous is copied first."""
    of, parts, per_part = _dense_rows(of)
    summed = of.kind == "loss" and parts > 1
    sums = of.input.new_empty(parts, dtype=torch.float64) if summed else None
    types = (of.input, of.input if target is None else target, output)
    numbers = (of.rows, of.depth, per_part, of.input.stride(0))
    CPP.launch(
        f"forward<Kind::{of.kind}, {cpp_types(tensor.dtype for tensor in types)}>",
        (
            *(of.input, of.weight, of.bias, target, output, sums),
            *(i64(number) for number in numbers),
            i64(0 if target is None else target.stride(0)),
            f64(of.divisor),
        ),
    )


@backward_of
def backward(of: Rows, upstream: Tensor, kept: Tensor, grads: tuple[Tensor | None, ...]) -> None:
    """Compute the gradients in one launch. The workspace is up to 64 float32 rows and 64
    float64."""
    of, parts, per_part = _dense_rows(of)
    weight_sums = of.input.new_empty((parts, ceil_div(of.depth, 16) * 16), dtype=torch.float32)
    bias_sums = of.input.new_empty(parts, dtype=torch.float64)
    kind = "sigmoid" if of.kind == "sigmoid" else "loss"
    types = cpp_types(tensor.dtype for tensor in (of.input, kept, upstream))
    numbers = (of.rows, of.depth, per_part, upstream.stride(0), kept.stride(0), of.input.stride(0))
    CPP.launch(
        f"backward<Kind::{kind}, {types}>",
        (
            *(upstream, kept, of.input, of.weight, of.bias, *grads, weight_sums, bias_sums),
            *(i64(number) for number in numbers),
            f32(1 / of.divisor),
        ),
    )

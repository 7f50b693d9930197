"""Kernels that scan and reduce by functions of their own, for test_interpreted_scans.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from fuselab.runtime import interpreted_scans


@triton.jit
def add_within_runs(begins, value, other_begins, other_value):
    return begins | other_begins, tl.where(other_begins != 0, other_value, value + other_value)


@triton.jit
def farther_from_zero(one, other):
    return tl.where(tl.abs(one) >= tl.abs(other), one, other)


@triton.jit
def larger_by_a_branch(one, other):
    # The result is chosen by the value of one element, so that it cannot be called with slices.
    if one > other:  # noqa: SIM108
        result = one
    else:
        result = other
    return result


@triton.jit
def kernel(x, begins, out, HOW: tl.constexpr, AXIS: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    at = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    value = tl.load(x + at)
    if HOW == "runs":
        _, found = tl.associative_scan((tl.load(begins + at), value), AXIS, add_within_runs)
        tl.store(out + at, found)
    elif HOW == "backward_runs":
        _, found = tl.associative_scan(
            (tl.load(begins + at), value), AXIS, add_within_runs, reverse=True
        )
        tl.store(out + at, found)
    elif HOW == "largest_kept":
        found = tl.reduce(value, AXIS, farther_from_zero, keep_dims=True)
        tl.store(out + at, found + value * 0)
    elif HOW == "largest_of_all":
        tl.store(out, tl.reduce(value, None, farther_from_zero))
    else:
        place = tl.arange(0, M if AXIS == 0 else N)
        if HOW == "largest":
            tl.store(out + place, tl.reduce(value, AXIS, farther_from_zero))
        else:
            tl.store(out + place, tl.reduce(value, AXIS, larger_by_a_branch))


def run(how: str, x: Tensor, begins: Tensor, axis: int) -> Tensor:
    out = torch.zeros_like(x)
    kernel[(1,)](x, begins, out, HOW=how, AXIS=axis, N=x.shape[0], M=x.shape[1])
    return out


def run_both(how: str, x: Tensor, begins: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the result by slices and that element by element."""
    by_slices = run(how, x, begins, axis)
    operations = (interpreter.ScanOps, "generic_scan"), (interpreter.ReduceOps, "generic_reduce")
    installed = [getattr(holder, name) for holder, name in operations]
    for (holder, name), function in zip(operations, installed, strict=True):
        setattr(holder, name, function.by_element)
    try:
        return by_slices, run(how, x, begins, axis)
    finally:
        for (holder, name), function in zip(operations, installed, strict=True):
            setattr(holder, name, function)


def calls_of_a_scan(x: Tensor) -> int:
    """Return how often a scan of the rows calls its function."""
    count = [0]
    usual = interpreted_scans._combined

    def counted(*args: Any) -> Any:
        count[0] += 1
        return usual(*args)

    interpreted_scans._combined = counted
    try:
        run("runs", x, torch.zeros_like(x, dtype=torch.int32), 0)
    finally:
        interpreted_scans._combined = usual
    return count[0]

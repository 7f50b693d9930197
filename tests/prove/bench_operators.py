"""Small operators for the benchmark's tests: honest ones, and ones that it must reject."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation, Inputs


def scaled_relu(input: Tensor, scale: float = 2.0) -> Tensor:
    return torch.relu(input) * scale


def scaled_relu_backward(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, scale: float
) -> tuple[Tensor | None, ...]:
    return (grad_output * scale * (input > 0) if needs[0] else None,)


def cost(input: Tensor, scale: float = 2.0) -> Cost:
    size = input.numel() * input.element_size()
    return Cost(size, size, 2 * input.numel())


def cost_backward(input: Tensor, scale: float = 2.0) -> Cost:
    size = input.numel() * input.element_size()
    return Cost(2 * size, size, 2 * input.numel())


def case(rows: int, columns: int, *tags: str) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        values = torch.randn(rows, columns, generator=generator)
        return Inputs((values.to(device, dtype),))

    return Case(f"{rows}x{columns}", make, frozenset(tags))


def lazy(input: Tensor, scale: float) -> Tensor:
    """Returns whatever lay in memory."""
    return torch.empty_like(input)


class Remembering:
    """Right the first time, and the same again whenever the input lies at the same address."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def __call__(self, input: Tensor, scale: float) -> Tensor:
        if input.data_ptr() not in self.kept:
            self.kept[input.data_ptr()] = scaled_relu(input, scale)
        return self.kept[input.data_ptr()].clone()


def raising(input: Tensor, scale: float) -> Tensor:
    raise RuntimeError("out of registers")


def clamped(input: Tensor, scale: float) -> Tensor:
    return input.clamp(min=0).mul_(scale)


def operator(name: str, **forwards: Any) -> FusedOp:
    """``scaled_relu`` under ``bench_tests::name`` with these CPU implementations."""
    return FusedOp(
        name=f"bench_tests::{name}",
        reference=scaled_relu,
        implementations={
            key: Implementation("cpu", forward, scaled_relu_backward)
            for key, forward in forwards.items()
        },
        cost=cost,
        cost_backward=cost_backward,
        cases=(
            case(64, 64, "bench", "sweep"),
            case(512, 512, "bench", "sweep"),
            case(2048, 1024, "bench", "sweep"),
            case(1 << 20, 1024, "bench", "huge"),
        ),
        gradient=Gradient(
            save=lambda output, input, scale: (input, scale), reference=scaled_relu_backward
        ),
        peers={"clamp": lambda input, scale=2.0: input.clamp(min=0) * scale},
    )

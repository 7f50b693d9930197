"""The gradient of a scalar argument is a sum over everything that its kernel reads anyway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import compare
from torch import Tensor

from fuselab.ejection.eject import eject
from fuselab.ejection.package import planned_package
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def snake(x, alpha):
    return x + torch.sin(alpha * x).square() / (alpha + 1e-9)


def scaled_and_shifted(x, scale, shift, weight):
    return F.silu(x * scale + shift) * weight


def rescaled(x, gain):
    return F.rms_norm(x, (x.shape[-1],)) * gain


SHAPES: dict[Callable[..., Any], tuple[tuple[int, ...], ...]] = {
    snake: ((9, 70), (1,)),
    scaled_and_shifted: ((2, 5, 80), (), (), (80,)),
    rescaled: ((4, 3, 72), ()),
}


def arguments(function: Callable[..., Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(shape, generator=generator) for shape in SHAPES[function]]


@pytest.mark.parametrize("function", SHAPES, ids=lambda one: one.__name__)
def test_large_tensors_are_read_once(function: Any) -> None:
    package = planned_package(function, arguments(function), {}, function.__name__)
    read = [one.name for plan in package.triton_backward for one in plan.loads]
    assert read.count("x") == read.count("grad_output") == 1


@pytest.mark.parametrize("function", SHAPES, ids=lambda one: one.__name__)
def test_interpreted_triton(function: Any, tmp_path: Path) -> None:
    args = arguments(function)
    folder = eject(function, *args, out=tmp_path / function.__name__)
    op = load_op(str(folder))
    for given in (args, [args[0].transpose(0, -1).contiguous().transpose(0, -1), *args[1:]]):
        compare(
            op,
            lambda *args: interpreter.run(f"{folder}/op.py:forward_triton", *args),
            lambda *args: interpreter.run(f"{folder}/op.py:backward_triton", *args),
            given,
        )


def test_a_narrow_tensor_keeps_its_loop_over_everything() -> None:
    package = planned_package(snake, (torch.ones(100, 3), torch.ones(1)), {}, "snake")
    assert not any(plan.sums for plan in package.triton_backward)

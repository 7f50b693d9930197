"""Backwards that read an output of the forward in place of what it was computed from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fuselab
from fuselab.ejection.eject import eject
from fuselab.ejection.package import planned_package
from fuselab.prove.load import load_op


def sum_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x + residual
    return hidden, F.layer_norm(hidden, hidden.shape[-1:], weight)


def weights(scores: Tensor) -> Tensor:
    return torch.softmax(scores * 0.5, -1)


def log_of_weights(scores: Tensor) -> Tensor:
    return F.log_softmax(scores, -1)


def biased(x: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x + bias)


def block_end(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True) + residual)


def narrowed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total.to(torch.bfloat16), total.sin()


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


SHAPES: dict[Callable[..., Any], tuple[tuple[int, ...], ...]] = {
    sum_and_norm: ((5, 80), (5, 80), (80,)),
    weights: ((2, 9),),
    log_of_weights: ((4, 70),),
    biased: ((6, 30), (30,)),
    block_end: ((3, 4, 5, 6), (3, 4, 5, 6), (4,), (4,)),
}
READ = {
    sum_and_norm: ["hidden"],
    weights: ["output"],
    log_of_weights: ["output"],
    biased: ["output"],
    block_end: ["output"],
    narrowed: [],
    gelu: [],
}


def arguments(function: Callable[..., Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    shapes = SHAPES.get(function, ((6, 30), (6, 30)))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    root = tmp_path_factory.mktemp("reading")

    def folder(function: Callable[..., Any]) -> Path:
        path = root / function.__name__
        return path if path.exists() else eject(function, *arguments(function), out=path)

    return folder


@pytest.mark.parametrize("function", READ, ids=lambda one: one.__name__)
def test_what_is_read(function: Callable[..., Any]) -> None:
    package = planned_package(function, arguments(function), {}, function.__name__)
    assert [one.name for _, one in package.read_outputs] == READ[function]
    loaded = {one.name for plan in package.backward for one in plan.loads}
    assert {*READ[function]} <= loaded


def tensors(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", SHAPES, ids=lambda one: one.__name__)
def test_cpp(function: Callable[..., Any], dtype: torch.dtype, folders: Any) -> None:
    by_kernels = fuselab.operator(load_op(str(folders(function))))
    args = [one.to(dtype).requires_grad_() for one in arguments(function)]
    wide = [one.detach().double().requires_grad_() for one in args]
    ours, exact = by_kernels(*args, implementation="cpp"), tensors(function(*wide))
    upstream = [torch.randn_like(one) for one in exact]
    given = [one.to(dtype) for one in upstream]
    found = torch.autograd.grad(tensors(ours), args, given)
    wanted = torch.autograd.grad(exact, wide, [one.double() for one in given])
    near = 1e-4 if dtype == torch.float32 else 6e-2
    for one, other in zip((*tensors(ours), *found), (*exact, *wanted), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=near, atol=near)


@pytest.mark.parametrize("function", [weights, block_end], ids=lambda one: one.__name__)
def test_derivatives_and_what_is_written_over(function: Any, folders: Any) -> None:
    """An output that the caller writes over cannot be read any more, which autograd says, as of
    PyTorch's own functions that keep their result."""
    by_kernels = fuselab.operator(load_op(str(folders(function))))
    small = [one[:2, :, :2, :3] if one.dim() == 4 else one for one in arguments(function)]
    args = [one.double().requires_grad_() for one in small]

    def kernels(*args: Tensor) -> Any:
        return by_kernels(*args, implementation="cpp")

    assert torch.autograd.gradgradcheck(kernels, args)
    output = kernels(*args)
    with torch.no_grad():
        output.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(output.sum(), args[0])

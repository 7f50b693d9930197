"""A training step of linear_activation from launch plans that hold the library's products: the
numbers of the path without plans, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from linear_cases import operands
from torch import Tensor

from fuselab.measure.cuda_graph import captured
from fuselab.ops import linear_activation
from fuselab.runtime import kernel_launch, launch_plans

pytestmark = pytest.mark.gpu

# Implementation, dtype, depth, activation: wgmma's and cublaslt's forward before the same backward,
# cublaslt's with its epilogue, with a pass of ours and without; gelu's third product; the shallow
# backward with a product behind it.
LAYERS = [
    ("wgmma", torch.bfloat16, 96, "relu"),
    ("cublaslt", torch.bfloat16, 96, "relu"),
    ("cublaslt", torch.float16, 96, "gelu_tanh"),
    ("cublaslt", torch.float32, 96, "relu"),
    ("cublaslt", torch.float32, 96, "gelu"),
    ("cublaslt", torch.float32, 96, "identity"),
    ("cublaslt", torch.float64, 96, "tanh"),
    ("triton", torch.float32, 13, "relu"),
    ("triton", torch.bfloat16, 13, "silu"),
    ("auto", torch.float32, 96, "relu"),
]
layers = pytest.mark.parametrize(
    ("implementation", "dtype", "depth", "activation"), LAYERS, ids=lambda value: str(value)
)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def no_launch(*args: Any) -> None:
    raise AssertionError("a launch that is not a plan's")


def drawn(dtype: torch.dtype, depth: int, seed: int) -> list[Tensor]:
    """Input, weight, bias and upstream gradient, in memory of their own: 2100 rows, so that the
    bias's gradient takes two launches, in two dimensions."""
    _, weight, bias = operands(1, depth, 72, dtype, "cuda")
    random = torch.Generator("cuda").manual_seed(seed)
    input = torch.randn(3, 700, depth, generator=random, device="cuda").to(dtype)
    upstream = torch.randn(3, 700, 72, generator=random, device="cuda").to(dtype)
    assert bias is not None
    return [input, weight * (1 + seed), bias + seed, upstream]


def step(
    tensors: list[Tensor], needs: tuple[bool, ...], activation: str, implementation: str
) -> list[Tensor]:
    leaves = [
        tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needs, strict=False)
    ]
    output = linear_activation(*leaves, activation, implementation=implementation)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [output, *torch.autograd.grad(output, wanted, tensors[3])]


@layers
def test_gradients_are_those_of_the_path_without_plans(
    implementation: str,
    dtype: torch.dtype,
    depth: int,
    activation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every_needs = [
        (True, True, True),
        (False, True, True),
        (True, False, False),
        (True, True, True),
    ]
    calls = [
        (precision, needs, drawn(dtype, depth, seed))
        for precision in ("highest", "high", "highest")
        for seed, needs in enumerate(every_needs)
    ]
    plain = []
    for precision, needs, tensors in calls:
        torch.set_float32_matmul_precision(precision)
        launch_plans.forget_all()
        plain.append(step(tensors, needs, activation, implementation))
    for is_planned in (False, True):
        with monkeypatch.context() as patch:
            if is_planned:
                patch.setattr(kernel_launch, "launch_cuda", no_launch)
                patch.setattr(torch, "mm", no_launch)
            for (precision, needs, tensors), theirs in zip(calls, plain, strict=True):
                torch.set_float32_matmul_precision(precision)
                ours = step(tensors, needs, activation, implementation)
                assert len(ours) == len(theirs)
                for one, other in zip(ours, theirs, strict=True):
                    assert torch.equal(one, other)
                    assert one.stride() == other.stride()


def test_tf32_is_followed_after_a_plan_was_made() -> None:
    """With products of a plan made under the other setting the gradients would agree."""
    tensors = drawn(torch.float32, 96, 0)
    grads = []
    for precision in ("highest", "high", "highest", "high"):
        torch.set_float32_matmul_precision(precision)
        grads.append(step(tensors, (True, True, True), "relu", "cublaslt")[2])
    assert torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[3])
    assert not torch.equal(grads[0], grads[1])


@layers
def test_planned_steps_in_a_graph(
    implementation: str, dtype: torch.dtype, depth: int, activation: str
) -> None:
    held = drawn(dtype, depth, 0)
    for _ in range(2):
        step(held, (True, True, True), activation, implementation)
    graph, results = captured(
        lambda: step(held, (True, True, True), activation, implementation), torch.device("cuda")
    )
    for seed in (1, 2):
        for tensor, value in zip(held, drawn(dtype, depth, seed), strict=True):
            tensor.copy_(value)
        graph.replay()
        eager = step(held, (True, True, True), activation, implementation)
        for ours, theirs in zip(results, eager, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_planned_products_stay_on_the_current_stream_and_ask_for_nothing() -> None:
    """Under the sync debug mode a synchronisation raises."""
    tensors, stream = drawn(torch.float32, 96, 0), torch.cuda.Stream()
    expected = [step(tensors, (True, True, True), "relu", "cublaslt") for _ in range(2)][1]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            ours = step(tensors, (True, True, True), "relu", "cublaslt")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_second_derivatives_behind_a_plan() -> None:
    input, weight, bias, upstream = drawn(torch.float64, 20, 0)
    input, upstream = input[0, :5].contiguous(), upstream[0, :5].contiguous()
    leaves = [value.detach().requires_grad_() for value in (input, weight, bias)]
    found = []
    for implementation in ("cublaslt", "cublaslt", "cublaslt", "reference"):
        output = linear_activation(*leaves, "tanh", implementation=implementation)
        grads = torch.autograd.grad(output, leaves, upstream, create_graph=True)
        total = sum((grad**2).sum() for grad in grads)
        found.append(torch.autograd.grad(total, leaves))
    for grads in found[:3]:
        torch.testing.assert_close(grads, found[3])

"""What one timed step does: gradients or none, and how calls are grouped."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fuselab.measure.steady_step import steady, step


def test_the_forward_runs_without_gradients() -> None:
    layer = nn.Linear(3, 2)
    call = step(layer, (torch.ones(4, 3),), {}, list(layer.parameters()), backward=False)
    output = call()
    assert output.shape == (4, 2)
    assert not output.requires_grad


def test_the_backward_reaches_arguments_and_parameters_and_accumulates_nothing() -> None:
    seen: list[str] = []
    weight = torch.ones(3, requires_grad=True)
    input, other = torch.ones(3, requires_grad=True), torch.ones(3)
    weight.register_hook(lambda grad: seen.append("weight"))
    input.register_hook(lambda grad: seen.append("input"))

    def function(input: Tensor, *, other: Tensor) -> dict[str, Tensor]:
        return {"sum": (input * weight).sum(), "plain": other * 2}

    call = step(function, (input,), {"other": other}, [weight], backward=True)
    call()
    call()
    assert sorted(seen) == ["input", "input", "weight", "weight"]
    assert weight.grad is None
    assert input.grad is None


def test_nothing_to_differentiate_is_a_forward() -> None:
    call = step(lambda x: x + 1, (torch.zeros(2),), {}, [], backward=True)
    assert call().tolist() == [1.0, 1.0]


def test_on_the_cpu_a_sample_is_one_call() -> None:
    calls: list[int] = []
    many, count = steady(lambda: calls.append(1), torch.device("cpu"))
    many()
    assert (len(calls), count) == (1, 1)

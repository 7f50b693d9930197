"""The optimizers with rates in tensors against torch.optim's: blocks' edges, more tensors than one
launch takes, bfloat16 gradients and copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fuselab.train.capturable import DenseOptimizer, TableOptimizer
from fuselab.train.optimizers import OPTIMIZERS, dense_optimizer, table_optimizer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = ((1,), (3, 5), (4095,), (4096,), (4097,), (2, 4096), (1000, 13))


def _numbers(device: str) -> tuple[Tensor, Tensor]:
    return torch.zeros((), device=device), torch.zeros((), device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("half", [False, True])
def test_dense_steps_are_torch_optims(name: str, half: bool, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPES * 5  # more than one launch takes
    start = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    wanted = [nn.Parameter(each.clone()) for each in start]
    theirs = dense_optimizer(name, wanted, 1.0)
    rate, count = _numbers(device)
    copies = [each.bfloat16() for each in start] if half else []
    ours = DenseOptimizer(name, start, rate, count, copies)
    for step, lr in enumerate((0.1, 0.02, 0.3), 1):
        grads = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
        grads[3][::3] = 0.0
        if half:
            grads = [grad.bfloat16() for grad in grads]
        theirs.param_groups[0]["lr"] = lr
        for parameter, grad in zip(wanted, grads, strict=True):
            parameter.grad = grad.float()
        theirs.step()
        rate.fill_(lr)
        count.fill_(step)
        ours.step(grads)
        for mine, parameter in zip(start, wanted, strict=True):
            torch.testing.assert_close(mine, parameter.detach(), rtol=1e-5, atol=1e-6)
    assert all(
        torch.equal(copy, mine.bfloat16()) for copy, mine in zip(copies, start, strict=False)
    )
    for key, tensors in ours.state.items():
        for mine, parameter in zip(tensors, wanted, strict=True):
            torch.testing.assert_close(mine, theirs.state[parameter][key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_met_once_often_and_never(name: str, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes, width = (1, 3, 50), 4
    start = [torch.randn(size, width, generator=generator).to(device) for size in sizes]
    wanted = [nn.Parameter(each.clone()) for each in start]
    mine = [nn.Parameter(each.clone()) for each in start]
    theirs = table_optimizer(name, wanted, 1.0)
    rate, count = _numbers(device)
    ours = TableOptimizer(name, mine, rate, count)
    for step, lr in enumerate((0.1, 0.02), 1):
        bounds = torch.tensor(sizes)
        rows = (torch.rand(20, 3, generator=generator) * bounds).int().to(device)
        rows[:, 2] %= 7  # the others of the last table are never met
        grads = torch.randn(20, 3, width, generator=generator).to(device)
        theirs.zero_grad()
        vectors = [
            nn.functional.embedding(rows[:, place], table, sparse=True)
            for place, table in enumerate(wanted)
        ]
        torch.stack(vectors, 1).backward(grads)
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
        rate.fill_(lr)
        count.fill_(step)
        ours.step(rows, grads)
    for place in range(3):
        torch.testing.assert_close(
            mine[place].detach(), wanted[place].detach(), rtol=1e-5, atol=1e-5
        )
    assert torch.equal(mine[2][7:].detach(), start[2][7:])

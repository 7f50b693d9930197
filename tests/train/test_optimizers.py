"""Row-wise Adagrad by hand; states by name go in and out and the next step is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuselab.errors import UnknownNameError
from fuselab.train.optimizers import (
    OPTIMIZERS,
    RowwiseAdagrad,
    dense_optimizer,
    load_state_tensors,
    state_tensors,
    table_optimizer,
)

IDS = torch.tensor([2, 0, 2])


def _step(table: nn.Parameter, optimizer: torch.optim.Optimizer, sparse: bool) -> None:
    optimizer.zero_grad()
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    (F.embedding(IDS, table, sparse=sparse) * weights).sum().backward()
    optimizer.step()


def test_rowwise_adagrad_by_hand() -> None:
    table = nn.Parameter(torch.ones(4, 2))
    optimizer = RowwiseAdagrad([table], lr=0.5, eps=0.25)
    for _ in range(2):
        _step(table, optimizer, sparse=True)
    expected = torch.ones(4, 2)
    for row, grad in ((0, torch.tensor([3.0, 4.0])), (2, torch.tensor([6.0, 8.0]))):
        total = 0.0
        for _ in range(2):
            total += (grad**2).mean().item()
            expected[row] -= 0.5 * grad / (total**0.5 + 0.25)
    torch.testing.assert_close(table.detach(), expected)
    assert optimizer.state[table]["sum"].tolist() == [25.0, 0.0, 100.0, 0.0]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make", [dense_optimizer, table_optimizer])
def test_states_by_name(name: str, make: Any) -> None:
    sparse = make is table_optimizer
    tables = [nn.Parameter(torch.ones(4, 2)) for _ in range(2)]
    first, second = (make(name, [table], 0.1) for table in tables)
    _step(tables[0], first, sparse)
    tables[1].data.copy_(tables[0].data)
    kept = {key: value.clone() for key, value in state_tensors(first, {tables[0]: "w"}).items()}
    assert all(key.startswith("w/") for key in kept)
    assert bool(kept) == (name != "sgd")
    load_state_tensors(second, {tables[1]: "w"}, kept)
    for table, optimizer in zip(tables, (first, second), strict=True):
        _step(table, optimizer, sparse)
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0][0], torch.ones(2))


def test_an_unknown_name() -> None:
    for make in (dense_optimizer, table_optimizer):
        with pytest.raises(UnknownNameError) as refused:
            make("lion", [nn.Parameter(torch.ones(1))], 0.1)
        assert refused.value.known == ["adagrad", "adam", "sgd"]

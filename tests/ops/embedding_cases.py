"""Tables, ids and float64 answers for the tests of the embedding operators."""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = (3, 1, 105, 27, 5000)
WIDTHS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 64, 127, 128, 129)


def made(
    batch: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, ...] = SIZES,
    stray: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Tables, ids that stray at most ``stray`` rows from them, and an upstream gradient."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    ids = [torch.randint(-stray, size + stray, (batch,), generator=generator) for size in sizes]
    tables = [normal(size, width) for size in sizes]
    return tables, torch.stack(ids, 1).to(device), normal(batch, len(sizes), width)


def rows_and_places(ids: Tensor, table: int, rows: int, rule: str) -> list[tuple[int, int]]:
    """(sample, row) of every id of a table that counts, in plain Python."""
    found = []
    for sample, id in enumerate(ids[:, table].tolist()):
        if rule == "modulus":
            found.append((sample, id % rows))
        elif rule == "clamp":
            found.append((sample, min(max(id, 0), rows - 1)))
        elif 0 <= id < rows:
            found.append((sample, id))
    return found


def exact_look_up(tables: list[Tensor], ids: Tensor, rule: str = "error") -> Tensor:
    output = tables[0].new_zeros((*ids.shape, tables[0].shape[1]))
    for place, table in enumerate(tables):
        for sample, row in rows_and_places(ids, place, len(table), rule):
            output[sample, place] = table[row]
    return output


def exact_gradients(
    tables: list[Tensor], ids: Tensor, grad_output: Tensor, rule: str = "error"
) -> list[Tensor]:
    """Each row's summed gradient, in float64."""
    grads = []
    for place, table in enumerate(tables):
        grad = torch.zeros(table.shape, dtype=torch.float64, device=table.device)
        for sample, row in rows_and_places(ids, place, len(table), rule):
            grad[row] += grad_output[sample, place].double()
        grads.append(grad)
    return grads


def exact_adagrad(
    tables: list[Tensor],
    states: list[Tensor],
    grads: list[Tensor],
    learning_rate: float,
    eps: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """The tables and states after a step, in float64."""
    totals = [
        state.double() + grad.square().mean(1) for state, grad in zip(states, grads, strict=True)
    ]
    return [
        table.double() - learning_rate * grad / (total.sqrt() + eps)[:, None]
        for table, grad, total in zip(tables, grads, totals, strict=True)
    ], totals


def assert_near(ours: list[Tensor], exact: list[Tensor], magnitude: float) -> None:
    """Within four roundings of numbers of that magnitude, and not all zero."""
    for one, other in zip(ours, exact, strict=True):
        limit = 4 * torch.finfo(one.dtype).eps * max(magnitude, float(other.abs().max()))
        assert float((one.double() - other).abs().max()) <= limit
        assert float(other.abs().max()) > 0

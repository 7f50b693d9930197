"""The optimizers of a run by name, from torch.optim or alike, and their state by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.errors import UnknownNameError

OPTIMIZERS = ("sgd", "adagrad", "adam")
EPS = {"adagrad": 1e-10, "adam": 1e-8}  # torch.optim's


def dense_optimizer(
    name: str, parameters: Iterable[nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer:
    """Return torch.optim's SGD (no momentum), Adagrad or Adam. Raises UnknownNameError."""
    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=learning_rate)
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=learning_rate, eps=EPS[name])
        case "adam":
            return torch.optim.Adam(parameters, lr=learning_rate, eps=EPS[name])
    raise UnknownNameError("optimizer", name, OPTIMIZERS)


def table_optimizer(
    name: str, tables: Iterable[nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer:
    """Return an optimizer of embedding tables with sparse gradients: SGD, row-wise Adagrad,
    SparseAdam.

    It updates only the rows that occur in a batch. Raises UnknownNameError.
    """
    match name:
        case "sgd":
            return torch.optim.SGD(tables, lr=learning_rate)
        case "adagrad":
            return RowwiseAdagrad(tables, learning_rate, EPS[name])
        case "adam":
            return torch.optim.SparseAdam(tables, lr=learning_rate, eps=EPS[name])
    raise UnknownNameError("optimizer", name, OPTIMIZERS)


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum per row, of the mean of the row's squared gradient.

    It is FBGEMM's ``EXACT_ROWWISE_ADAGRAD``, and does on sparse gradients what
    ``fuselab.ops.embedding_adagrad_`` does.
    """

    def __init__(self, tables: Iterable[nn.Parameter], lr: float, eps: float) -> None:
        super().__init__(tables, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for table in group["params"]:
                self.state[table]["sum"] = table.new_zeros(table.shape[0])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is None:
                    continue
                met = table.grad.coalesce()
                rows, grads = met.indices()[0], met.values()
                sums = self.state[table]["sum"]
                sums[rows] += grads.square().mean(1)
                factor = group["lr"] / (sums[rows].sqrt() + group["eps"])
                table.index_add_(0, rows, grads * -factor[:, None])


def state_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> dict[str, Tensor]:
    """Return the optimizer's state as ``name/key``; ``names`` gives every parameter's name.

    Numbers become 0-d tensors.
    """
    return {
        f"{names[parameter]}/{key}": torch.as_tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_state_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], tensors: Mapping[str, Tensor]
) -> None:
    """Load the result of ``state_tensors`` into an optimizer of the same parameters."""
    for parameter, name in names.items():
        begin = len(name) + 1
        found = {key[begin:]: value for key, value in tensors.items() if key.startswith(f"{name}/")}
        if found:
            optimizer.state[parameter] = {
                key: _as_kept(optimizer, key, value, parameter) for key, value in found.items()
            }


def _as_kept(optimizer: torch.optim.Optimizer, key: str, value: Tensor, parameter: Tensor) -> Any:
    if key != "step":
        return value.to(parameter.device, copy=True)
    # torch.optim counts in 0-d float tensors on the CPU, SparseAdam in an int.
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    return int(value) if sparse else value.to("cpu", torch.float32, copy=True)

"""Optimizers whose step a CUDA graph can hold: the learning rate and the count are tensors.

Their formulas, and the names in their state, are torch.optim's and ``RowwiseAdagrad``'s, so that a
checkpoint of either continues with the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fuselab.errors import UnknownNameError
from fuselab.ops import embedding_adagrad_, embedding_sgd_
from fuselab.train.optimizers import EPS, OPTIMIZERS

_BETAS = 0.9, 0.999  # Adam's
_STATE = {"adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}


class DenseOptimizer:
    """SGD, Adagrad or Adam of a list of tensors in a few launches for all. Raises UnknownNameError.

    ``state`` has a list for every name, one tensor per parameter.
    """

    def __init__(self, name: str, parameters: Sequence[Tensor], rate: Tensor) -> None:
        if name not in OPTIMIZERS:
            raise UnknownNameError("optimizer", name, OPTIMIZERS)
        self.name, self.rate = name, rate
        self.parameters = [parameter.detach() for parameter in parameters]
        keys = _STATE.get(name, ())
        self.state = {key: [torch.zeros_like(each) for each in self.parameters] for key in keys}

    def step(self, grads: list[Tensor], count: Tensor) -> None:
        """``grads`` are written over; ``count`` is the number of this step, from 1, 0-d."""
        if self.name == "adam":
            self._adam(grads, count)
            return
        if self.name == "adagrad":
            sums = self.state["sum"]
            torch._foreach_addcmul_(sums, grads, grads)
            roots = torch._foreach_sqrt(sums)
            torch._foreach_add_(roots, EPS["adagrad"])
            torch._foreach_div_(grads, roots)
        torch._foreach_mul_(grads, self.rate)
        torch._foreach_sub_(self.parameters, grads)

    def _adam(self, grads: list[Tensor], count: Tensor) -> None:
        means, squares = self.state["exp_avg"], self.state["exp_avg_sq"]
        torch._foreach_lerp_(means, grads, 1 - _BETAS[0])
        torch._foreach_mul_(squares, _BETAS[1])
        torch._foreach_addcmul_(squares, grads, grads, value=1 - _BETAS[1])
        first, second = (1 - beta**count for beta in _BETAS)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, second.sqrt())
        torch._foreach_add_(roots, EPS["adam"])
        updates = torch._foreach_div(means, roots)
        torch._foreach_mul_(updates, self.rate / first)
        torch._foreach_sub_(self.parameters, updates)


class TableOptimizer:
    """SGD, row-wise Adagrad or Adam on the rows that a batch met. Raises UnknownNameError.

    SGD and Adagrad are operators of fuselab. Adam has none: plain PyTorch, of a fixed number of
    launches, on all tables as one, whose parameters become views of one tensor.
    """

    def __init__(self, name: str, tables: Sequence[nn.Parameter], rate: Tensor) -> None:
        if name not in OPTIMIZERS:
            raise UnknownNameError("optimizer", name, OPTIMIZERS)
        self.name, self.rate = name, rate
        self.state: dict[str, list[Tensor]] = {}
        if name == "adagrad":
            self.state["sum"] = [table.new_zeros(table.shape[0]) for table in tables]
        if name == "adam":
            sizes = [table.shape[0] for table in tables]
            starts = [0, *torch.tensor(sizes).cumsum(0).tolist()[:-1]]
            self.starts = torch.tensor(starts, device=rate.device)
            self.flat = torch.cat([table.detach() for table in tables])
            self.means, self.squares = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
            for key, flat in (("exp_avg", self.means), ("exp_avg_sq", self.squares)):
                self.state[key] = list(flat.split(sizes))
            for table, part in zip(tables, self.flat.split(sizes), strict=True):
                table.data = part
        self.tables = [table.detach() for table in tables]

    def step(self, rows: Tensor, grads: Tensor, count: Tensor) -> None:
        """Of the vectors' gradients [B, T, D], whose rows [B, T] may be met more than once."""
        if self.name == "sgd":
            embedding_sgd_(self.tables, rows, grads, self.rate)
        elif self.name == "adagrad":
            embedding_adagrad_(
                self.tables, self.state["sum"], rows, grads, self.rate, EPS["adagrad"]
            )
        else:
            self._adam(rows, grads, count)

    def _adam(self, rows: Tensor, grads: Tensor, count: Tensor) -> None:
        """As torch.optim.SparseAdam. Rows met are sorted, each run of equal ones is added up; the
        places left over behind the last run repeat it, and write what it writes."""
        keys, order = (rows + self.starts).flatten().sort(stable=True)
        begins = torch.cat([keys.new_ones(1), (keys[1:] != keys[:-1]).long()])
        run = begins.cumsum(0) - 1
        grads = grads.flatten(0, 1)
        sums = torch.zeros_like(grads).index_add_(0, run, grads[order])
        place = torch.arange(len(run), device=run.device).minimum(run[-1])
        met = torch.empty_like(keys).scatter_(0, run, keys)[place]
        total = sums[place]
        mean = self.means[met].lerp(total, 1 - _BETAS[0])
        square = self.squares[met].lerp(total * total, 1 - _BETAS[1])
        self.means.index_copy_(0, met, mean)
        self.squares.index_copy_(0, met, square)
        first, second = (1 - beta**count for beta in _BETAS)
        size = self.rate * second.sqrt() / first
        update = size * mean / (square.sqrt() + EPS["adam"])
        self.flat.index_copy_(0, met, self.flat[met] - update)

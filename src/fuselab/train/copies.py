"""The update of tables of which every rank has a copy, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from fuselab.errors import UnknownNameError
from fuselab.train.capturable import _BETAS
from fuselab.train.optimizers import EPS, OPTIMIZERS


class Copies:
    """SGD, row-wise Adagrad or Adam on the rows that occur in the batch of all ranks.

    The gradient is dense, so that the ranks can add theirs up and take the same step. Copies are
    of small tables; they become views of one tensor. ``rate`` and ``count`` are 0-d tensors, read
    when the step is taken, and ``state`` has a list for every name, one tensor per table. Raises
    UnknownNameError.
    """

    def __init__(
        self, name: str, tables: Sequence[nn.Parameter], rate: Tensor, count: Tensor
    ) -> None:
        if name not in OPTIMIZERS:
            raise UnknownNameError("optimizer", name, OPTIMIZERS)
        self.name, self.rate, self.count = name, rate, count
        self.state: dict[str, list[Tensor]] = {}
        if not tables:
            return
        self.sizes = sizes = [len(table) for table in tables]
        self.flat = torch.cat([table.detach() for table in tables])
        for table, part in zip(tables, self.flat.split(sizes), strict=True):
            table.data = part
        starts = list(accumulate(sizes, initial=0))[:-1]
        self.starts = torch.tensor(starts, device=rate.device)
        keys = {"sgd": (), "adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}[name]
        self.whole = {
            key: self.flat.new_zeros(self.flat.shape[:1] if key == "sum" else self.flat.shape)
            for key in keys
        }
        self.state = {key: list(value.split(sizes)) for key, value in self.whole.items()}

    def gradient(self, rows: Tensor, grads: Tensor) -> Tensor:
        """Return the gradient of all copies, [rows of all, D], float32.

        ``grads`` [n, R, D] are those of the vectors of ``rows`` [n, R]. Adam gets one more column,
        which is 1 for a row that occurred: the others leave a row of zeros as it is.
        """
        width, places = grads.shape[2], (rows + self.starts).flatten()
        found = self.flat.new_zeros(len(self.flat), width + (self.name == "adam"))
        if self.name == "adam":
            found[:, width].index_fill_(0, places, 1.0)
        if not grads.is_cuda:
            found[:, :width].index_add_(0, places, grads.flatten(0, 1).float())
            return found
        # Tables of few rows: index_add_ would add thousands of vectors to one address.
        sums = torch.ops.fuselab.embedding_lookup_backward(
            [True] * len(self.sizes) + [False], grads, rows, self.sizes, "error", None,
            torch.float32, "auto",
        )  # fmt: skip
        torch.cat(sums[: len(self.sizes)], out=found[:, :width])
        return found

    def step(self, gradient: Tensor) -> None:
        """Take a step with the sum of all ranks' ``gradient``."""
        if self.name == "sgd":
            self.flat.sub_(self.rate * gradient)
        elif self.name == "adagrad":
            # a row that did not occur has a gradient of 0, which changes neither sum nor row
            total = self.whole["sum"].add_(gradient.square().mean(1))
            self.flat.sub_(self.rate * gradient / (total.sqrt() + EPS["adagrad"])[:, None])
        else:
            self._adam(gradient[:, :-1], gradient[:, -1:] > 0)

    def _adam(self, grad: Tensor, met: Tensor) -> None:
        """Take a step as torch.optim.SparseAdam does: rows that did not occur keep their state."""
        for key, value, beta in (
            ("exp_avg", grad, _BETAS[0]),
            ("exp_avg_sq", grad * grad, _BETAS[1]),
        ):
            whole = self.whole[key]
            whole.copy_(torch.where(met, whole.lerp(value, 1 - beta), whole))
        first, second = (1 - beta**self.count for beta in _BETAS)
        size = self.rate * second.sqrt() / first
        update = size * self.whole["exp_avg"] / (self.whole["exp_avg_sq"].sqrt() + EPS["adam"])
        self.flat.sub_(torch.where(met, update, 0.0))

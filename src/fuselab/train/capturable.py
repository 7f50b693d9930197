"""Optimizers whose step a CUDA graph can contain, because learning rate and count are tensors.

Their formulas, and the names in their state, are those of torch.optim and ``RowwiseAdagrad``, so
that a checkpoint of either continues with the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from fuselab.errors import UnknownNameError
from fuselab.ops import embedding_adagrad_, embedding_sgd_
from fuselab.runtime.cpp_source import CppSource
from fuselab.runtime.cuda_source import CudaSource, i32, i64
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.parameters import Struct
from fuselab.train.optimizers import EPS, OPTIMIZERS

_BETAS = 0.9, 0.999  # Adam's
_STATE = {"adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}
_TENSORS, _BLOCK, _THREADS = 32, 4096, 256  # kTensors and kBlock of dense_update.h, kThreads of .cu
_GRADS = {torch.float32: "float", torch.bfloat16: "bfloat16"}

CUDA = CudaSource(Path(__file__).with_name("dense_update.cu"))
CPP = CppSource(Path(__file__).with_name("dense_update.cpp"))


def _expression(grad: torch.dtype, update: str) -> str:
    return f"update_all<{_GRADS[grad]}, Update::{update}>"


CUDA_EXPRESSIONS = tuple(_expression(grad, update) for grad in _GRADS for update in OPTIMIZERS)


class DenseOptimizer:
    """SGD, Adagrad or Adam for a list of float32 tensors, in one launch per 32 of them.

    A pass over 96 million bfloat16 gradients (the outer interaction's first layer) reads and writes
    1.15 GB; with torch._foreach calls, a float32 copy of the gradients and a new bfloat16 copy of
    the parameters it would be 3.2 GB.

    Args:
        name: of the optimizer.
        parameters: float32, contiguous.
        rate, count: 0-d float32 on their device: the learning rate, and the number of the step
            from 1. They are read when the step is taken.
        copies: of every parameter, in the gradients' dtype, written in the same pass; or none.

    ``state`` has a list for every name, one tensor per parameter. Raises UnknownNameError.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[Tensor],
        rate: Tensor,
        count: Tensor,
        copies: Sequence[Tensor] = (),
    ) -> None:
        if name not in OPTIMIZERS:
            raise UnknownNameError("optimizer", name, OPTIMIZERS)
        self.name, self.rate, self.count = name, rate, count
        self.parameters = [parameter.detach() for parameter in parameters]
        self.copies = [copy.detach() for copy in copies]
        keys = _STATE.get(name, ())
        self.state = {key: [torch.zeros_like(each) for each in self.parameters] for key in keys}

    def step(self, grads: Sequence[Tensor]) -> None:
        """Take a step. ``grads`` are float32 or bfloat16, all of one dtype."""
        grads = [grad.contiguous() for grad in grads]
        for begin in range(0, len(grads), _TENSORS):
            part = slice(begin, begin + _TENSORS)
            self._launch(part, grads[part])

    def _launch(self, part: slice, grads: Sequence[Tensor]) -> None:
        count = len(grads)
        sizes = [grad.numel() for grad in grads]
        blocks = [ceil_div(size, _BLOCK) for size in sizes]
        states = [*(tensors[part] for tensors in self.state.values()), [], []][:2]
        tensors = (self.parameters[part], grads, self.copies[part], *states)
        first = [0, *accumulate(blocks)][:-1]
        described = Struct.of_arrays(_TENSORS, (*tensors, sizes, first))
        expression = _expression(grads[0].dtype, self.name)
        if self.rate.is_cuda:
            grid, block = (sum(blocks), 1, 1), (_THREADS, 1, 1)
            CUDA.launch(expression, grid, block, (self.rate, self.count, i32(count), described))
        else:
            CPP.launch(expression, (self.rate, self.count, i32(count), i64(sum(blocks)), described))


class TableOptimizer:
    """SGD, row-wise Adagrad or Adam on the rows that occur in a batch. Raises UnknownNameError.

    SGD and Adagrad are operators of fuselab. Adam is plain PyTorch with a fixed number of launches,
    on all tables at once; their parameters become views of one tensor. ``rate`` and ``count`` are
    as for ``DenseOptimizer``. ``out_of_range`` is ``"error"`` or ``"ignore"``, as for
    ``embedding_lookup``.
    """

    def __init__(
        self,
        name: str,
        tables: Sequence[nn.Parameter],
        rate: Tensor,
        count: Tensor,
        out_of_range: str = "error",
    ) -> None:
        if name not in OPTIMIZERS:
            raise UnknownNameError("optimizer", name, OPTIMIZERS)
        self.name, self.rate, self.count = name, rate, count
        self.out_of_range = out_of_range
        self.state: dict[str, list[Tensor]] = {}
        if name == "adagrad":
            self.state["sum"] = [table.new_zeros(table.shape[0]) for table in tables]
        if name == "adam":
            sizes = [table.shape[0] for table in tables]
            starts = [0, *torch.tensor(sizes).cumsum(0).tolist()[:-1]]
            self.starts = torch.tensor(starts, device=rate.device)
            self.sizes = torch.tensor(sizes, device=rate.device)
            # The last row belongs to no table: ids out of range are sent there.
            spare = tables[0].new_zeros(1, tables[0].shape[1])
            self.flat = torch.cat([*(table.detach() for table in tables), spare])
            self.means, self.squares = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
            for key, flat in (("exp_avg", self.means), ("exp_avg_sq", self.squares)):
                self.state[key] = list(flat[:-1].split(sizes))
            for table, part in zip(tables, self.flat[:-1].split(sizes), strict=True):
                table.data = part
        self.tables = [table.detach() for table in tables]

    def step(self, rows: Tensor, grads: Tensor) -> None:
        """Take a step with the vectors' gradients [B, T, D], whose rows [B, T] may occur
        repeatedly."""
        if self.name == "sgd":
            embedding_sgd_(self.tables, rows, grads, self.rate, self.out_of_range)
        elif self.name == "adagrad":
            embedding_adagrad_(
                self.tables,
                self.state["sum"],
                rows,
                grads,
                self.rate,
                EPS["adagrad"],
                self.out_of_range,
            )
        else:
            self._adam(rows, grads)

    def _adam(self, rows: Tensor, grads: Tensor) -> None:
        """Take a step as torch.optim.SparseAdam does.

        The rows are sorted, and the gradients of each run of equal rows are added up. The unused
        places after the last run repeat it, and write the same values.
        """
        flat = rows + self.starts
        if self.out_of_range == "ignore":
            inside = (rows >= 0) & (rows < self.sizes)
            flat = torch.where(inside, flat, len(self.flat) - 1)
        keys, order = flat.flatten().sort(stable=True)
        begins = torch.cat([keys.new_ones(1), (keys[1:] != keys[:-1]).long()])
        run = begins.cumsum(0) - 1
        grads = grads.flatten(0, 1).float()
        sums = torch.zeros_like(grads).index_add_(0, run, grads[order])
        place = torch.arange(len(run), device=run.device).minimum(run[-1])
        met = torch.empty_like(keys).scatter_(0, run, keys)[place]
        total = sums[place]
        mean = self.means[met].lerp(total, 1 - _BETAS[0])
        square = self.squares[met].lerp(total * total, 1 - _BETAS[1])
        self.means.index_copy_(0, met, mean)
        self.squares.index_copy_(0, met, square)
        first, second = (1 - beta**self.count for beta in _BETAS)
        size = self.rate * second.sqrt() / first
        update = size * mean / (square.sqrt() + EPS["adam"])
        self.flat.index_copy_(0, met, self.flat[met] - update)

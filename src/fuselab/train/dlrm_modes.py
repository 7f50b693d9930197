"""Three ways to train a DLRM on a batch, with the same numbers: eager, compile, fused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselab.data import Batch
from fuselab.data.layout import DENSE_COLUMNS, SPARSE_COLUMNS
from fuselab.errors import UnknownNameError
from fuselab.models.branch import Branch, beside, branch_of
from fuselab.models.dlrm import Dlrm
from fuselab.models.dlrm_fused import FusedDlrm, dense_parameters, tables
from fuselab.train.capturable import DenseOptimizer, TableOptimizer
from fuselab.train.captured import Captured
from fuselab.train.optimizers import (
    dense_optimizer,
    load_state_tensors,
    state_tensors,
    table_optimizer,
)

MODES = ("eager", "compile", "fused")


class Step(Protocol):
    """Trains ``model`` batch by batch. A batch's ``sparse`` are rows of the tables."""

    model: Dlrm

    def __call__(self, batch: Batch, rate: float) -> Tensor:
        """Take one step with this learning rate.

        Returns the loss before it, 0-d, which the next step may overwrite.
        """
        ...

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Return the gradients of the dense parameters by name, and those of the embeddings as
        ``vectors`` [B, 26, D]; change nothing."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state as ``parameter/key``, with torch.optim's names in every
        mode."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state`` of any mode."""
        ...


def step_of(mode: str, model: Dlrm, optimizer: str, batch_size: int, half: bool = False) -> Step:
    """Return the step of a mode. ``half`` multiplies in bfloat16; parameters and loss stay float32.

    Raises UnknownNameError for an unknown mode or optimizer.
    """
    match mode:
        case "eager":
            return PlainStep(model, optimizer, half)
        case "compile":
            return PlainStep(model, optimizer, half, compiled="default")
        case "fused":
            return FusedStep(model, optimizer, batch_size, half)
    raise UnknownNameError("mode", mode, MODES)


class PlainStep:
    """The usual step: autograd, sparse gradients of 26 tables, torch.optim.

    ``compiled`` names a mode of torch.compile, which then compiles everything after the tables. It
    does not take a look-up with a sparse gradient, so that stays outside.
    """

    def __init__(
        self, model: Dlrm, optimizer: str, half: bool = False, compiled: str | None = None
    ) -> None:
        self.model, self.half = model, half
        for table in model.embeddings:
            assert isinstance(table, nn.Embedding)
            table.sparse = True
        self.head: Callable[[Tensor, Sequence[Tensor]], Tensor] = model.logits_of_vectors
        if compiled is not None:
            self.head = torch.compile(self.head, dynamic=False, mode=compiled)
        self.optimizers = (
            dense_optimizer(optimizer, [value for _, value in dense_parameters(model)], 1.0),
            table_optimizer(optimizer, tables(model), 1.0),
        )
        self.names: dict[Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters()
        }

    def __call__(self, batch: Batch, rate: float) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = rate
        loss = self._loss(batch, self.model.embed_rows(batch.sparse))
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        vectors = [
            vector.detach().requires_grad_() for vector in self.model.embed_rows(batch.sparse)
        ]
        names, dense = zip(*dense_parameters(self.model), strict=True)
        found = torch.autograd.grad(self._loss(batch, vectors), [*dense, *vectors])
        return {
            **dict(zip(names, found, strict=False)),
            "vectors": torch.stack(found[len(names) :], 1),
        }

    def _loss(self, batch: Batch, vectors: Sequence[Tensor]) -> Tensor:
        with torch.autocast(batch.dense.device.type, torch.bfloat16, enabled=self.half):
            logits = self.head(batch.dense, vectors)
        return F.binary_cross_entropy_with_logits(logits.float(), batch.labels[:, None])

    def state(self) -> dict[str, Tensor]:
        return {
            key: value
            for optimizer in self.optimizers
            for key, value in state_tensors(optimizer, self.names).items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        for optimizer in self.optimizers:
            own = {
                parameter: self.names[parameter]
                for parameter in optimizer.param_groups[0]["params"]
            }
            load_state_tensors(optimizer, own, tensors)


class FusedStep:
    """A step made of fuselab's operators.

    On a GPU the whole step, optimizer and loss included, is one CUDA graph: batch, learning rate
    and count are in memory that it reads, and nothing waits for it. With ``branches`` the look-up,
    the tables' update and the gradients of weights run beside the chain of products, as branches of
    the graph; by default if ``branch_of`` gives one.
    """

    def __init__(
        self,
        model: Dlrm,
        optimizer: str,
        batch_size: int,
        half: bool = False,
        branches: bool | None = None,
    ) -> None:
        self.model, self.half = model, half
        device = next(model.parameters()).device
        self.branch = branch_of(device, batch_size)
        if branches is not None:
            self.branch = Branch(device) if branches and device.type == "cuda" else None
        self.rate = torch.zeros((), device=device)
        self.count = torch.zeros((), device=device)
        self.rate_there, self.counted = 0.0, optimizer == "adam"  # these two spare a launch
        self.of_tables = TableOptimizer(optimizer, tables(model), self.rate, self.count)
        self.fused = FusedDlrm(model, half, self.branch)
        copies = self.fused.operands if half else ()
        self.of_dense = DenseOptimizer(optimizer, self.fused.leaves, self.rate, self.count, copies)
        self.steps = 0
        self.graph: Captured | None = None
        if device.type == "cuda":
            self._capture(batch_size, device)

    def _capture(self, batch_size: int, device: torch.device) -> None:
        """Capture the work on a batch of zeros, with an upstream gradient and a learning rate of 0,
        so that no parameter changes."""
        self.batch = Batch(
            torch.zeros(batch_size, device=device),
            torch.zeros(batch_size, DENSE_COLUMNS, device=device, dtype=self.fused.dtype),
            torch.zeros(batch_size, SPARSE_COLUMNS, dtype=torch.int32, device=device),
        )
        self.upstream = torch.zeros((), device=device)
        self.count.fill_(1)
        self.graph = Captured(self._work, device)
        self.upstream.fill_(1)

    def __call__(self, batch: Batch, rate: float) -> Tensor:
        self.steps += 1
        if rate != self.rate_there:
            self.rate.fill_(rate)
            self.rate_there = rate
        if self.counted:
            self.count.fill_(self.steps)
        if self.graph is None:
            self.batch, self.upstream = batch, self.rate.new_ones(())
            self._work()
        else:
            for mine, given in zip(self.batch, batch, strict=True):
                mine.copy_(given, non_blocking=True)
            self.graph()
        return self.loss

    def _work(self) -> None:
        grads, self.loss = self._differentiate(self.batch, self.upstream, self._update_tables)
        self.of_dense.step(grads)

    def _update_tables(self, of_vectors: Tensor) -> None:
        with beside(self.branch, of_vectors):
            self.of_tables.step(self.batch.sparse, of_vectors)

    def _differentiate(
        self, batch: Batch, upstream: Tensor, with_vectors: Callable[[Tensor], None]
    ) -> tuple[list[Tensor], Tensor]:
        """Return the dense leaves' gradients in the operands' dtype, and the loss.

        ``with_vectors`` is called with the vectors' gradient as soon as it is computed.
        """
        vectors = self.fused.vectors(batch.sparse).requires_grad_()
        vectors.register_hook(with_vectors)
        loss = self.fused.loss(batch.dense, vectors, batch.labels)
        wanted = [*self.fused.operands, vectors]
        grads = torch.autograd.grad(loss, wanted, upstream)
        if self.branch is not None:
            self.branch.join()
        return list(grads[:-1]), loss.detach()

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        of_vectors: list[Tensor] = []
        grads, _ = self._differentiate(batch, self.rate.new_ones(()), of_vectors.append)
        return {
            **self.fused.narrowed([grad.float() for grad in grads]),
            "vectors": of_vectors[0].float(),
        }

    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for key, tensors in self.of_dense.state.items():
            found |= {
                f"{name}/{key}": value for name, value in self.fused.narrowed(tensors).items()
            }
        for key, tensors in self.of_tables.state.items():
            found |= {
                f"embeddings.{place}.weight/{key}": value for place, value in enumerate(tensors)
            }
        counted = {name.rpartition("/")[0] for name in found if not _is_rowwise(name)}
        return found | {f"{name}/step": torch.tensor(float(self.steps)) for name in counted}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        for key, kept in self.of_dense.state.items():
            for name, mine in self.fused.narrowed(kept).items():
                mine.copy_(tensors[f"{name}/{key}"])
        for key, kept in self.of_tables.state.items():
            for place, mine in enumerate(kept):
                mine.copy_(tensors[f"embeddings.{place}.weight/{key}"])
        steps = [value for name, value in tensors.items() if name.endswith("/step")]
        self.steps = int(steps[0]) if steps else 0
        self.fused.refresh()


def _is_rowwise(name: str) -> bool:
    """Return whether this is a sum of row-wise Adagrad, which has no count beside it."""
    return name.startswith("embeddings.") and name.endswith("/sum")

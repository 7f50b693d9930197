"""Three ways to train adapters on a batch, with the same numbers: eager, compile, fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselab.nn import LoRALinear
from fuselab.train.capturable import DenseOptimizer
from fuselab.train.captured import Captured
from fuselab.train.lora_task import CLASSES, PIXELS
from fuselab.train.optimizers import dense_optimizer

MODES = ("eager", "compile", "fused")

Batch = tuple[Tensor, Tensor]


def base_model(hidden: int) -> nn.Sequential:
    """Return a model of 64 pixels to 10 logits with two hidden layers, from torch's generator."""
    return nn.Sequential(
        nn.Linear(PIXELS, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )


def adapted(base: nn.Sequential, rank: int, alpha: float) -> nn.Sequential:
    """Return ``base`` with an adapter on every layer, fused with the activation after it.

    The base's parameters are shared and frozen. The layers keep their names.
    """
    model = nn.Sequential()
    for place, layer in enumerate(base):
        if isinstance(layer, nn.Linear):
            activation = "relu" if place + 1 < len(base) else "identity"
            model.add_module(str(place), LoRALinear(layer, rank, alpha, activation))
    return model


def plain_logits(model: nn.Sequential, pixels: Tensor) -> Tensor:
    """Return ``model(pixels)`` in the usual spelling: four operations per layer."""
    hidden = pixels
    for layer in model:
        assert isinstance(layer, LoRALinear)
        update = F.linear(F.linear(hidden, layer.lora_a), layer.lora_b)
        hidden = F.linear(hidden, layer.weight, layer.bias) + layer.scale * update
        if layer.activation == "relu":
            hidden = torch.relu(hidden)
    return hidden


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Step(Protocol):
    """Trains the adapters of ``model`` by Adam."""

    model: Any

    def __call__(self, batch: Batch, rate: float) -> Tensor:
        """Take one step; return the loss before it, 0-d, which the next step may overwrite."""
        ...

    def differentiate(self, batch: Batch) -> Tensor:
        """Return the loss, and compute and drop its gradients: the part of a step that takes
        memory."""
        ...


def step_of(mode: str, model: nn.Sequential, batch_size: int, amp: bool = False) -> Step:
    """Return the step of one of ``MODES``. ``amp`` multiplies in bfloat16; parameters stay
    float32."""
    if mode == "fused":
        return FusedStep(model, batch_size, amp)
    return PlainStep(model, amp, compiled=mode == "compile")


class PlainStep:
    """Plain PyTorch and torch.optim; forward and loss through torch.compile if ``compiled``."""

    def __init__(self, model: nn.Module, amp: bool, compiled: bool = False) -> None:
        self.model: Any = model
        self.amp = amp
        self.parameters = trained(model)
        self.optimizer = dense_optimizer("adam", self.parameters, 1.0)
        self.loss: Callable[[Tensor, Tensor], Tensor] = self._loss
        if compiled:
            self.loss = torch.compile(self._loss, dynamic=False)

    def _loss(self, pixels: Tensor, digits: Tensor) -> Tensor:
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=self.amp):
            logits = plain_logits(self.model, pixels)
        return F.cross_entropy(logits.float(), digits)

    def __call__(self, batch: Batch, rate: float) -> Tensor:
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()
        loss = self.loss(*batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def differentiate(self, batch: Batch) -> Tensor:
        loss = self.loss(*batch)
        torch.autograd.grad(loss, self.parameters)
        return loss.detach()


class FusedStep:
    """A step with ``lora_linear`` for every layer.

    On a GPU the whole step, loss and Adam included, is one CUDA graph: batch, learning rate and
    count are in memory that it reads.
    """

    def __init__(self, model: nn.Sequential, batch_size: int, amp: bool) -> None:
        self.model, self.amp = model, amp
        self.parameters = trained(model)
        device = self.parameters[0].device
        self.rate, self.count = torch.zeros((), device=device), torch.ones((), device=device)
        self.upstream = torch.ones((), device=device)
        self.optimizer = DenseOptimizer("adam", self.parameters, self.rate, self.count)
        self.steps = 0
        self.graph: Captured | None = None
        if device.type == "cuda":
            self.batch = (
                torch.zeros(batch_size, PIXELS, device=device),
                torch.zeros(batch_size, dtype=torch.int64, device=device),
            )
            self.upstream.zero_()  # so that warming the graph changes no parameter
            self.graph = Captured(self._work, device)
            self.upstream.fill_(1)

    def __call__(self, batch: Batch, rate: float) -> Tensor:
        self.steps += 1
        self.rate.fill_(rate)
        self.count.fill_(self.steps)
        if self.graph is None:
            self.batch = batch
            self._work()
        else:
            for mine, given in zip(self.batch, batch, strict=True):
                mine.copy_(given, non_blocking=True)
            self.graph()
        return self.loss

    def _work(self) -> None:
        loss = self._loss(self.batch)
        self.optimizer.step(torch.autograd.grad(loss, self.parameters, self.upstream))
        self.loss = loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        pixels, digits = batch
        # A cache of cast weights would be filled while warming, and the graph would read old ones.
        with torch.autocast(pixels.device.type, torch.bfloat16, self.amp, cache_enabled=False):
            logits = self.model(pixels)
        return F.cross_entropy(logits.float(), digits)

    def differentiate(self, batch: Batch) -> Tensor:
        loss = self._loss(batch)
        torch.autograd.grad(loss, self.parameters, self.upstream)
        return loss.detach()

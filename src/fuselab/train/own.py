"""The user's own loss, model and data in a training run, by the TARGET convention.

A model is an ``nn.Module`` class, made with its file's ``get_init_inputs()``. A loss is a function
of what the model returns and of the batch's target, and returns a number to minimise. Data are a
function that returns a batch ``(inputs, target)`` at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.errors import TargetError
from fuselab.inspect import targets
from fuselab.inspect.user_code import raising_target_error

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Own:
    """The specs of what is the user's own; None where the case study's is taken."""

    loss: str | None = None
    model: str | None = None
    data: str | None = None

    @property
    def is_any(self) -> bool:
        return any((self.loss, self.model, self.data))


NOTHING_OWN = Own()


def load_model(spec: str, device: torch.device) -> nn.Module:
    """Return a new instance of the user's model. Raises TargetError."""
    found = targets.load_callable(spec, device)
    if not isinstance(found, nn.Module):
        raise TargetError(f"--model {spec} is no nn.Module class; name the class.")
    return found


def load_loss(spec: str, device: torch.device) -> Loss:
    """Return the user's loss. Raises TargetError."""
    return targets.load_callable(spec, device)


def own_batches(spec: str, count: int, seed: int) -> list[Batch]:
    """Return ``count`` batches of the user's data, on the CPU. Raises TargetError."""
    source = targets.load_callable(spec, torch.device("cpu"))
    torch.manual_seed(seed)
    with raising_target_error(f"--data {spec} raised:"):
        found = [source() for _ in range(count)]
    for batch in found:
        if not (
            isinstance(batch, tuple | list)
            and len(batch) == 2
            and all(isinstance(one, Tensor) for one in batch)
        ):
            raise TargetError(f"--data {spec} has to return a pair (inputs, target) of tensors.")
    return [(batch[0], batch[1]) for batch in found]


def check_step(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Run a forward, the loss and a backward once, to find what does not fit. Raises
    TargetError."""
    with raising_target_error("the model raised with a batch of the data:"):
        output = model(batch[0])
    with raising_target_error("the loss raised with what the model returns and the target:"):
        value = loss(output, batch[1])
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TargetError(f"the loss has to return one number, a 0-d tensor; it returns {got}.")
    if not value.requires_grad:
        raise TargetError(
            "the loss has no gradient: it does not depend on the model's parameters, or they are "
            "frozen."
        )
    with raising_target_error("the backward of the loss raised:"):
        value.backward()
    model.zero_grad()


def fused_loss(loss: Loss, output: Any, target: Tensor) -> Loss:
    """Return the loss with what ``fuselab.fuse`` puts in its place: operators and generated kernels
    that were proved and found faster for these arguments; elsewhere it is as it was."""
    from fuselab.fusion.fuse import fuse_with_report

    example = output.detach().requires_grad_() if isinstance(output, Tensor) else output
    fused: Loss = fuse_with_report(loss, (example, target)).model
    return fused

"""The losses of the last steps, kept on the device; the host reads them once in a while."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fuselab.errors import DivergenceError


class Losses:
    """Losses of up to ``capacity`` steps between two reads.

    Reading one synchronises with a GPU, which takes longer than a small step, so ``record`` only
    copies on the device.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.kept = torch.zeros(capacity, device=device)
        self.first_step = self.count = 0

    @property
    def full(self) -> bool:
        return self.count == len(self.kept)

    def record(self, step: int, loss: Tensor) -> None:
        """Record the loss, 0-d, of step ``step``, which follows the last one."""
        if self.count == 0:
            self.first_step = step
        self.kept[self.count].copy_(loss.detach())
        self.count += 1

    def read(self) -> list[float]:
        """Return the losses since the last read, oldest first.

        Raises DivergenceError, naming the step (from 1), if one is not finite.
        """
        losses = self.kept[: self.count].tolist()
        self.count = 0
        for place, loss in enumerate(losses):
            if not math.isfinite(loss):
                step = self.first_step + place + 1
                raise DivergenceError(f"the loss of step {step} is {loss}", step)
        return losses

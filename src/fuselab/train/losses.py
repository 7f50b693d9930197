"""The losses of the last steps, kept on the device; the host reads them once in a while."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fuselab.errors import DivergenceError


def way_out(step: int, rates: str) -> str:
    """Return what to do about a loss of ``step`` that is no finite number; ``rates`` names the
    options of the learning rate, which has no part in the first loss."""
    if step == 1:
        return "nothing was updated before it: look at the data, the loss and the model's outputs"
    return f"try a smaller {rates}"


class Losses:
    """Losses of up to ``capacity`` steps between two reads.

    Reading one synchronises with a GPU, which takes longer than a small step, so ``record`` only
    copies on the device. ``add_up`` replaces a tensor by its sum over all ranks of a run, which
    call ``read`` together.
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device,
        add_up: Callable[[Tensor], None] | None = None,
    ) -> None:
        # one more place, for whether the run shall stop
        self.kept = torch.zeros(capacity + 1, device=device)
        self.capacity, self.add_up = capacity, add_up
        self.first_step = self.count = 0
        self.stop = False

    @property
    def full(self) -> bool:
        return self.count == self.capacity

    def record(self, step: int, loss: Tensor) -> None:
        """Record the loss, 0-d, of step ``step``, which follows the last one."""
        if self.count == 0:
            self.first_step = step
        self.kept[self.count].copy_(loss.detach())
        self.count += 1

    def read(self, stop: bool = False) -> list[float]:
        """Return the losses since the last read, oldest first.

        ``stop`` says whether this process was asked to stop; the attribute then says whether any
        rank was. Raises DivergenceError, naming the step (from 1), if one is not finite.
        """
        if self.add_up is not None:
            self.kept[self.count] = float(stop)
            found = self.kept[: self.count + 1].clone()
            self.add_up(found)
            *losses, asked = found.tolist()
            stop = asked > 0
        else:
            losses = self.kept[: self.count].tolist()
        self.count, self.stop = 0, stop
        for place, loss in enumerate(losses):
            if not math.isfinite(loss):
                step = self.first_step + place + 1
                raise DivergenceError(f"the loss of step {step} is {loss}", step)
        return losses

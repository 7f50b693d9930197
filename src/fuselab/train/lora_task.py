"""Handwritten digits, split in two: a base learns 0 to 4, its adapters 5 to 9.

The 1,797 digits of 8 x 8 pixels that ship with scikit-learn (UCI's optical recognition of
handwritten digits, Alpaydin and Kaynak, 1998).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fuselab.errors import MissingDependencyError

PIXELS, CLASSES = 64, 10
FIRST_NEW = 5  # digits below it are the base's
_HELD_OUT = 5  # every fifth row


@dataclass(frozen=True)
class Rows:
    """Rows of digits: ``pixels`` (n, 64), float32 in [0, 1], and ``digits`` (n,), int64."""

    pixels: Tensor
    digits: Tensor

    def __len__(self) -> int:
        return len(self.digits)

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches without end: the rows in a new order each time, without an incomplete
        batch."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self), generator=generator).to(self.digits.device)
            for rows in order[: len(self) // size * size].split(size):
                yield self.pixels[rows], self.digits[rows]


@dataclass(frozen=True)
class Task:
    """Rows to train on and rows held out, of the base's digits and of the new ones."""

    base: Rows
    base_held_out: Rows
    new: Rows
    new_held_out: Rows


def digits(device: torch.device) -> Task:
    """Load the digits. Raises MissingDependencyError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError.of_extra(
            "the digits that train lora learns come with", "scikit-learn", "digits"
        ) from error
    data, target = load_digits(return_X_y=True)
    pixels = torch.as_tensor(data, dtype=torch.float32).div(16).to(device)
    values = torch.as_tensor(target, dtype=torch.int64).to(device)
    held_out = torch.arange(len(values), device=device) % _HELD_OUT == 0
    new = values >= FIRST_NEW

    def rows(chosen: Tensor) -> Rows:
        return Rows(pixels[chosen], values[chosen])

    return Task(
        rows(~new & ~held_out), rows(~new & held_out), rows(new & ~held_out), rows(new & held_out)
    )

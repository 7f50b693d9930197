"""Let two ways to compute a model drop the same elements, so that they can be compared."""

from __future__ import annotations

import itertools
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import Tensor

from fuselab.runtime.dropout import SeededDropout, seed_tensor

_SEED: ContextVar[Tensor | None] = ContextVar("seed", default=None)


class EqualDropout(SeededDropout):
    """Give all dropouts of this context the mask with number 0 of one seed, which depends on their
    shape and probability alone. The kernels of chains take this seed and draw none, and nothing
    else in the context finds PyTorch's generator advanced by a dropout."""

    def __init__(self) -> None:
        super().__init__(torch.tensor(0), itertools.repeat(0))

    def __enter__(self) -> Self:
        self.before = _SEED.set(self.seed)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _SEED.reset(self.before)


def seed_of_call(device: torch.device) -> Tensor:
    """Return the seed of a call of a chain's kernel: drawn, or that of ``EqualDropout``."""
    # Dynamo cannot read a context variable; nothing is compared within torch.compile.
    seed = None if torch.compiler.is_compiling() else _SEED.get()
    return seed_tensor(seed, device)

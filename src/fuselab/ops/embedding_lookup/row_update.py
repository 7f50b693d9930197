"""The change that a gradient makes to the rows of the tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fuselab.ops.embedding_lookup.validation import compute_dtype, rule
from fuselab.runtime.parameters import Scalar, f32, f64


@dataclass(frozen=True)
class RowUpdate:
    """A kind of change, ``gradient`` (stored), ``sgd`` or ``rowwise_adagrad``, and its numbers."""

    update: str
    dtype: torch.dtype  # of the tables
    out_of_range: str
    hash: str | None
    learning_rate: float | Tensor = 0.0
    eps: float | Tensor = 0.0

    @property
    def rule(self) -> str:
        return f"Rule::{rule(self.out_of_range, self.hash)}"

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of sums, which does not depend on the gradient's dtype."""
        return compute_dtype(self.dtype)

    def numbers(self) -> tuple[Tensor | Scalar | None, ...]:
        """Return the learning rate and eps, each as a pair: a device tensor or None, and a
        number."""
        number = f64 if self.dtype == torch.float64 else f32
        parameters: list[Tensor | Scalar | None] = []
        for value in (self.learning_rate, self.eps):
            if isinstance(value, Tensor):
                parameters += value.to(self.compute_dtype), number(0.0)
            else:
                parameters += None, number(value)
        return tuple(parameters)

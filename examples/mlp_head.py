"""A classifier's head in the usual spelling: a target to profile, explain, fuse and study.

fuselab study examples/mlp_head.py -o report-of-mlp-head
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """Maps features (batch, width) to probabilities (batch, classes)."""

    def __init__(self, width: int = 256, classes: int = 4096) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.project = nn.Linear(width, classes)
        self.shift = nn.Parameter(torch.zeros(classes))

    def forward(self, features: Tensor) -> Tensor:
        hidden = torch.relu(features + 0.5 * self.gate(features))
        logits = self.project(hidden) + self.shift
        scores = (logits - logits.amax(-1, keepdim=True)).exp()
        return scores / scores.sum(-1, keepdim=True)


def get_init_inputs() -> list[int]:
    """Return the arguments of ``Model``."""
    return []


def get_inputs() -> list[Tensor]:
    """Return one batch of features."""
    return [torch.randn(512, 256)]


def main() -> None:
    import fuselab

    model, inputs = Model().eval(), get_inputs()
    fused = fuselab.fuse(model, inputs, verbose=True)
    with torch.no_grad():
        torch.testing.assert_close(fused(*inputs), model(*inputs))


if __name__ == "__main__":
    main()

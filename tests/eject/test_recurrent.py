"""Cells of recurrent networks are products and kernels; a whole recurrence stays a call."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fuselab.ejection.eject import Ejected, ejected
from fuselab.runtime import process_choice

X, HIDDEN = torch.linspace(-1, 1, 32).reshape(4, 8), torch.linspace(-2, 1, 24).reshape(4, 6)


@pytest.mark.parametrize(
    ("name", "cell", "state"),
    [
        ("gates", nn.GRUCell(8, 6), HIDDEN),
        ("gates", nn.LSTMCell(8, 6, bias=False), (HIDDEN, HIDDEN * 2)),
        ("tanh", nn.RNNCell(8, 6), HIDDEN),
        ("relu", nn.RNNCell(8, 6, nonlinearity="relu"), HIDDEN),
    ],
    ids=["gru", "lstm", "rnn_tanh", "rnn_relu"],
)
def test_a_cell_is_two_products_and_pointwise_operations(
    name: str,
    cell: nn.Module,
    state: Tensor | tuple[Tensor, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ejected(cell, (X, state), {}, f"{type(cell).__name__.lower()}_{name}")
    calls = [one["name"] for one in made.facts["pytorch_calls"]]
    assert calls.count("linear") == 2 and not any("cell" in one for one in calls)
    own = _written(made, monkeypatch, tmp_path, cell)
    for found, wanted in zip(tree_leaves(own(X, state)), tree_leaves(cell(X, state)), strict=True):
        torch.testing.assert_close(found, wanted)


def _written(
    made: Ejected, monkeypatch: pytest.MonkeyPatch, folder: Path, module: nn.Module
) -> nn.Module:
    """Write the files of a package, and return its module, without kernels."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(process_choice, "_value", lambda: "reference")
    name = made.about["operator"].removeprefix("ejected::")
    for file, text in made.files.items():
        (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / file).write_text(text)
    return getattr(importlib.import_module(f"{name}.module"), type(module).__name__)(module)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.lstm(F.gelu(x * 2) + x)
        return F.silu(self.norm(output)) * 2


def test_a_recurrence_stays_a_call_between_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = Recurrent(), torch.randn(3, 5, 8)
    made = ejected(module, (x,), {}, "recurrent")
    assert [one["name"] for one in made.facts["pytorch_calls"]].count("lstm") == 1
    assert len(made.facts["operators"]) == 2
    own = _written(made, monkeypatch, tmp_path, module)
    torch.testing.assert_close(own(x), module(x))

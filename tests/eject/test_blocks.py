"""Code under ``torch.no_grad()`` and ``torch.autocast`` in functions that are cut at products."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselab.ejection.eject import eject

_GENERATOR = torch.Generator().manual_seed(4)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_GENERATOR)


class Targets(nn.Module):
    """Computes weights without gradients, and a norm with one, which could share a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.layer(x).softmax(-1) * 2 + 1
        return self.norm(x * target + 1).tanh()


@pytest.mark.parametrize("records", [True, False])
def test_a_part_without_gradients(
    records: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    label, model, x = f"targets_{records}".lower(), Targets(), drawn(5, 8)
    eject(model, x, out=tmp_path / label, name=label)
    made = importlib.import_module(f"{label}.module").Targets(model)
    x = drawn(3, 8).requires_grad_()
    with torch.set_grad_enabled(records):
        found, expected = made(x), model(x)
        assert torch.is_grad_enabled() is records
    torch.testing.assert_close(found, expected)
    assert found.requires_grad is expected.requires_grad is records
    if records:
        weights = [x, *model.norm.parameters()]
        pairs = zip(
            torch.autograd.grad(found.square().sum(), weights),
            torch.autograd.grad(expected.square().sum(), weights),
            strict=True,
        )
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs)
    reference = importlib.import_module(f"{label}.reference")
    text = Path(reference.__file__ or "").read_text("utf-8")
    assert "with torch.no_grad():\n        linear = " in text
    parameters = [model.layer.weight, model.layer.bias, *model.norm.parameters()]
    torch.testing.assert_close(reference.reference(x, *parameters), expected)


def attended(x: Tensor, weight: Tensor) -> Tensor:
    hidden = (x + 1).relu() * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = hidden @ weight
    with torch.autocast("cpu", enabled=False):
        return F.softmax(scores.float() * 0.5, -1) @ weight


def test_products_in_an_autocast_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    eject(attended, drawn(4, 8), drawn(8, 8), out=tmp_path / "attended")
    text = (tmp_path / "attended" / "composed.py").read_text("utf-8")
    assert 'with torch.autocast("cpu", dtype=torch.bfloat16):\n        scores = ' in text
    args = drawn(3, 8), drawn(8, 8)
    made = importlib.import_module("attended").attended
    torch.testing.assert_close(made(*args), attended(*args), rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(*args).dtype == attended(*args).dtype == torch.float32

"""The forward of an ejected module takes the arguments of the module's own forward."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuselab.ejection.eject import eject
from fuselab.errors import EjectError

X = torch.linspace(-2, 2, 24).reshape(3, 8)


class Block(nn.Module):
    """A layer with a mask, a cache that is not used, and options, as transformers' have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(
        self, x: Tensor, cache: None = None, mask: Tensor | None = None, mode: str = "scaled"
    ) -> tuple[Tensor, None]:
        x = self.layer(self.norm(x).relu() * 2)
        x = x.sigmoid() * x if mode == "scaled" else x
        return (x if mask is None else x * mask.unsqueeze(-1)), cache


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, *parts: Tensor, scale: float = 1.0, **others: Tensor) -> Tensor:
        whole = (parts[0] + parts[1].tanh()) * self.weight * scale
        return whole * others["gate"].sigmoid()


class Configured(Block):
    """A layer whose options are a dict and an object, as those of diffusion models are."""

    def forward(  # type: ignore[override]
        self, x: Tensor, *, extra: dict[str, float] | None = None, kind: object = None
    ) -> Tensor:
        scale = 1.0 if extra is None else extra["scale"]
        return torch.sigmoid(self.norm(x) * scale) + x


def test_options_in_dicts_and_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    model, given = Configured(), {"extra": {"scale": 2.0}, "kind": nn.GELU}
    eject(model, torch.ones(4, 8), out=tmp_path / "configured", name="configured", keywords=given)
    made = importlib.import_module("configured.module").Configured(model)
    expected = model(X, extra={"scale": 2.0})
    for found in (made(X), made(X, **given), made(X, kind=nn.GELU, extra={"scale": 2.0})):
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"extra must be \{'scale': 2.0\}, as the module"):
        made(X, extra={"scale": 3.0})
    with pytest.raises(ValueError, match="kind must be GELU, as the module was ejected"):
        made(X, kind=nn.ReLU)


def test_a_call_with_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    model, mask = Block(), torch.tensor([1.0, 0.0, 1.0])
    given = {"mask": torch.ones(4), "mode": "scaled"}
    eject(model, torch.ones(4, 8), out=tmp_path / "optioned", name="optioned", keywords=given)
    made = importlib.import_module("optioned.module").Block(model)
    expected, _ = model(X, mask=mask)
    for found in (
        made(X, None, mask),
        made(X, mask=mask),
        made(x=X, cache=None, mask=mask, mode="scaled"),
    ):
        assert found[1] is None
        torch.testing.assert_close(found[0], expected)
    with pytest.raises(ValueError, match="mode must be 'scaled', as the module was ejected"):
        made(X, mask=mask, mode="plain")


def test_a_call_with_any_number_of_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    model, ones = Several(), torch.ones(4, 8)
    given = {"scale": 2.0, "gate": torch.ones(8)}
    eject(model, ones, ones, out=tmp_path / "of_several", name="of_several", keywords=given)
    made = importlib.import_module("of_several.module").Several(model)
    gate = torch.linspace(-1, 1, 8)
    found = made(X, X.cos(), scale=2.0, gate=gate)
    torch.testing.assert_close(found, model(X, X.cos(), scale=2.0, gate=gate))


class Counting(nn.Module):
    """Counts its calls; ``moves`` says whether it also makes a new tensor its buffer."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.moves = moves
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.moves:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return (x - self.mean).tanh() * 2 + self.count


@pytest.mark.parametrize("moves", [False, True])
def test_a_module_is_as_it_was_after_it_was_ejected(
    moves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffers once were what stood in for tensors, 1e15, refused or not."""
    monkeypatch.syspath_prepend(str(tmp_path))
    model = Counting(moves)
    before = dict(model.named_buffers())
    if moves:
        with pytest.raises(EjectError, match=r"attribute.*\.py:\d+: self\.mean = 0\.9 \*.*copy_"):
            eject(model, torch.ones(4, 8), out=tmp_path / "counting", name="counting")
    else:
        eject(model, torch.ones(4, 8), out=tmp_path / "counting", name="counting")
    after = dict(model.named_buffers())
    assert all(after[name] is before[name] and not after[name].any() for name in before)
    if not moves:
        made = importlib.import_module("counting.module").Counting(Counting(moves))
        for _ in range(2):
            torch.testing.assert_close(made(X), model(X))
        assert made.count == model.count == 2

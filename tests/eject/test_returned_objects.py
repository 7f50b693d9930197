"""Functions that return dataclasses, outputs as Transformers has them, and OrderedDicts."""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselab.ejection import returned
from fuselab.ejection.eject import eject
from fuselab.errors import EjectError

X = torch.linspace(-2, 2, 24).reshape(3, 8)


@dataclass
class Result:
    hidden: Tensor
    gate: Tensor | None = None
    count: int = 3


class Output(OrderedDict[str, Any]):
    """A dict of its fields, as ``transformers.utils.ModelOutput``."""

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if value is not None:
                self[one.name] = value


@dataclass
class EncoderOutput(Output):
    hidden: Tensor | None = None
    pooled: Tensor | None = None
    others: tuple[Tensor, ...] | None = None


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> EncoderOutput:
        hidden = self.norm(F.gelu(self.layer(x)) + x)
        return EncoderOutput(hidden=hidden, pooled=hidden.mean(0).tanh() * 2)


def gated(x):
    return Result(hidden=(x + 1).relu() * 2, gate=x.sigmoid() * x, count=5)


def ordered(x):
    found = OrderedDict()
    found["out"] = (x * 2).tanh()
    found["aux"] = x.exp() + 1
    return found


def test_a_dataclass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    eject(gated, torch.ones(4, 6), out=tmp_path / "gated_result", name="gated_result")
    found, expected = importlib.import_module("gated_result").gated_result(X), gated(X)
    assert (type(found).__name__, found.count) == ("Result", 5)
    torch.testing.assert_close(found.hidden, expected.hidden)
    torch.testing.assert_close(found.gate, expected.gate)


def test_an_ordered_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    eject(ordered, torch.ones(4, 6), out=tmp_path / "in_order", name="in_order")
    found, expected = importlib.import_module("in_order").in_order(X), ordered(X)
    assert type(found) is OrderedDict and list(found) == ["out", "aux"]
    for key in found:
        torch.testing.assert_close(found[key], expected[key])


def test_an_output_whose_class_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    model = Encoder()
    with pytest.raises(EjectError, match="EncoderOutput, whose base Output no installed package"):
        eject(model, torch.ones(4, 8), out=tmp_path / "refused", name="refused")
    monkeypatch.setattr(returned, "is_installed", lambda module: module in sys.modules)
    eject(model, torch.ones(4, 8), out=tmp_path / "encoder_output", name="encoder_output")
    made = importlib.import_module("encoder_output.module").Encoder(model)
    reference = importlib.import_module("encoder_output.reference").reference
    parameters = [model.layer.weight, model.layer.bias, model.norm.weight, model.norm.bias]
    expected = model(X)
    for found in (made(X), reference(X, *parameters)):
        assert type(found) is EncoderOutput and list(found) == ["hidden", "pooled"]
        torch.testing.assert_close(found.hidden, expected.hidden)
        torch.testing.assert_close(found["pooled"], expected.pooled)


def with_sizes(x, y):
    return {"sum": (x * 2).tanh() + 1, "sizes": [x.shape, x[0].size(), y.shape[0]]}, y.t().shape


def test_the_sizes_of_a_call_are_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    eject(with_sizes, X, torch.ones(5, 2), out=tmp_path / "of_sizes", name="of_sizes")
    package = importlib.import_module("of_sizes").of_sizes
    x, y = torch.linspace(0, 1, 12).reshape(2, 6), torch.ones(7, 3)
    (found, last), (wanted, last_wanted) = package(x, y), with_sizes(x, y)
    assert found["sizes"] == wanted["sizes"] == [torch.Size([2, 6]), torch.Size([6]), 7]
    assert last == last_wanted
    assert [type(one) for one in (*found["sizes"], last)] == [
        torch.Size,
        torch.Size,
        int,
        torch.Size,
    ]
    torch.testing.assert_close(found["sum"], wanted["sum"])


def test_sizes_of_no_known_argument_are_refused(tmp_path: Path) -> None:
    def of_another(x):
        return (x * 2).tanh() + 1, torch.Size([11, 13])

    with pytest.raises(EjectError, match=r"the sizes \(11, 13\), and it is not known of which"):
        eject(of_another, X, out=tmp_path / "other")

"""Forwards that branch on what their tensors are, make tensors, or are faster than their trace."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselab import ops
from fuselab.fusion.facts import NotTraceableError
from fuselab.fusion.fuse import fuse_with_report
from fuselab.fusion.result import Decision
from fuselab.fusion.trace import Call, trace_forward
from fuselab.measure.verdict import Outcome, Verdict

fuse_module = importlib.import_module("fuselab.fusion.fuse")  # fuselab.fusion.fuse is a function
OPS = [ops.contract(name) for name in ("linear_activation", "bias_activation")]


class Mixed(nn.Module):
    """MLP-Mixer: a layer over the tokens begins with a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.tokens(x.transpose(1, 2)).transpose(1, 2)


def test_a_layer_of_a_transposed_input() -> None:
    model, x = Mixed(), torch.randn(3, 6, 4)
    result = fuse_with_report(model, x, ops=OPS, budget_s=0.01)
    assert "bias_activation" in [one.op.short_name for one in result.replacements]
    torch.testing.assert_close(result.model(x), model(x))


class Branching(nn.Module):
    """Decides by rank, size, dtype and device of its arguments, and of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self.weight.shape[0], "no"
        if x.dim() == 2 and not x.is_floating_point():
            x = x.float()
        if x.size(0) % 2 == 0 and x.device.type == self.weight.device.type:
            return (x + self.weight).relu()
        return x * self.weight


def holds(module: nn.Module, example: Tensor, *others: Tensor) -> list[bool]:
    traced = trace_forward("", module, Call((example,), {}))
    graph = torch.fx.GraphModule(module, traced.graph)
    torch.testing.assert_close(graph(example), module(example))
    return [all(one.holds(module, [other]) for one in traced.conditions) for other in others]


def test_a_branch_on_what_a_tensor_is_holds_for_calls_that_take_it() -> None:
    even, odd = torch.randn(2, 4), torch.randn(3, 4)
    others = (torch.randn(6, 4), odd, torch.randn(2, 3, 4), torch.ones(2, 4, dtype=torch.int64))
    assert holds(Branching(), even, *others) == [True, False, False, False]
    assert holds(Branching(), odd, torch.randn(5, 4), even) == [True, False]


class OfValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if x.sum() > 0 else x


def test_a_branch_on_values_cannot_be_traced() -> None:
    with pytest.raises(NotTraceableError, match="decides by values of a tensor"):
        trace_forward("", OfValues(), Call((torch.ones(2),), {}))


class Making(nn.Module):
    """Makes tensors of the size of another, and of a fixed one."""

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(x.size(0), 1, device=x.device)
        steps = torch.arange(x.shape[1], device=x.device) / 2
        return x + zeros + steps + torch.ones(3, device="cpu").sum()


def test_tensors_are_made_in_every_call() -> None:
    module = Making()
    traced = trace_forward("", module, Call((torch.randn(2, 5),), {}))
    graph = torch.fx.GraphModule(module, traced.graph)
    for shape in ((2, 5), (7, 3)):
        x = torch.randn(shape)
        torch.testing.assert_close(graph(x), module(x))
    assert not [node for node in traced.graph.nodes if node.op == "get_attr"]
    assert torch.zeros.__module__ != "fuselab.fusion.trace"


@pytest.mark.parametrize("first", [False, True])
def test_the_transformer_layers_of_pytorch(first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=first)
    x = torch.randn(2, 5, 8)
    assert holds(layer, x, torch.randn(3, 5, 8), torch.randn(5, 8)) == [True, False]
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    traced = trace_forward("", attention, Call((x, x, x), {}))
    graph = torch.fx.GraphModule(attention, traced.graph)
    torch.testing.assert_close(graph(x, x, x)[0], attention(x, x, x)[0])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Branching(), Branching()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


@pytest.mark.parametrize(
    ("slower", "kept"),
    [
        (set(), ["one", "two"]),
        ({"whole"}, []),
        ({"whole", "one"}, ["two"]),
        ({"whole", "one", "rest"}, []),
    ],
)
def test_what_makes_the_whole_slower_is_not_kept(
    slower: set[str], kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains are always faster; the whole model, or a module by itself, may be slower."""
    model, x = Two().eval(), torch.randn(4, 4)
    measurements = iter(["whole", "one", "two", "rest", "nothing"])

    def faster(*args: Any, **more: Any) -> tuple[float, float, Verdict]:
        return 2.0, 1.0, Verdict(Outcome.FASTER, 2.0, 1.9, 2.1, 99)

    def measured(*args: Any, **more: Any) -> tuple[float, float, Verdict]:
        outcome = Outcome.SLOWER if next(measurements) in slower else Outcome.SAME
        return 1.0, 1.0, Verdict(outcome, 1.0, 0.9, 1.1, 99)

    monkeypatch.setattr(fuse_module._Fusion, "_measure", faster)
    monkeypatch.setattr(fuse_module, "measure", measured)
    monkeypatch.setattr(fuse_module, "choose", lambda op, arguments: "cpp")
    result = fuse_with_report(model, x, ops=OPS[1:], budget_s=0.01)
    assert [one.module for one in result.kept] == kept
    dropped = [one for one in result.replacements if one.decision is Decision.NOT_FASTER]
    assert len(dropped) == 2 - len(result.kept)
    assert all("the whole model was measured SLOWER" in one.reason for one in dropped)
    torch.testing.assert_close(result.model(x), model(x))


class InFloat32(nn.Module):
    """fairseq's Fp32LayerNorm: it does not run in float64, where its weights are float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x).float()).relu() * 2 + x


@pytest.mark.parametrize("training", [False, True])
def test_a_chain_that_does_not_run_in_float64(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared in float32, where fuse once ended with PyTorch's RuntimeError."""
    verdict = Verdict(Outcome.FASTER, 2.0, 1.9, 2.1, 99)
    monkeypatch.setattr(fuse_module, "measure", lambda *args, **more: (2.0, 1.0, verdict))
    model, x = InFloat32().train(training), torch.randn(600, 16)
    result = fuse_with_report(model, x)
    (kept,) = result.kept
    assert "layer_norm" in kept.chain
    torch.testing.assert_close(result.model(x), model(x), rtol=1e-4, atol=1e-5)
    region = [torch.ones(3), torch.ones(3) * 1.5, None]
    judge = importlib.import_module("fuselab.fusion.judge")
    assert judge._far(0, region[0], region[1]) == "output 0 is another"
    assert judge._far(0, region[0], None) == "output 0 is another"
    assert judge._far(0, region[0], region[0] + 1e-6) is None

"""Tensors are found and replaced in lists, dicts, dataclasses, and subclasses of these."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselab import structures
from fuselab.fusion import judge
from fuselab.measure.steady_step import step

Pair = namedtuple("Pair", ["a", "b"])


@dataclass(frozen=True)
class Output:
    logits: Any
    hidden: Any
    count: int = 3


class Batch(dict[str, Any]):
    """A dict of a type of its own."""


ONE, TWO = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize(
    "value",
    [
        [ONE, (TWO, None)],
        Pair(ONE, {"b": TWO}),
        Output(ONE, [TWO]),
        [Output(ONE, Output(TWO, None))],
        Batch(a=ONE, b=TWO),
        {"inner": Batch(a=ONE, b=(TWO, "text"))},
        OrderedDict(a=ONE, b=TWO),
        UserDict({"a": ONE, "b": TWO}),
        MappingProxyType({"a": ONE, "b": TWO}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_tensor_is_found_and_can_be_replaced(value: Any) -> None:
    assert [id(tensor) for tensor in structures.tensors(value)] == [id(ONE), id(TWO)]
    others = len(structures.leaves(value)) - 2
    doubled = structures.mapped(value, lambda one: one + 1 if isinstance(one, Tensor) else one)
    assert [tensor.tolist() for tensor in structures.tensors(doubled)] == [[2, 2], [1, 1, 1]]
    assert len(structures.leaves(doubled)) - 2 == others
    if not isinstance(value, MappingProxyType):  # it cannot be changed, and becomes a dict
        assert type(doubled) is type(value)
    assert structures.tensors(value)[0] is ONE


def test_a_step_of_a_function_that_returns_a_dataclass_runs_its_backward() -> None:
    seen = []
    x = torch.ones(4, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(gradient.tolist()))
    step(lambda one: Output(one * 2, None), (x,), {}, [], backward=True)()
    assert seen == [[2.0] * 4]


def test_the_proof_of_a_fused_model_compares_what_a_dataclass_holds() -> None:
    class Returns(torch.nn.Module):
        def __init__(self, more: float) -> None:
            super().__init__()
            self.more = more

        def forward(self, x: Tensor) -> Output:
            return Output(x.exp() + self.more, x)

    args = (torch.ones(2, 3),)
    assert judge.prove_model(Returns(0.0), Returns(0.0), args, {}) is None
    assert "is off by" in str(judge.prove_model(Returns(0.0), Returns(1.0), args, {}))
    assert judge.near_outputs(Returns(0.0), Returns(1.0), args, {}) == "output 0 is another"


def test_every_leaf_has_the_name_of_its_place() -> None:
    value = {"ids": [1, (2, 3)], "of": Output(4, [Pair(5, None)])}
    assert structures.named(value, "batch") == [
        ("batch['ids'][0]", 1),
        ("batch['ids'][1][0]", 2),
        ("batch['ids'][1][1]", 3),
        ("batch['of'].logits", 4),
        ("batch['of'].hidden[0][0]", 5),
        ("batch['of'].hidden[0][1]", None),
        ("batch['of'].count", 3),
    ]
    assert structures.named(7, "x") == [("x", 7)]

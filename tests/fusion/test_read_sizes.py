"""Forwards whose Python code reads sizes, dtypes and classes of traced values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from fuselab.fusion.chains import ChainFinder
from fuselab.fusion.expression import Expression
from fuselab.fusion.facts import NotTraceableError
from fuselab.fusion.judge import values_of
from fuselab.fusion.trace import Call, Traced, trace_forward


class Runs(nn.Module):
    """A module whose forward is ``function`` of itself and the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def traced(function: Callable[..., Any], *inputs: Any) -> Traced:
    """Trace a forward in evaluation, and compare the trace with it."""
    module = Runs(function).eval()
    found = trace_forward("", module, Call(inputs, {}))
    with torch.no_grad():
        actual = torch.fx.GraphModule(module, found.graph)(*found.tensors)
        torch.testing.assert_close(actual, module(*inputs))
    return found


def holds(found: Traced, *tensors: Tensor) -> bool:
    return all(one.holds(found.module, tensors) for one in found.conditions)


def rows(module: Runs, x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[1])
    for row in x:
        total = torch.tanh(total + row)
    return total * len(x)


def steps(module: Runs, x: Tensor) -> Tensor:
    return torch.stack([x[:, step] * step for step in range(x.size(1))]).sum(0)


def rounded(module: Runs, x: Tensor) -> Tensor:
    *lead, width = x.shape
    assert int(math.sqrt(x.shape[0])) == 1
    return x.reshape(*lead, 2, width // 2) / float(x.shape[-1]) + round(x.shape[0] * 0.7)


@pytest.mark.parametrize(
    ("function", "other", "holds_too"),
    [
        (rows, (3, 5), True),
        (rows, (2, 4), False),
        (steps, (7, 4), True),
        (steps, (3, 5), False),
        (rounded, (3, 8), False),
        (rounded, (2, 3, 4), False),
    ],
)
def test_sizes_are_read_as_numbers(
    function: Callable[..., Any], other: tuple[int, ...], holds_too: bool
) -> None:
    found = traced(function, torch.randn(3, 4))
    assert holds(found, torch.randn(3, 4))
    assert holds(found, torch.randn(other)) is holds_too


def of_results(module: Runs, x: Tensor) -> Tensor:
    hidden = module.layer(x)
    if hidden.size() != (x.shape[0], 6):
        raise ValueError
    largest = torch.finfo(hidden.dtype).max
    return torch.stack([part * 2 for part in hidden.chunk(3, dim=-1)]) + largest


def test_sizes_and_dtypes_of_results_hold_for_inputs_of_the_same_kind() -> None:
    found = traced(of_results, torch.randn(3, 4))
    assert holds(found, torch.randn(3, 4))
    assert not holds(found, torch.randn(2, 4))
    assert not holds(found, torch.randn(3, 4, dtype=torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        assert not holds(found, torch.randn(3, 4))


def chosen_rows(module: Runs, x: Tensor) -> Tensor:
    found = x[x[:, 0] > 0]
    return found * len(found)


def by_values(module: Runs, x: Tensor) -> Tensor:
    return x * int(x.sum())


def long_loop(module: Runs, x: Tensor) -> Tensor:
    total = x[0]
    for place in range(x.shape[0]):
        total = (total + x[place]).tanh()
    return total


def with_its_backward(module: Runs, x: Tensor) -> Tensor:
    return Doubled.apply(x) + 1  # type: ignore[no-untyped-call, no-any-return]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        return grad * 2


def checkpointed(module: Runs, x: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(module.layer, x, use_reentrant=False)


def without_autocast(module: Runs, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return module.layer(x.float()).exp()


@pytest.mark.parametrize(
    ("function", "count", "reason"),
    [
        (chosen_rows, 3, "whose size is not known"),
        (by_values, 3, "decides by values"),
        (long_loop, 400, "loops over a size"),
        (with_its_backward, 3, "Doubled, which has a backward of its own"),
        (checkpointed, 3, "computes a part again in the backward"),
        (without_autocast, 3, "torch.autocast on or off for a part"),
    ],
)
def test_what_no_trace_reproduces_is_said(
    function: Callable[..., Any], count: int, reason: str
) -> None:
    with pytest.raises(NotTraceableError, match=reason):
        trace_forward("", Runs(function), Call((torch.randn(count, 4),), {}))
    assert isinstance(torch.zeros(1), Tensor)
    assert isinstance.__module__ == "builtins" and "fuselab" not in repr(isinstance)


def without_gradients(module: Runs, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = module.layer(x)
    return target + x.sum()


def test_a_part_without_gradients_is_left_in_training() -> None:
    call = Call((torch.randn(3, 4),), {})
    with pytest.raises(NotTraceableError, match="turns gradients off"):
        trace_forward("", Runs(without_gradients), call)
    assert not traced(without_gradients, *call.args).conditions


def by_grad_mode(module: Runs, x: Tensor) -> Tensor:
    return x.exp() if torch.is_grad_enabled() else x.sin()


def test_a_branch_on_the_grad_mode_holds_in_this_mode() -> None:
    found = traced(by_grad_mode, torch.randn(3, 4))
    assert not holds(found, torch.randn(3, 4))
    with torch.no_grad():
        assert holds(found, torch.randn(3, 4))


def by_class(module: Runs, x: Tensor, time: Tensor) -> Tensor:
    if not torch.is_tensor(time):
        time = torch.tensor([time])
    parts = module.layer(x).split(3, dim=-1)
    return parts[0] * time if isinstance(parts, tuple) else x


def test_a_traced_value_has_the_class_that_it_stands_for() -> None:
    found = traced(by_class, torch.randn(3, 4), torch.tensor(2.0, requires_grad=True))
    graph = torch.fx.GraphModule(found.module, found.graph)
    time = torch.tensor(2.0, requires_grad=True)
    graph(torch.randn(3, 4), time).sum().backward()
    assert time.grad is not None


def assigned(module: Runs, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    before = y.exp() + 1
    y[mask] = 0.0
    behind = y.exp() + 1
    return before, behind, y.sum(0)


def test_an_assignment_to_elements_stays_between_what_reads_before_and_behind() -> None:
    found = traced(assigned, torch.randn(3, 4), torch.tensor([True, False, True]))
    finder = ChainFinder(found, values_of(found.graph, found.module, found.tensors), ())
    (assignment,) = [node for node in finder.calls if finder.name_of(node) == "setitem"]
    readers = [node for node in finder.calls if finder.name_of(node) == "exp"]
    assert assignment in finder.before[readers[1]] or readers[1] in finder.refused
    assert readers[0] in finder.before[assignment]
    assert not any(assignment in chain.nodes for chain in finder.chains())


def scaled_by_a_size(module: Runs, x: Tensor, other: Tensor) -> Tensor:
    return (x.tanh() + 1).exp() * other.shape[0]


def test_a_size_of_a_tensor_that_a_chain_does_not_read_cuts_the_chain() -> None:
    found = traced(scaled_by_a_size, torch.randn(3, 4), torch.randn(5))
    finder = ChainFinder(found, values_of(found.graph, found.module, found.tensors), ())
    assert [chain.operations for chain in finder.chains()] == [("tanh", "add", "exp")]


def sliced_by_a_size(module: Runs, x: Tensor, past: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    keys = torch.cat([past, x])
    return keys, (mask[: keys.size(0)] == 0).logical_not()


def test_a_slice_by_a_size_of_the_chain_is_in_it() -> None:
    inputs = torch.randn(3, 4), torch.randn(2, 4), torch.ones(9, 4)
    found = traced(sliced_by_a_size, *inputs)
    finder = ChainFinder(found, values_of(found.graph, found.module, found.tensors), ())
    for chain in finder.chains():
        held = set(chain.nodes)
        outside = [node for node in finder.calls if node not in held]
        # A call between two parts of a chain would have to run before and behind it.
        assert not [
            node
            for node in outside
            if held & finder.before[node] and any(node in finder.before[one] for one in held)
        ]


def test_a_product_with_a_slice_of_a_weight() -> None:
    found = traced(lambda module, x: x @ module.layer.weight[:4], torch.randn(3, 4))
    assert [one.name for one in Expression(found.graph, found.module).applications()]


class Noisy(nn.Module):
    """Changes a buffer that its output shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return x + self.get_buffer("count").add_(1)


def test_a_child_that_changes_a_buffer_does_not_keep_its_parent_from_being_traced() -> None:
    parent = nn.Sequential(nn.ReLU(), Noisy(), nn.Tanh())
    trace_forward("", parent, Call((torch.randn(3),), {}))


def test_a_parametrized_layer_is_traced() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    trace_forward("", layer, Call((torch.randn(3, 4),), {}))


def test_nested_tensors_are_left() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    with pytest.raises(NotTraceableError, match="nested"):
        trace_forward("", nn.Sequential(nn.Linear(4, 4)), Call((nested,), {}))


def test_the_encoder_of_pytorch_is_traced_as_root() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 8)
    found = trace_forward("", encoder, Call((x,), {}))
    torch.testing.assert_close(torch.fx.GraphModule(encoder, found.graph)(x), encoder(x))
    assert holds(found, torch.randn(3, 7, 8))


def by_rank(module: Runs, x: Tensor) -> Tensor:
    return x.tanh() if x.dim() == 2 and x.shape[1] == 4 else x.sin()


def test_a_fact_that_another_rank_does_not_have_does_not_hold() -> None:
    found = traced(by_rank, torch.randn(3, 4))
    assert [holds(found, torch.randn(size)) for size in ((7, 4), (3, 5), (4,))] == [
        True,
        False,
        False,
    ]


def with_an_unused_value(module: Runs, x: Tensor) -> Tensor:
    unused = x.exp().add(1).sin()
    assert unused.dim() == 2
    return x.tanh().mul(2)


def test_values_that_nothing_reads_are_no_chain() -> None:
    found = traced(with_an_unused_value, torch.randn(3, 4))
    finder = ChainFinder(found, values_of(found.graph, found.module, found.tensors), ())
    assert [chain.operations for chain in finder.chains()] == [("tanh", "mul")]

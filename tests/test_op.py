"""The contract's defaults: costs, cases, and contiguous tensors for the implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fuselab
from fuselab.errors import ContractError
from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation


def reference(input: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    return input * weight * scale


def gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, weight: Tensor, scale: float
) -> tuple[Tensor | None, Tensor | None]:
    grad_weight = (grad_output * input * scale).reshape(-1, weight.numel()).sum(0)
    return (
        grad_output * weight * scale if needs[0] else None,
        grad_weight if needs[1] else None,
    )


def make_op(name: str, **changes: Any) -> FusedOp:
    fields: dict[str, Any] = {
        "name": f"contracttest::{name}",
        "reference": reference,
        "implementations": {"cpp": Implementation("cpu", reference, gradient)},
        "cases": [Case.normal([(2, 3), (3,)])],
        "gradient": Gradient(lambda output, *args: args, gradient),
    }
    return FusedOp(**(fields | changes))


ROWS, WEIGHT = torch.ones(4, 3), torch.ones(3)


def test_without_a_cost_every_tensor_is_read_or_written_once() -> None:
    op = make_op("cost")
    assert op.cost(ROWS, WEIGHT, 1.0) == Cost(4 * (12 + 3), 4 * 12, 12)
    assert op.cost(ROWS[:1].expand(4, 3), WEIGHT, 1.0).bytes_read == 4 * (3 + 3)
    halves = (ROWS.half(), WEIGHT.half(), 1.0)
    assert op.cost(*halves) == Cost(2 * (12 + 3), 2 * 12, 12)
    assert op.cost(ROWS.double(), WEIGHT.double(), 1.0).unit == "fp64"


def test_without_a_cost_of_the_backward_what_is_saved_is_read() -> None:
    op = make_op("cost_backward")
    assert op.cost_backward is not None
    # Read: the upstream gradient, the input, the weight. Written: the gradients of the last two.
    assert op.cost_backward(ROWS, WEIGHT, 1.0) == Cost(4 * (12 + 12 + 3), 4 * (12 + 3), 15)
    output_alone = Gradient(lambda output, *args: (output,), gradient)
    alone = make_op("cost_saved", gradient=output_alone).cost_backward
    assert alone is not None
    assert alone(ROWS, WEIGHT, 1.0) == Cost(4 * (12 + 12), 4 * (12 + 3), 15)
    assert make_op("cost_none", gradient=None).cost_backward is None


def test_a_default_cost_is_that_of_the_operator_it_is_asked_of() -> None:
    """What ``dataclasses.replace`` copies must not go by the reference that was there before."""

    def sum_of_rows(input: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
        return (input * weight * scale).sum(-1)

    op = replace(make_op("replaced"), reference=sum_of_rows)
    assert op.cost(ROWS, WEIGHT, 1.0).bytes_written == 4 * 4
    assert replace(op, gradient=None).cost_backward is None
    declared = Cost(1, 2, 3)
    assert replace(op, cost=lambda *args: declared).cost(ROWS, WEIGHT, 1.0) is declared


def test_a_declared_cost_of_the_forward_says_nothing_of_the_backward() -> None:
    assert make_op("forward_alone", cost=lambda *args: Cost(1, 2, 3)).cost_backward is None


def test_a_reference_that_reads_values_needs_a_declared_cost() -> None:
    def reads(input: Tensor) -> Tensor:
        return input * input.sum().item()

    op = make_op("reads", reference=reads, gradient=None)
    with pytest.raises(ContractError, match=r"give FusedOp\.cost"):
        op.cost(ROWS)


def test_normal_cases_have_the_shapes_the_dtype_and_the_generator() -> None:
    case = Case.normal([(4, 3), (3,), ()], "bench", "sweep")
    assert case.name == "4x3_and_3_and_0d" and case.tags == {"bench", "sweep"}
    first, again, other = (
        case.make(torch.device("cpu"), torch.float16, torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert [tensor.shape for tensor in first.args] == [(4, 3), (3,), ()]
    assert all(tensor.dtype == torch.float16 for tensor in first.args)
    assert all(torch.equal(*pair) for pair in zip(first.args, again.args, strict=True))
    assert not torch.equal(first.args[0], other.args[0])


@pytest.mark.parametrize("name", ["try::softmax", "mine::lambda"])
def test_a_name_is_no_keyword(name: str) -> None:
    word = "try" if name.startswith("try") else "lambda"
    with pytest.raises(ContractError, match=f"'{word}' is a keyword of Python"):
        replace(make_op("keyword"), name=name)


def test_an_operator_needs_a_case() -> None:
    with pytest.raises(ContractError, match="cases is empty"):
        make_op("caseless", cases=())


STRIDED = {
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "expanded": torch.arange(3.0).expand(4, 3),
    "every other": torch.arange(24.0).view(4, 6)[:, ::2],
    "contiguous": torch.arange(12.0).view(4, 3),
}


@pytest.mark.parametrize("layout", STRIDED)
def test_contiguous_implementations_see_contiguous_tensors_alone(layout: str) -> None:
    seen: list[bool] = []

    def forward(*args: Any) -> Tensor:
        seen.extend(arg.is_contiguous() for arg in args if isinstance(arg, Tensor))
        return reference(*args)

    def backward(needs: Sequence[bool], *args: Any) -> tuple[Tensor | None, Tensor | None]:
        seen.extend(arg.is_contiguous() for arg in args if isinstance(arg, Tensor))
        return gradient(needs, *args)

    op = make_op(
        f"dense_{layout.replace(' ', '_')}",
        implementations={"cpp": Implementation("cpu", forward, backward)},
        contiguous=True,
    )
    function = fuselab.operator(op)
    input = STRIDED[layout]
    leaf, weight = input.detach().requires_grad_(), torch.arange(6.0)[::2].requires_grad_()
    output = function(leaf, weight, 2.0, implementation="cpp")
    upstream = torch.ones(3, 4).t()
    found = torch.autograd.grad(output, (leaf, weight), upstream)
    assert len(seen) == 5 and all(seen)
    assert torch.equal(output, reference(input, weight, 2.0))
    expected = torch.autograd.grad(reference(leaf, weight, 2.0), (leaf, weight), upstream)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_sequences_arrive_contiguous_too() -> None:
    op = make_op("sequences", contiguous=True)
    (first, rest), flag = op.arranged([(ROWS.t(), 3), True])
    assert first.is_contiguous() and torch.equal(first, ROWS.t()) and (rest, flag) == (3, True)
    kept = (ROWS.t(), 1.0)
    assert make_op("strided").arranged(kept)[0] is kept[0]


def test_raw_results_of_a_contiguous_operator_are_contiguous_whatever_runs() -> None:
    """torch.compile asserts the strides of the fake on what comes back."""
    fuselab.operator(make_op("raw", contiguous=True))
    forward, backward = torch.ops.contracttest.raw, torch.ops.contracttest.raw_backward
    transposed = torch.randn(3, 4).t()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(transposed)
        assert not fake.is_contiguous()
        assert forward(fake, mode.from_tensor(WEIGHT), 1.0, "auto").is_contiguous()
    for name in ("reference", "cpp"):
        input = torch.randn(3, 4).t()
        assert not input.is_contiguous() and not reference(input, WEIGHT).is_contiguous()
        output = forward(input, WEIGHT, 1.0, name)
        assert output.is_contiguous()
        assert torch.equal(output, reference(input, WEIGHT))
        grads = backward([True, True], input, input, WEIGHT, 1.0, name)
        assert all(grad.is_contiguous() for grad in grads)


def test_a_compiled_contiguous_operator_takes_any_strides() -> None:
    function = fuselab.operator(make_op("compiled", contiguous=True))
    compiled = torch.compile(lambda input: function(input, WEIGHT) + 1, backend="aot_eager")
    input = torch.randn(3, 4).t()
    assert torch.equal(compiled(input), reference(input, WEIGHT) + 1)


def test_an_operator_that_writes_over_arguments_cannot_ask_for_copies() -> None:
    with pytest.raises(ContractError, match="could not write over"):
        make_op("over_", mutates=("input",), contiguous=True, gradient=None)

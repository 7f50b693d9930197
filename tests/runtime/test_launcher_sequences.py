"""Launch plans of calls with sequences of tensors, whose addresses a kernel gets in a struct."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_operator import Planned
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fuselab import ops
from fuselab.runtime import kernel_launch
from fuselab.runtime.cpp_source import CppSource, i64
from fuselab.runtime.cuda_source import CudaSource
from fuselab.runtime.parameters import Struct

SOURCE = CppSource(Path(__file__).with_name("kernels.cpp"))
pytestmark = pytest.mark.usefixtures("launcher")
CUDA = CudaSource(Path(__file__).with_name("kernels.cu"))
MOST = 64  # terms of the kernels' struct
TENSORS = 1024  # of a call that has a plan: max_tensors of launcher/key.h


def add_up(terms: Sequence[Tensor | None], weights: Sequence[int], output: Tensor) -> None:
    described = Struct.of_arrays(MOST, [terms, weights])
    args = (described, output, i64(output.numel()))
    if output.is_cuda:
        CUDA.launch("weighted_sum", (-(-output.numel() // 256), 1, 1), (256, 1, 1), args)
    else:
        SOURCE.launch("weighted_sum", args)


def weighted_sum(terms: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    output = torch.empty_like(terms[0])
    add_up(terms, weights, output)
    return output


@pytest.fixture
def op() -> Planned:
    return Planned(weighted_sum)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_plan_adds_up_the_tensors_of_the_present_call(op: Planned, device: str) -> None:
    held = []
    for step in range(4):
        terms = [torch.full((5,), 10.0**place + step, device=device) for place in range(3)]
        held.append(terms)  # so that the next ones lie elsewhere
        given = tuple(terms) if step % 2 else terms
        assert op(given, (1, 2, 3)).tolist() == [321.0 + 6 * step] * 5
    assert op.runs == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda terms: terms[:1],
        lambda terms: [*terms, terms[0]],
        lambda terms: [terms[0], terms[0]],
        lambda terms: [terms[0], terms[1].double()],
        lambda terms: [terms[0], terms[1].view(2, 2)],
        lambda terms: [terms[0], torch.ones(8)[::2]],
        lambda terms: [terms[0], torch.ones(5)[1:]],
        lambda terms: [terms[0], terms[1].to("meta")],
        lambda terms: [terms[0], terms[1].as_subclass(type("Other", (Tensor,), {}))],
        lambda terms: [terms[0], torch.ones(4, requires_grad=True)],
        lambda terms: [terms[0], None],
        lambda terms: [terms[0], 1.5],
    ],
)
def test_a_sequence_that_differs_has_no_plan(op: Planned, other: Callable[..., Any]) -> None:
    terms = [torch.ones(4), torch.ones(4)]
    op(terms, (1, 1))
    assert op.hits([torch.zeros(4), torch.zeros(4)], (1, 1))
    assert not op.hits(other(terms), (1, 1))


def test_one_tensor_twice_in_a_sequence_is_not_two_tensors(op: Planned) -> None:
    one, other = torch.ones(4), torch.full((4,), 5.0)
    for _ in range(2):
        assert op([one, one], (1, 10)).tolist() == [11.0] * 4
        assert op([one, other], (1, 10)).tolist() == [51.0] * 4
        assert op([other, other.view(4)], (1, 10)).tolist() == [55.0] * 4
    assert op.runs == 2


def test_1024_tensors_have_a_plan_and_one_more_has_none() -> None:
    op = Planned(lambda terms: weighted_sum(terms[:MOST], (1,) * MOST))
    for count, runs in ((TENSORS, 1), (TENSORS + 1, 3)):
        terms = [torch.full((1, 2), float(place)) for place in range(count)]
        for _ in range(2):
            assert op(terms).tolist() == [[sum(range(MOST))] * 2]
        assert op.runs == runs


def test_addresses_of_outputs_and_workspaces_and_null_ones() -> None:
    def in_a_workspace(terms: Sequence[Tensor], weights: Sequence[int]) -> tuple[Tensor, Tensor]:
        workspace = torch.empty(3, *terms[0].shape)
        add_up(terms, weights, workspace[2])
        first, second = torch.empty_like(terms[0]), torch.empty_like(terms[0])
        add_up([None, workspace[2]], (1, 2), first)
        add_up([first, None, *terms], (1, 1, 1, 1), second)
        return first, second

    op = Planned(in_a_workspace)
    for factor in (1.0, 2.0):
        first, second = op([torch.full((3,), factor), torch.full((3,), 10.0)], (1, 1))
        assert first.tolist() == [2 * (factor + 10)] * 3
        assert second.tolist() == [3 * (factor + 10)] * 3
    assert op.runs == 1


CONSTANT = torch.ones(4)


@pytest.mark.parametrize("address", [lambda terms: CONSTANT, lambda terms: torch.empty(0)])
def test_an_address_of_something_else_has_no_plan(address: Callable[..., Tensor]) -> None:
    def uses_it(terms: Sequence[Tensor]) -> Tensor:
        output = torch.empty(2)
        add_up([terms[0], address(terms)], (1, 1) if address(terms).numel() else (1,), output)
        return output

    op = Planned(uses_it)
    for factor in (1.0, 2.0):
        terms = [torch.full((4,), factor)]
        assert torch.equal(op(terms), uses_it(terms))
    assert op.runs == 2


def test_an_address_in_an_item_is_taken_from_that_item() -> None:
    def uses_it(terms: Sequence[Tensor]) -> Tensor:
        output = torch.empty(2)
        add_up([terms[1], terms[1][2:]], (1, 1), output)
        return output

    op = Planned(uses_it)
    for factor in (1.0, 2.0):
        terms = [torch.zeros(4), torch.full((4,), factor)]
        assert op(terms).tolist() == [2 * factor] * 2
    assert op.runs == 1


def test_a_lazily_cloned_tensor_of_a_list_is_written_in_memory_of_its_own() -> None:
    op = Planned(lambda terms: add_up([terms[1]], (3,), terms[0]) or ())
    value, other = torch.ones(4), torch.full((4,), 2.0)
    op([value, other])
    clone = torch._lazy_clone(value)
    op([clone, other])
    assert clone.tolist() == value.tolist() == [6.0] * 4
    value.zero_()
    assert clone.tolist() == [6.0] * 4 and op.runs == 1
    clone = torch._lazy_clone(value)
    op([clone, other])
    assert clone.tolist() == [6.0] * 4 and value.tolist() == [0.0] * 4


def test_a_list_that_another_thread_empties_keeps_its_tensors_while_a_kernel_runs() -> None:
    """``waits`` runs until the other thread has written to its memory, without the GIL."""

    def runs_until_told(flags: Sequence[Tensor], size: Tensor) -> Tensor:
        output = torch.empty_like(size)
        described = Struct.of_arrays(MOST, [[size], [1]])
        SOURCE.launch("waits", (flags[0],))
        SOURCE.launch("weighted_sum", (described, output, i64(size.numel())))
        return output

    op, size = Planned(runs_until_told), torch.ones(1)
    told = torch.ones(1 << 18, dtype=torch.int32)  # 1 MiB: the GIL is released
    op([told], size)
    flags = torch.zeros(1 << 18, dtype=torch.int32)
    alive, same_memory, given, seen = weakref.ref(flags), flags.detach(), [flags], []
    del flags

    def empty() -> None:
        given.clear()
        seen.append(alive() is not None)
        same_memory[0] = 1

    thread = threading.Timer(0.05, empty)
    thread.start()
    assert op(given, size).tolist() == [1.0]
    thread.join()
    assert seen == [True] and same_memory[1] == 1 and alive() is None and op.runs == 1


def test_the_profiler_sees_the_shapes_of_a_list(op: Planned, tmp_path: Path) -> None:
    terms = [torch.ones(2, 3), torch.ones(2, 3)]
    op(terms, (1, 1))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        op(terms, (1, 1))
    seen.export_chrome_trace(str(tmp_path / "trace"))
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    seen_shapes = [
        event["args"]["Input Dims"][0] for event in events if event["name"] == "test::weighted_sum"
    ]
    assert seen_shapes == [[[2, 3], [2, 3]]]


# Operators.


@pytest.mark.gpu
def test_rows_at_8_bytes_give_no_plan_to_rows_at_2() -> None:
    """dot_interaction in bfloat16 reads 8 bytes at a time where it can."""
    memory = torch.randn(40 * 27 * 16, device="cuda").bfloat16()
    for begin in (0, 4, 1, 2):
        rows = torch.empty(begin + 40 * 27 * 16, device="cuda", dtype=torch.bfloat16)[begin:]
        rows.copy_(memory)
        dense, embeddings = rows[: 40 * 16].view(40, 16), rows[40 * 16 :].view(40, 26, 16)
        ours = ops.dot_interaction(dense, embeddings)
        plain = ops.dot_interaction(dense, embeddings, implementation="reference")
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)


def tables(device: str, count: int = 5) -> list[Tensor]:
    return [torch.randn(7, 4, device=device) for _ in range(count)]


def embedding_lookup(device: str, implementation: str) -> list[Tensor]:
    leaves = [table.requires_grad_() for table in tables(device)]
    ids = torch.randint(7, (9, 5), device=device)
    output = ops.embedding_lookup(leaves, ids, implementation=implementation)
    return [output, *torch.autograd.grad(output, leaves, torch.ones_like(output))]


def embedding_sgd_(device: str, implementation: str) -> list[Tensor]:
    leaves, ids = tables(device), torch.randint(7, (9, 5), device=device)
    grad = torch.randn(9, 5, 4, device=device)
    ops.embedding_sgd_(leaves, ids, grad, 0.5, implementation=implementation)
    return leaves


def embedding_adagrad_(device: str, implementation: str) -> list[Tensor]:
    leaves, ids = tables(device), torch.randint(7, (9, 5), device=device)
    states = [torch.rand(7, device=device) for _ in leaves]
    grad = torch.randn(9, 5, 4, device=device)
    ops.embedding_adagrad_(leaves, states, ids, grad, 0.5, implementation=implementation)
    return [*leaves, *states]


def mlp(device: str, implementation: str) -> list[Tensor]:
    weights = [torch.randn(40, 24, device=device), torch.randn(8, 40, device=device)]
    biases = [torch.randn(40, device=device), torch.randn(8, device=device)]
    input = torch.randn(33, 24, device=device)
    args = (input.bfloat16(), [each.bfloat16() for each in weights])
    biases = [each.bfloat16() for each in biases]
    return [ops.mlp(*args, biases, "relu", "sigmoid", None, implementation=implementation)]


@pytest.mark.parametrize(
    ("call", "device"),
    [
        *((call, "cpu") for call in (embedding_lookup, embedding_sgd_, embedding_adagrad_)),
        *(
            pytest.param(call, "cuda", marks=pytest.mark.gpu)
            for call in (embedding_lookup, embedding_sgd_, embedding_adagrad_, mlp)
        ),
    ],
)
def test_operators_of_sequences_come_from_plans(
    call: Callable[[str, str], list[Tensor]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_launch(*args: Any) -> None:
        raise AssertionError("a launch that is not a plan's")

    held = []
    for seed in range(3):
        torch.manual_seed(seed)
        with monkeypatch.context() as patch:
            if seed > 0:
                patch.setattr(kernel_launch, "launch_cuda", no_launch)
                patch.setattr(kernel_launch, "launch_cpu", no_launch)
            ours = call(device, "auto")
        held.append(ours)
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, call(device, "reference"), rtol=2e-2, atol=2e-2)

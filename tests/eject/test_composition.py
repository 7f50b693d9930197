"""A function that is cut into fused operators and PyTorch calls."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuselab
from fuselab.cli.main import run
from fuselab.ejection.eject import ejected
from fuselab.ejection.regions import Region, call_name, cut
from fuselab.errors import EjectError, TargetError
from fuselab.prove.check_composition import Whole, composition_groups
from fuselab.prove.load import load, load_op
from fuselab.prove.result import Group, Result, Verdict
from fuselab.prove.subject import Subject


class Gate(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(width, 2 * width))
        self.down = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("unsaved", torch.tensor([1.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, -1)
        hidden = self.down(F.silu(first) * second)
        return F.gelu(self.norm(hidden) * self.scale + self.unsaved)


def in_place(x: Tensor, weight: Tensor) -> Tensor:
    hidden = x @ weight
    hidden += 1
    hidden.mul_(3)
    return F.relu(hidden, inplace=True)


def writes_to_an_argument(x: Tensor, weight: Tensor) -> Tensor:
    x.mul_(2)
    y = torch.tanh(x) + 1
    return (y @ weight).exp() * 2 + 1


def writes_through_a_view(x: Tensor, weight: Tensor) -> Tensor:
    hidden = x @ weight
    part = hidden[:, :2]
    part.mul_(2)
    return (hidden + 1).exp()


def random_in_between(x: Tensor, weight: Tensor) -> Tensor:
    first = torch.bernoulli(x + 1)
    second = torch.rand_like(x @ weight)
    return (first * 2 + second).tanh()


def around_a_product(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.exp(x) + 1
    z = y @ weight
    return (z + y).tanh() * 2


def only_a_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight)


def combined_masks(x: Tensor, weight: Tensor) -> Tensor:
    hidden = (x @ weight).relu() + 1
    keep = (hidden.mean(1) > 1.5) & (hidden.amax(1) < 9) | ~(weight[0] > 0)[:1]
    return torch.where(keep[:, None], hidden @ weight, hidden).sigmoid() * (~keep)[:, None]


def chosen_by_a_mask(x: Tensor, weight: Tensor) -> Tensor:
    hidden = (x * 2).relu() + weight[0]
    return hidden[hidden > 1.5].reshape(-1, 1) @ weight[:1]


def size_of_a_choice(x: Tensor, weight: Tensor) -> Tensor:
    chosen = ((x * 2).relu() + weight[0])[x > 1]
    return chosen.reshape(1, chosen.shape[0])


X, WEIGHT = torch.ones(4, 8), torch.ones(8, 8)


def steps(
    function: Callable[..., Any], *args: Tensor, inference: bool = False
) -> list[str | list[str]]:
    """Return what runs: the name of a PyTorch call, or the calls of a fused operator."""
    made = cut(function, args or (X, WEIGHT), {}, "f", inference)
    return [
        [call_name(node) for node in step.calls] if isinstance(step, Region) else call_name(step)
        for step in made.steps
    ]


def test_chains_become_operators_and_products_stay() -> None:
    assert steps(Gate(), torch.ones(3, 8)) == [
        "linear",
        "chunk",
        "getitem",
        "getitem",
        ["silu", "mul"],
        "linear",
        ["layer_norm", "mul", "add", "gelu"],
    ]


def test_operations_in_place_join_a_chain_where_nothing_else_sees_them() -> None:
    assert steps(in_place) == ["matmul", ["add", "mul", "relu"]]


@pytest.mark.parametrize("function", [combined_masks, chosen_by_a_mask])
def test_operators_of_masks_and_shapes_that_depend_on_values(
    function: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuselab.eject(function, X, WEIGHT, out=tmp_path / f"with_{function.__name__}")
    monkeypatch.syspath_prepend(str(tmp_path))
    composed = importlib.import_module(f"with_{function.__name__}.composed")
    assert len(composed.COMPOSITION.operators) >= 1
    fused = getattr(composed, function.__name__)
    for rows in (4, 7):
        values = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
        weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(fused(values, weight), function(values, weight))


def test_a_size_that_depends_on_values_is_refused() -> None:
    with pytest.raises(EjectError, match=r"reads a size that depends on values \(.*chosen.shape"):
        cut(size_of_a_choice, (X, WEIGHT), {}, "f")


def test_what_is_written_over_stays_in_order() -> None:
    found = steps(writes_to_an_argument, inference=True)
    assert found == ["mul_", "tanh", "add", "matmul", ["exp", "mul", "add"]]
    assert steps(writes_through_a_view) == ["matmul", "getitem", "mul_", "add", "exp"]


def test_random_numbers_are_drawn_in_the_order_of_the_code() -> None:
    assert steps(random_in_between) == [
        "add",
        "bernoulli",
        "matmul",
        "rand_like",
        ["mul", "add", "tanh"],
    ]


def test_a_call_between_two_parts_of_a_chain_cuts_it() -> None:
    assert steps(around_a_product) == [["exp", "add"], "matmul", ["add", "tanh", "mul"]]


def normed_pool(x, weight, bias):
    normed = F.batch_norm(x, None, None, weight, bias, True)
    return F.group_norm(F.max_pool2d(torch.tanh(normed), 2), 2)


def test_a_chain_that_fits_no_kernel_is_cut_where_it_stops_to_fit() -> None:
    """The channels of the weight are groups in the group norm, and windows stand between."""
    args = torch.ones(2, 4, 4, 4), torch.ones(4), torch.ones(4)
    made = cut(normed_pool, args, {}, "normed_pool")
    calls = [[call_name(node) for node in region.calls] for region in made.regions]
    assert calls == [["batch_norm", "tanh", "max_pool2d"], ["group_norm"]]
    assert not made.calls


def test_one_call_alone_is_no_chain() -> None:
    with pytest.raises(EjectError, match=r"matmul has no generated kernel \(.*x @ weight"):
        ejected(only_a_product, (X, WEIGHT), {}, "f")


def test_a_module_of_products_is_refused_with_its_call() -> None:
    attention = torch.nn.MultiheadAttention(4, 2)
    said = "multi_head_attention_forward has no generated kernel.*nothing else is computed; kernels"
    with pytest.raises(EjectError, match=said):
        ejected(attention, (torch.ones(3, 4),) * 3, {}, "attention")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def own_autograd(x: Tensor, weight: Tensor) -> Tensor:
    return Doubled.apply(torch.exp(x) + 1) @ weight


def selected(x: Tensor, weight: Tensor) -> Tensor:
    return x[x > 0].exp() + 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (own_autograd, r"custom autograd function.* \(.*return Doubled\.apply"),
        (
            selected,
            r"aten.index.Tensor gives a tensor whose size depends on values \(.*return x\[x > 0\]",
        ),
    ],
)
def test_a_refusal_has_the_line(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(EjectError, match=reason):
        ejected(function, (X, WEIGHT), {}, "f")


def masked_attention(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    scores = query @ key.transpose(-1, -2) * 0.5
    return torch.softmax(scores.masked_fill(mask, float("-inf")), -1)


def test_a_mask_joins_the_softmax() -> None:
    mask = torch.zeros(5, 5, dtype=torch.bool)
    found = steps(masked_attention, torch.ones(2, 5, 4), torch.ones(2, 5, 4), mask)
    assert found == ["transpose", "matmul", ["mul", "masked_fill", "softmax"]]


# --- the folder -----------------------------------------------------------------------------------


def imported(folder: Path, name: str) -> ModuleType:
    """Import a file of a package as a program would that has the folder on its path."""
    sys.path.insert(0, str(folder.parent))
    try:
        return importlib.import_module(f"{folder.name}.{name}")
    finally:
        sys.path.remove(str(folder.parent))


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    module = Gate()
    folder = tmp_path_factory.mktemp("packages") / "ejected_gate"
    fuselab.eject(module, torch.ones(3, 8), out=folder, name="gate")
    return module, folder


def test_the_function_reads_like_the_users_code(gate: tuple[nn.Module, Path]) -> None:
    text = (gate[1] / "composed.py").read_text("utf-8")
    assert "    chunk = linear.chunk(2, -1)\n    first = chunk[0]\n" in text
    assert "    mul = gate_mul(first, second)\n" in text
    assert "    hidden = torch.nn.functional.linear(mul, down_weight, down_bias)\n" in text
    page = (gate[1] / "page.md").read_text("utf-8")
    assert (
        "| [gate_mul](gate_mul/page.md) | `hidden = self.down(F.silu(first) * second)` | fused |"
        in page
    )
    assert "| linear | `first, second = self.up(x).chunk(2, -1)` | a library computes it |" in page


def test_the_module_keeps_the_state_dict_and_the_values(gate: tuple[nn.Module, Path]) -> None:
    original, folder = gate
    fused = imported(folder, "module").Gate(original)
    assert list(fused.state_dict()) == list(original.state_dict())
    original = copy.deepcopy(original).double()
    fused = imported(folder, "module").Gate(original)
    x = torch.randn(5, 8, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outputs = [module(one) for module, one in zip((original, fused), inputs, strict=True)]
    torch.testing.assert_close(outputs[1], outputs[0])
    gradients = [
        torch.autograd.grad(output.sum(), [one, original.up[0].weight])
        for output, one in zip(outputs, inputs, strict=True)
    ]
    torch.testing.assert_close(gradients[1], gradients[0])
    fused.eval()
    with pytest.raises(RuntimeError, match=r"ejected in \.train\(\) mode"):
        fused(x)
    fused.train()


def unrolled(x: Tensor, weight: Tensor, *, count: int = 3) -> Tensor:
    for _ in range(count):
        x = torch.tanh(x @ weight) * 2 + x
    return x


def with_other_numbers(x: Tensor, weight: Tensor) -> Tensor:
    first = torch.tanh(x @ weight) * 2 + x
    second = torch.tanh(first @ weight) * 3 + first
    return torch.tanh(second @ weight) * 2 + second.detach()


def test_the_steps_of_a_recurrence_share_one_operator(tmp_path: Path) -> None:
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    made = ejected(unrolled, (x, weight), {}, "unrolled")
    folders = {name.partition("/")[0] for name in made.files if "/" in name}
    assert folders == {"unrolled_x_2"}
    assert made.files["composed.py"].count("unrolled_x_2(") == 3
    assert "1 fused operator, called 3 times, takes the place of 9 " in made.files["page.md"]
    folder = tmp_path / "ejected_recurrence"
    fuselab.eject(unrolled, x, weight, out=folder, name="unrolled")
    fused = imported(folder, "composed").unrolled
    found, right = fused(x.double(), weight.double()), unrolled(x.double(), weight.double())
    torch.testing.assert_close(found, right)
    (gradient,) = torch.autograd.grad(right.square().sum(), weight)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), weight)[0], gradient)


def test_parts_that_differ_have_operators_of_their_own() -> None:
    made = cut(with_other_numbers, (X, WEIGHT), {}, "f", False)
    # Other numbers, and another argument without a gradient.
    assert len(made.regions) == 3 and len(made.operators) == 3
    # The masks of dropouts follow from their numbers.
    made = cut(
        lambda x, weight: F.dropout(F.gelu(F.dropout(F.gelu(x @ weight)) @ weight)),
        (X, WEIGHT),
        {},
        "f",
        False,
    )
    assert [len(made.regions), len(made.operators)] == [2, 2]


def test_check_judges_every_operator_and_the_whole(
    gate: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(subject: Subject, case: str | None) -> Group:
        results = (Result("values", Verdict.PASS, trials=1),)
        return Group(subject.implementation, "float32", "cpu", results)

    monkeypatch.setattr("fuselab.prove.check.run_group", judged)
    report = fuselab.check(str(gate[1]), "cpp", torch.float32, seed=0, quick=True, budget_s=1000)
    assert report.passed, [group.failures for group in report.groups]
    names = [group.implementation for group in report.groups]
    assert names == ["gate_mul cpp", "gate_gelu cpp", "gate"]
    assert report.groups[-1].trials == 4


def test_check_fails_where_the_whole_is_wrong(gate: tuple[nn.Module, Path]) -> None:
    composition = load(str(gate[1]))
    assert isinstance(composition, fuselab.Composition)

    def wrong(x: Tensor, *others: Tensor) -> Tensor:
        return composition.function(x * (1 + 1e-3), *others)

    broken = replace(composition, function=wrong)
    cpu = torch.device("cpu")
    (group,) = composition_groups(Whole.here(broken, cpu), [torch.float32], True, 0, 10.0, "gate")
    assert [result.check for result in group.failures] == ["whole"]
    (group,) = composition_groups(
        Whole.here(composition, cpu), [torch.float32], True, 0, 10.0, "gate"
    )
    assert not group.failures


def test_bench_times_the_whole_beside_eager(
    gate: tuple[nn.Module, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", str(gate[1]), "--provider", "fused", "--quick", "--budget", "0.01"]
    assert run([*words, "--backward", "--device", "cpu"]) == 0
    text = capfd.readouterr().out
    assert "fused" in text and "eager" in text


def test_one_operator_of_it_can_be_named(gate: tuple[nn.Module, Path]) -> None:
    assert load_op(str(gate[1] / "gate_mul")).name == "ejected::gate_mul"
    with pytest.raises(
        TargetError, match=r"is composed of several operators; name one: .*gate_mul"
    ):
        load_op(str(gate[1]))


def test_the_screen_says_what_stays_a_pytorch_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "target.py"
    file.write_text(
        "import torch\n\n\ndef f(x, w):\n    return ((x + 1) @ w).tanh() * 2\n\n\n"
        "def get_inputs():\n    return torch.ones(4, 8), torch.ones(8, 8)\n"
    )
    assert run(["eject", f"{file}:f", "-o", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "f_mul (rows" in text
    assert "PyTorch calls between them: add, matmul (page.md says why)" in text


def of_complex_and_transposed(z: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return (z.abs() * 2 + x.T.exp()) @ weight


def test_a_complex_argument_and_an_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    z, x, weight = torch.polar(torch.ones(4, 3), torch.rand(4, 3)), torch.rand(3, 4), torch.ones(3)
    folder = fuselab.eject(of_complex_and_transposed, z, x, weight, out=tmp_path / "of_complex")
    text = (folder / "composed.py").read_text()
    assert "transposed = x.T" in text and "getattr" not in text
    monkeypatch.syspath_prepend(str(tmp_path))
    made = importlib.import_module("of_complex").of_complex_and_transposed
    torch.testing.assert_close(made(z, x, weight), of_complex_and_transposed(z, x, weight))

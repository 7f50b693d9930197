"""fuse with kernels that it writes: which chains, what is kept in the cache, and what stays."""

from __future__ import annotations

import copy
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselab.ejection import generated as generated_module
from fuselab.ejection.folder import copy_package, is_intact
from fuselab.ejection.generated import generated
from fuselab.errors import EjectError, TargetError
from fuselab.fusion import fuse as fuse_module
from fuselab.fusion import generate as generate_module
from fuselab.fusion.chains import ChainFinder
from fuselab.fusion.equal_dropout import EqualDropout
from fuselab.fusion.fuse import fuse_with_report
from fuselab.fusion.judge import prove_model, values_of
from fuselab.fusion.result import Decision, FuseResult
from fuselab.fusion.trace import Call, trace_forward
from fuselab.measure.verdict import Outcome, Verdict
from fuselab.runtime import cpu_choice

sys.path.insert(0, str(Path(__file__).parent))
from random_modules import fused as fused_at_random
from random_modules import without_kernel

WIDTH, ROWS = 96, 128  # 48 KiB, above what a call on a CPU costs its dispatch
TEXT = "def {name}(input, scale):\n    return torch.sigmoid(input) * scale\n"


class Block(nn.Module):
    """A linear layer and a chain of a parameter, a function, layers and an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        hidden = F.gelu(self.linear(input).mul(self.scale))
        return self.norm(self.dropout(hidden) + input)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, input: Tensor) -> Tensor:
        return self.second(self.first(input))


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = Verdict(Outcome.FASTER, 2.0, 2.0, 2.0, 12)
    monkeypatch.setattr(fuse_module, "measure", lambda *args, **kwargs: (2.0, 1.0, verdict))


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _written(result: FuseResult) -> list[tuple[str, str, Decision]]:
    return [
        (tried.module, tried.chain, tried.decision)
        for tried in result.replacements
        if tried.folder is not None
    ]


def _chains(function: Any, *tensors: Tensor) -> list[str]:
    """Return the chains that are found in a function or module, without writing kernels."""

    class Function(nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*args)

    module = function if isinstance(function, nn.Module) else Function()
    traced = trace_forward("", module, Call(tensors, {}))
    values = values_of(traced.graph, traced.module, traced.tensors)
    return [chain.chain for chain in ChainFinder(traced, values, ()).chains()]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x, y: F.mse_loss(x, y), "mse_loss"),
        (lambda x, y: F.binary_cross_entropy_with_logits(x, y), "binary_cross_entropy_with_logits"),
        (lambda x, y: F.poisson_nll_loss(x, y), "poisson_nll_loss"),
        (lambda x, y: F.triplet_margin_loss(x, y, x), "triplet_margin_loss"),
    ],
)
def test_one_call_that_eager_computes_in_several_passes_is_a_chain(
    function: Any, name: str
) -> None:
    assert _chains(function, torch.randn(64, 96), torch.rand(64, 96)) == [name]


def into_an_argument(x: Tensor, y: Tensor) -> Tensor:
    torch.mul(x, 2, out=y)
    return y.sigmoid().add(1).exp()


def over_a_list(x: Tensor, y: Tensor) -> Tensor:
    torch._foreach_mul_([x, y], 2)
    return y.sigmoid().add(1).exp()


@pytest.mark.parametrize("function", [into_an_argument, over_a_list])
def test_what_reads_a_tensor_that_is_written_over_is_part_of_no_chain(function: Any) -> None:
    """A call writes over a tensor that it is given as ``out``, or in a list."""
    assert _chains(function, torch.randn(64, 96), torch.rand(64, 96)) == ["add → exp"]


def test_a_chain_that_fits_no_kernel_is_cut_where_it_stops_to_fit() -> None:
    layers = nn.Sequential(nn.BatchNorm2d(4), nn.Tanh(), nn.MaxPool2d(2), nn.GroupNorm(2, 4))
    traced = trace_forward("", layers, Call((torch.randn(8, 4, 32, 32),), {}))
    values = values_of(traced.graph, traced.module, traced.tensors)
    finder = ChainFinder(traced, values, ())
    written = generate_module.Generator(lambda text: None).written(finder, finder.chains())
    chains = [one.chain.chain for one in written]
    assert chains == ["batch_norm → tanh → max_pool2d", "group_norm"]


def test_a_chain_behind_a_linear_layer_becomes_one_kernel_and_equal_chains_the_same(
    faster: None,
) -> None:
    torch.manual_seed(0)
    model, input = Blocks().eval(), torch.randn(ROWS, WIDTH)
    result = fuse_with_report(model, input)
    chain = "mul → gelu → add → layer_norm"
    assert _written(result) == [("first", chain, Decision.KEPT), ("second", chain, Decision.KEPT)]
    assert len({tried.op.name for tried in result.replacements}) == 1
    assert "proved against float64" in result.proof
    first = result.kept[0]
    assert first.implementation == "cpp" and first.before_us == 2.0
    assert first.folder is not None and is_intact(first.folder)
    assert f"its kernels: {first.folder}" in str(result)
    source = type(result.model.first).fused_source
    assert source.count("fuselab_ops_mul_gelu_add_layer_norm") == 1
    assert "layer_norm(" not in source.replace(first.op.short_name, "")
    torch.testing.assert_close(result.model(input), model(input))
    upstream = torch.randn(ROWS, WIDTH)
    expected = torch.autograd.grad(model(input), list(model.parameters()), upstream)
    actual = torch.autograd.grad(result.model(input), list(model.parameters()), upstream)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

    # Other sizes run the same kernel, and a setting that it was written with is watched.
    other = torch.randn(7, WIDTH)
    torch.testing.assert_close(result.model(other), model(other))
    result.model.first.norm.eps = 2.0
    changed = result.model(input)
    model.first.norm.eps = 2.0
    torch.testing.assert_close(changed, model(input))


def test_the_kernels_are_found_in_the_cache(faster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, input = Block().eval(), torch.randn(ROWS, WIDTH)
    fuse_with_report(model, input)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was written before")

    monkeypatch.setattr(generated_module, "planned_package", refuse)
    assert len(fuse_with_report(model, input).kept) == 1


def test_a_small_chain_is_left_alone_and_the_report_says_what_was_looked_for() -> None:
    result = fuse_with_report(Block().eval(), torch.randn(8, WIDTH), budget_s=0.01)
    assert result.replacements == ()
    (left,) = result.left
    assert left.reason.startswith("mul → gelu → add → layer_norm: no call in it moves more than ")
    text = str(result)
    assert "and for two or more memory-bound operations in a row" in text
    assert "saw 6 operations" in text


def test_a_kernel_that_is_wrong_or_not_faster_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, input = Block().eval(), torch.randn(ROWS, WIDTH)
    slower = Verdict(Outcome.SLOWER, 0.5, 0.5, 0.5, 12)
    monkeypatch.setattr(fuse_module, "measure", lambda *args, **kwargs: (1.0, 2.0, slower))
    assert [entry[2] for entry in _written(fuse_with_report(model, input))] == [Decision.NOT_FASTER]
    monkeypatch.setattr(fuse_module, "prove_region", lambda *args: "row 0 is wrong")
    result = fuse_with_report(model, input)
    assert [entry[2] for entry in _written(result)] == [Decision.WRONG]
    assert torch.equal(result.model(input), model(input))


@pytest.mark.parametrize(("seed", "training"), [(2, False), (3, False), (24, False), (34, True)])
def test_modules_drawn_at_random_are_covered_and_right(seed: int, training: bool) -> None:
    assert fused_at_random(seed, training).problems == ()


@pytest.mark.parametrize("seed", [0, 1, 5, 8, 13, 15, 16, 55])
def test_a_kernel_is_written_for_all_of_a_random_chain(seed: int) -> None:
    assert without_kernel(seed, training=seed % 2 == 1) == []


def test_a_kernel_of_a_whole_chain_comes_before_an_operator_for_a_part_of_it(
    faster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's softmax would leave two calls beside it, which move all values once more."""

    def step(input: Tensor) -> Tensor:
        return F.softmax(F.relu6(input), dim=-1) * 2

    input = torch.randn(ROWS, WIDTH)
    assert _written(fuse_with_report(step, input)) == [("", "relu6 → softmax → mul", Decision.KEPT)]
    monkeypatch.setattr(fuse_module.Generator, "written", lambda self, finder, chains: [])
    with cpu_choice.forced("cpp"):  # what a CPU's table says of this size is another matter
        (tried,) = fuse_with_report(step, input).replacements
    assert (tried.op.short_name, tried.decision) == ("softmax", Decision.KEPT)


# --- which calls are one chain --------------------------------------------------------------------


def test_layers_functions_methods_and_operators_are_one_chain() -> None:
    assert _chains(Block().eval(), torch.randn(4, WIDTH)) == ["mul → gelu → add → layer_norm"]
    layers = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.SiLU())
    image = torch.randn(2, 3, 4, 4)
    assert _chains(layers.eval(), image) == ["batch_norm → relu → silu"]
    assert _chains(layers.train(), image) == ["batch_norm → relu → silu"]
    layers[1].momentum = None  # the weight of a batch depends on how many were before
    assert _chains(layers, image) == ["relu → silu"]


class NormalizedTwice(nn.Module):
    """A layer whose second call averages over what its first call has averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(self.norm(F.silu(self.norm(input))))


def test_a_layer_that_is_called_twice_and_updates_its_statistics_ends_a_chain() -> None:
    norm, input = NormalizedTwice(), torch.randn(4, 6)
    assert _chains(norm.train(), input) == []
    assert _chains(norm.eval(), input) == ["batch_norm → silu → batch_norm → silu"]


def test_running_statistics_are_updated_by_the_chain(faster: None) -> None:
    """They are what the original's layers make of the same batches, and ``fuse`` itself, which
    runs the chain many times, leaves the model's own as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.BatchNorm2d(8, momentum=0.3),
        nn.ReLU(),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.SiLU(),
    )
    with torch.no_grad():
        model[1].running_mean.fill_(0.25)
    before = copy.deepcopy(model.state_dict())
    image = torch.randn(8, 3, 12, 12)
    result = fuse_with_report(model, image)
    chain = "batch_norm → relu → instance_norm → silu"
    assert _written(result) == [("", chain, Decision.KEPT)]
    assert "proved against float64" in result.proof
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    eager = copy.deepcopy(model)
    for _ in range(2):
        batch = torch.randn(4, 3, 10, 10)
        torch.testing.assert_close(result.model(batch), eager(batch), rtol=1e-4, atol=1e-4)
    assert int(eager[1].num_batches_tracked) == int(result.model[1].num_batches_tracked) == 2
    torch.testing.assert_close(result.model.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-5)
    result.model.eval()
    torch.testing.assert_close(result.model(image), eager.eval()(image), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.model.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-5)


def test_dropout_in_training_joins_a_chain() -> None:
    whole = ["mul → gelu → dropout → add → layer_norm"]
    assert _chains(Block().train(), torch.randn(4, WIDTH)) == whole


def test_a_chain_has_one_dropout() -> None:
    def twice(input: Tensor) -> Tensor:
        return F.dropout(F.dropout(input.exp(), 0.5) * 2, 0.25).sin()

    assert _chains(twice, torch.randn(4, 8)) == ["exp → dropout → mul"]


class DroppingTwice(nn.Module):
    """Two chains, a dropout in each, and noise whose numbers must not depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.linear(self.dropout(F.gelu(input)) + input)
        return F.dropout(hidden * 2, 0.5).sin() + torch.rand_like(input)


def test_dropout_in_training_is_proved_and_drawn_anew_in_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faster = Verdict(Outcome.FASTER, 2.0, 2.0, 2.0, 12)
    monkeypatch.setattr(fuse_module, "measure", lambda *args, **kwargs: (2.0, 1.0, faster))
    input = torch.randn(ROWS, WIDTH)
    result = fuse_with_report(DroppingTwice().train(), input)
    chains = ["gelu → dropout → add", "mul → dropout → sin → add"]
    assert [one.chain for one in result.kept] == chains
    assert "proved against float64" in result.proof
    torch.manual_seed(5)
    first, second = result.model(input), result.model(input)
    torch.manual_seed(5)
    assert torch.equal(result.model(input), first) and not torch.equal(first, second)
    plain = DroppingTwice().train()
    plain.load_state_dict(result.model.state_dict())
    found = []
    for model in (result.model, plain):
        torch.manual_seed(5)
        with EqualDropout():
            found.append(model(input))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_views_are_inside_chains_but_not_at_their_ends() -> None:
    def step(input: Tensor) -> Tensor:
        wide = (input.flatten(0, 1) * 2).view(4, -1)
        return (wide + 1).t()

    assert _chains(step, torch.randn(4, 3, 8)) == ["mul → add"]
    assert _chains(lambda input: input.t().flatten() * 2, torch.randn(4, 3)) == []


def test_results_of_a_call_with_several_are_inside_a_chain() -> None:
    def gate(input: Tensor) -> Tensor:
        first, second = F.layer_norm(input, (8,)).chunk(2, -1)
        return first * torch.sigmoid(second)

    assert _chains(gate, torch.randn(4, 8)) == ["layer_norm → sigmoid → mul"]
    assert _chains(lambda x: (x * 2).max(-1).values.exp(), torch.randn(4, 8)) == ["mul → max → exp"]

    def read_outside(input: Tensor) -> tuple[Tensor, Tensor]:
        first, second = input.exp().mul(2).chunk(2, -1)
        return first.sin().cos(), second @ second.t()

    assert _chains(read_outside, torch.randn(4, 8)) == ["exp → mul", "sin → cos"]


def test_layers_of_one_function_join_a_chain() -> None:
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.InstanceNorm2d(8, track_running_stats=True),
        nn.PReLU(),
        nn.MaxPool2d(2),
        nn.AlphaDropout(0.1),
        nn.AvgPool2d(2, divisor_override=3),
        nn.GLU(1),
    )
    image = torch.randn(2, 3, 8, 8)
    pooled = "prelu → max_pool2d → avg_pool2d → glu"
    assert _chains(layers.eval(), image) == [f"instance_norm → {pooled}"]
    dropping = "prelu → max_pool2d → alpha_dropout → avg_pool2d → glu"
    assert _chains(layers.train(), image) == [f"instance_norm → {dropping}"]

    def dropped(input: Tensor) -> Tensor:
        return F.normalize(F.dropout(input.exp(), 0.5, False))

    assert _chains(dropped, torch.randn(4, 8)) == ["exp → normalize"]


def test_a_call_between_two_parts_cuts_the_chain() -> None:
    def step(input: Tensor) -> Tensor:
        first = torch.sin(torch.cos(input))
        return torch.exp((first @ first) + first)

    assert _chains(step, torch.randn(4, 4)) == ["cos → sin", "add → exp"]


def test_complex_tensors_are_in_no_chain() -> None:
    def step(z: Tensor) -> Tensor:
        real = z.real + z.imag
        return (z * torch.exp(1j * (real * real).sin())).abs().cos().exp()

    z = torch.randn(4, 4, dtype=torch.complex64)
    assert _chains(step, z) == ["add → mul → sin", "cos → exp"]


def test_a_kernel_whose_first_call_raises_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("float7")

    monkeypatch.setattr("fuselab.runtime.cpp_sweep.CppSweeps.run", raising)
    result = fuse_with_report(Block().eval(), torch.randn(ROWS, WIDTH), budget_s=0.01)
    (tried,) = result.replacements
    assert tried.decision not in (Decision.KEPT, Decision.NOT_FASTER)
    assert "its kernel raised KeyError: 'float7'" in tried.reason


def test_what_is_written_over_joins_a_chain_only_where_nothing_else_reads_it() -> None:
    assert _chains(lambda x: (x + 1).relu_().exp(), torch.randn(4)) == ["add → relu → exp"]

    def shared(input: Tensor) -> Tensor:
        first = input + 1
        view = first.view(-1)
        first.mul_(2)
        return view.exp().sin().cos()  # exp reads what mul_ has written

    assert _chains(shared, torch.randn(4)) == ["sin → cos"]


# --- the cache ------------------------------------------------------------------------------------


def test_packages_are_the_users_alone_and_written_once(own_cache: Path) -> None:
    examples = (torch.randn(4, 8), torch.randn(8))
    first = generated("gate", TEXT, examples)
    assert first.op.name == f"ejected::{first.folder.name}" and is_intact(first.folder)
    assert stat.S_IMODE((own_cache / "generated").stat().st_mode) == 0o700
    written = (first.folder / "op.py").stat().st_mtime_ns
    other_sizes = (torch.randn(5, 9), torch.randn(9))
    assert generated("gate", TEXT, other_sizes).folder == first.folder
    assert (first.folder / "op.py").stat().st_mtime_ns == written
    folders = {
        first.folder,
        generated("gate", TEXT, (torch.randn(4, 8), torch.randn(1))).folder,
        generated("gate", TEXT, (torch.randn(4, 8).double(), torch.randn(8))).folder,
        generated("gate", TEXT, examples, frozen=["scale"]).folder,
        generated("gate", TEXT.replace("*", "+"), examples).folder,
    }
    assert len(folders) == 5


def test_a_package_that_was_changed_is_written_again(own_cache: Path) -> None:
    examples = (torch.randn(4, 8), torch.randn(8))
    folder = generated("gate", TEXT, examples).folder
    text = (folder / "cpu_kernels.cpp").read_text()
    (folder / "cpu_kernels.cpp").write_text(text + "// changed\n")
    assert generated("gate", TEXT, examples).folder == folder
    assert (folder / "cpu_kernels.cpp").read_text() == text
    (folder / "reference.py").unlink()
    generated("gate", TEXT, examples)
    assert is_intact(folder)


def test_code_is_not_taken_from_a_folder_that_others_may_write_to(own_cache: Path) -> None:
    (own_cache / "generated").mkdir(parents=True)
    (own_cache / "generated").chmod(0o777)
    with pytest.raises(EjectError, match=r"others may write to .* chmod it to 700"):
        generated("gate", TEXT, (torch.randn(4, 8), torch.randn(8)))


def test_a_copy_is_replaced_unless_a_file_in_it_was_edited(own_cache: Path, tmp_path: Path) -> None:
    folder = generated("gate", TEXT, (torch.randn(4, 8), torch.randn(8))).folder
    copy = tmp_path / "report" / "kernels" / folder.name
    copy_package(folder, copy)
    copy_package(folder, copy)
    assert is_intact(copy)
    (copy / "op.py").write_text("mine")
    copy_package(folder, copy)
    assert (copy / "op.py").read_text() == "mine"


def test_a_gradient_is_written_for_every_input_whatever_the_example_requires(
    faster: None,
) -> None:
    """The first block's input needs no gradient, the second's does, and both are one kernel."""
    torch.manual_seed(1)
    model = Block().eval()
    input = torch.randn(ROWS, WIDTH)
    fused = fuse_with_report(model, input).model
    required, upstream = input.clone().requires_grad_(), torch.randn(ROWS, WIDTH)
    expected = torch.autograd.grad(model(required), required, upstream)
    torch.testing.assert_close(torch.autograd.grad(fused(required), required, upstream), expected)


def test_a_fused_model_that_raises_in_the_proof_is_not_kept(
    faster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove = fuse_module.prove_model

    def raising(original: nn.Module, fused: nn.Module, *given: Any) -> str | None:
        if hasattr(type(fused), "fused_source"):
            raise RuntimeError("a gradient of another shape")
        return prove(original, fused, *given)

    monkeypatch.setattr(fuse_module, "prove_model", raising)
    result = fuse_with_report(Block().eval(), torch.randn(ROWS, WIDTH))
    (tried,) = result.replacements
    assert (tried.decision, tried.reason) == (
        Decision.WRONG,
        "in the whole model: a gradient of another shape",
    )
    assert not hasattr(type(result.model), "fused_source")


def test_whatever_eject_raises_the_chain_is_left_alone_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raising(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("size")

    monkeypatch.setattr(generate_module, "generated", raising)
    monkeypatch.setattr(generate_module, "planned", raising)
    result = fuse_with_report(Block().eval(), torch.randn(ROWS, WIDTH), budget_s=0.01)
    (left,) = result.left
    assert "mul → gelu → add → layer_norm: eject raised KeyError: 'size'" in left.reason


def test_a_chain_is_cut_where_eject_refuses_a_call(faster: None) -> None:
    def step(input: Tensor) -> Tensor:
        gated = torch.sigmoid(input) * input
        return torch.special.erfcx(gated).mul(2).exp()

    input = torch.rand(ROWS, WIDTH) + 1
    result = fuse_with_report(step, input)
    assert [chain for _, chain, _ in _written(result)] == ["sigmoid → mul", "mul → exp"]
    torch.testing.assert_close(result.model(input), step(input))


def test_where_a_kernel_with_pooling_is_slower_the_rest_is_tried_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(input: Tensor) -> Tensor:
        pooled = F.max_pool2d(torch.relu(input * 2 - 1), 3, stride=2)
        return torch.exp(pooled) * 3

    ratios = iter([0.5])  # of the whole chain; the parts and the whole model are faster

    def measured(*_: Any, **__: Any) -> Any:
        ratio = next(ratios, 2.0)
        outcome = Outcome.FASTER if ratio > 1 else Outcome.SLOWER
        return 1.0, 1 / ratio, Verdict(outcome, ratio, ratio, ratio, 12)

    monkeypatch.setattr(fuse_module, "measure", measured)
    input = torch.randn(8, 16, 33, 33)
    with torch.no_grad():
        result = fuse_with_report(step, input)
        assert {chain: decision for _, chain, decision in _written(result)} == {
            "mul → sub → relu → max_pool2d → exp → mul": Decision.NOT_FASTER,
            "mul → sub → relu": Decision.KEPT,
            "exp → mul": Decision.KEPT,
        }
        torch.testing.assert_close(result.model(input), step(input))


def test_one_kernel_gives_all_that_is_read_of_a_chain(faster: None) -> None:
    def step(input: Tensor) -> tuple[Tensor, Tensor]:
        gated = torch.sigmoid(input) * input
        return gated @ gated.t(), gated.exp().sum(-1)

    input = torch.randn(ROWS, WIDTH)
    result = fuse_with_report(step, input)
    assert [chain for _, chain, _ in _written(result)] == ["sigmoid → mul → exp → sum"]
    for mine, theirs in zip(result.model(input), step(input), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


class Compared(nn.Module):
    """Compares with a parameter, which has no gradient; ``factor`` attaches one all the same."""

    def __init__(self, factor: float | None) -> None:
        super().__init__()
        self.bound = nn.Parameter(torch.full((8,), 0.25))
        self.factor = factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.where(x > self.bound, x, 0.0)
        if self.factor is not None:
            chosen = chosen + self.factor * (self.bound - self.bound.detach())
        return chosen, x > self.bound


@pytest.mark.parametrize(("factor", "problem"), [(0.0, None), (1.0, "eager has no gradient there")])
def test_a_gradient_where_eager_has_none_is_zero(factor: float, problem: str | None) -> None:
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    found = prove_model(Compared(None), Compared(factor), (x,), {})
    assert found is None if problem is None else problem in str(found)


def test_example_inputs_may_be_named() -> None:
    def scaled(x: Tensor, *, scale: float) -> Tensor:
        return (x * scale).exp()

    x = torch.ones(4)
    result = fuse_with_report(scaled, {"x": x, "scale": 2.0}, budget_s=0.01)
    torch.testing.assert_close(result.model(x=x, scale=2.0), (2 * x).exp())
    with pytest.raises(TargetError, match="missing a required argument: 'scale'"):
        fuse_with_report(scaled, {"x": torch.ones(4), "sale": 2.0})

"""fuselab.fuse: what it finds, keeps and leaves, and that the model stays the user's."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuselab
from fuselab.errors import TargetError
from fuselab.fusion import fuse as fuse_module
from fuselab.fusion.fuse import fuse_with_report
from fuselab.fusion.result import Decision, FuseResult
from fuselab.measure.verdict import Outcome, Verdict
from fuselab.op import FusedOp, Implementation, Inputs, Rewrite
from fuselab.ops import contract
from fuselab.runtime import cpu_choice
from fuselab.runtime.dispatch import operator

from .conftest import make_op, reference


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gelu = nn.GELU()
        self.shift = nn.Parameter(torch.randn(width))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.gelu(self.linear(input))
        if mask is not None:
            hidden = hidden * mask
        return torch.tanh(hidden + self.shift) + hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 16), nn.ReLU()
        )
        self.block = Block(16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, input: Tensor) -> Tensor:
        return self.dropout(F.relu(self.block(self.mlp(input))))


def _as_if(speedup: float) -> Any:
    outcome = Outcome.FASTER if speedup > 1 else Outcome.SLOWER
    return lambda *args, **kwargs: (speedup, 1.0, Verdict(outcome, speedup, speedup, speedup, 12))


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replacement measures twice as fast: what is tested here is everything but the clock."""
    monkeypatch.setattr(fuse_module, "measure", _as_if(2.0))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def _fuse(model: Any, *inputs: Tensor, op: FusedOp) -> FuseResult:
    return fuse_with_report(model, inputs, ops=[op])


def _same_draws(model: nn.Module, input: Tensor) -> Tensor:
    torch.manual_seed(7)
    return model(input)


def test_finds_chains_in_modules_functions_and_sequentials(
    faster: None, model: Model, op: FusedOp
) -> None:
    result = _fuse(model, torch.randn(8, 16), op=op)
    assert [(tried.module, tried.chain, tried.decision) for tried in result.replacements] == [
        ("mlp", "add → relu", Decision.KEPT),
        ("mlp", "add → relu", Decision.KEPT),
        ("block", "add → gelu", Decision.KEPT),
        ("block", "add → tanh", Decision.KEPT),
    ]
    assert "fused_source" not in vars(type(model.block)), "the original must stay as it was"
    assert "bias_act(linear" in type(result.model.block).fused_source
    assert "proved against float64" in result.proof


def test_fused_model_gives_the_same_outputs_and_gradients(
    faster: None, model: Model, op: FusedOp
) -> None:
    input = torch.randn(8, 16)
    fused = _fuse(model, input, op=op).model
    torch.testing.assert_close(_same_draws(fused, input), _same_draws(model, input))
    expected = torch.autograd.grad(_same_draws(model, input).square().sum(), model.parameters())
    actual = torch.autograd.grad(_same_draws(fused, input).square().sum(), fused.parameters())
    torch.testing.assert_close(actual, expected)


def test_state_dict_parameters_and_class_are_the_originals(
    faster: None, model: Model, op: FusedOp
) -> None:
    fused = _fuse(model, torch.randn(8, 16), op=op).model
    assert isinstance(fused, Model) and type(fused.block).__name__ == "Block"
    assert list(fused.state_dict()) == list(model.state_dict())
    for mine, theirs in zip(fused.parameters(), model.parameters(), strict=True):
        assert mine is theirs
    fused.load_state_dict(
        {key: torch.ones_like(value) for key, value in model.state_dict().items()}
    )
    assert bool((model.block.shift == 1).all())


def test_hooks_fire_once_and_a_hooked_layer_stays(faster: None, model: Model, op: FusedOp) -> None:
    fired: list[str] = []
    model.block.register_forward_hook(lambda *args: fired.append("block"))
    model.mlp[1].register_forward_hook(lambda *args: fired.append("relu"))
    result = _fuse(model, torch.randn(8, 16), op=op)
    assert fired == [], "fusing must not run the user's hooks"
    result.model(torch.randn(8, 16))
    assert sorted(fired) == ["block", "relu"]
    assert [left.reason for left in result.left] == ["it has hooks"]
    assert [left.module for left in result.left] == ["mlp.1"]


def test_what_holds_a_replaced_layer_runs_its_own_replacement(
    faster: None, monkeypatch: pytest.MonkeyPatch, op: FusedOp
) -> None:
    class Holder(nn.Module):
        def __init__(self, layers: nn.Sequential) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, input: Tensor) -> Tensor:
            return self.layers(input) * 2

    shared = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    model, input = nn.Sequential(Holder(shared), Holder(shared)), torch.randn(5, 16)
    expected, fused = model(input), _fuse(model, input, op=op).model
    monkeypatch.setattr(Holder, "forward", None)
    torch.testing.assert_close(fused(input), expected)


def test_other_modes_arguments_and_shapes_take_the_original_path(
    faster: None, model: Model, op: FusedOp
) -> None:
    fused = _fuse(model, torch.randn(8, 16), op=op).model
    fused.eval(), model.eval()
    for rows in (8, 1, 0, 33):
        input = torch.randn(rows, 16)
        torch.testing.assert_close(fused(input), model(input))
    input, mask = torch.randn(3, 16), torch.zeros(16)
    torch.testing.assert_close(fused.block(input, mask), model.block(input, mask))
    torch.testing.assert_close(fused.block(input, mask=mask), model.block(input, mask=mask))


def test_what_the_operator_refuses_later_runs_through_its_reference(
    faster: None, op: FusedOp
) -> None:
    def shifted(input: Tensor, bias: Tensor) -> Tensor:
        return torch.relu(input + bias)

    fused = _fuse(shifted, torch.randn(4, 3), torch.randn(3), op=op)
    assert len(fused.kept) == 1
    input, column = torch.randn(4, 3), torch.randn(4, 1)
    torch.testing.assert_close(fused.model(input, column), shifted(input, column))


def test_copies_and_pickles(faster: None, model: Model, op: FusedOp) -> None:
    fused = _fuse(model, torch.randn(8, 16), op=op).model
    input = torch.randn(2, 16)
    copied = copy.deepcopy(fused)
    assert copied.block.shift is not fused.block.shift
    assert "fused_source" in vars(type(copied.block))
    torch.testing.assert_close(_same_draws(copied, input), _same_draws(model, input))
    loaded = pickle.loads(pickle.dumps(fused))
    assert type(loaded.block) is Block
    torch.testing.assert_close(_same_draws(loaded, input), _same_draws(model, input))


def test_shared_inner_values_are_not_taken(faster: None, op: FusedOp) -> None:
    def both(input: Tensor, bias: Tensor) -> Tensor:
        hidden = input + bias
        return torch.relu(hidden) * hidden

    assert _fuse(both, torch.randn(4, 3), torch.randn(3), op=op).replacements == ()


def test_in_place_on_a_value_that_others_own_is_not_taken(faster: None, op: FusedOp) -> None:
    def changes_input(input: Tensor, bias: Tensor) -> Tensor:
        input += bias
        return torch.relu(input)

    assert _fuse(changes_input, torch.randn(4, 3), torch.randn(3), op=op).replacements == ()


def test_commuted_and_method_spellings_match(faster: None, op: FusedOp) -> None:
    def spelt(input: Tensor, bias: Tensor) -> Tensor:
        return torch.add(input, bias).tanh()

    result = _fuse(spelt, torch.randn(4, 3), torch.randn(3), op=op)
    assert [tried.chain for tried in result.kept] == ["add → tanh"]


def test_an_addition_scaled_by_alpha_is_another_operation(faster: None, op: FusedOp) -> None:
    def spelt(input: Tensor, bias: Tensor) -> Tensor:
        return torch.relu(torch.add(input, bias, alpha=2))

    assert _fuse(spelt, torch.randn(4, 3), torch.randn(3), op=op).replacements == ()


@pytest.mark.parametrize(
    "spelt",
    [
        lambda input: torch.softmax(input, -1),
        lambda input: F.softmax(input, dim=1),
        nn.Sequential(nn.Softmax(dim=-1)),
        lambda input: input.softmax(-1),
    ],
)
def test_one_library_call_is_enough(faster: None, spelt: Any) -> None:
    with cpu_choice.forced("cpp"):  # whatever was measured on this instruction set
        result = _fuse(spelt, torch.randn(64, 128), op=contract("softmax"))
    assert [(tried.chain, tried.decision) for tried in result.replacements] == [
        ("softmax", Decision.KEPT)
    ]


def test_half_a_linear_is_not_a_chain(faster: None, op: FusedOp) -> None:
    alone = make_op("fusiontest::plain_sum", rewrites=[_plain_sum()])
    assert _fuse(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4), op=alone).replacements == ()


def test_by_default_every_registered_operator_is_tried(faster: None) -> None:
    mine = make_op("fusiontest::mine", rewrites=[_plain_sum()])
    operator(mine)
    result = fuse_with_report(lambda a, b: a + b, [torch.randn(8, 16), torch.randn(16)])
    assert {tried.op.name for tried in result.replacements} == {"fusiontest::mine"}


def _plain_sum() -> Rewrite:
    return Rewrite(
        pattern=lambda input, bias: input + bias,
        call=lambda input, bias: Inputs((input, bias, "relu")),
    )


def test_a_wrong_operator_is_rejected_with_its_figures(faster: None, model: Model) -> None:
    def off_by_little(input: Tensor, bias: Tensor, activation: str) -> Tensor:
        return reference(input, bias, activation) * 1.001

    wrong = make_op(
        "fusiontest::wrong", implementations={"cpp": Implementation("cpu", off_by_little)}
    )
    result = _fuse(model, torch.randn(8, 16), op=wrong)
    assert {tried.decision for tried in result.replacements} == {Decision.WRONG}
    assert all("ulp" in tried.reason for tried in result.replacements)


def test_slower_is_not_kept(monkeypatch: pytest.MonkeyPatch, model: Model, op: FusedOp) -> None:
    monkeypatch.setattr(fuse_module, "measure", _as_if(0.5))
    result = _fuse(model, torch.randn(8, 16), op=op)
    assert {tried.decision for tried in result.replacements} == {Decision.NOT_FASTER}
    assert "SLOWER 0.500x" in result.replacements[0].reason
    assert "fused_source" not in vars(type(result.model.block))


class BranchesOnData(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input if input.sum() > 0 else -input


class BuildsATensor(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input + torch.rand(2)


class CountsCalls(nn.Module):
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return input


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (BranchesOnData(), "decides by values"),
        (BuildsATensor(), "which a trace would freeze"),
        (CountsCalls(), "changes self.calls"),
    ],
)
def test_what_a_trace_would_not_reproduce_is_left_and_said(
    faster: None, model: nn.Module, reason: str, op: FusedOp
) -> None:
    result = _fuse(model, torch.randn(3, 2), op=op)
    assert len(result.left) == 1 and reason in result.left[0].reason
    assert "test_fuse.py:" in result.left[0].source


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(16, 16), 2.0

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(self.linear(input * self.factor))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = F.relu(layer(input))
        return input


class Twice(Chain):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(self.linear(input)) * self.linear(input)


def _plain(chain: Chain, input: Tensor) -> Tensor:
    return F.relu(chain.linear(input * chain.factor))


def test_a_module_changed_after_fusion_runs_as_it_is_now(faster: None, op: FusedOp) -> None:
    input = torch.randn(5, 16)
    fused = _fuse(Chain(), input, op=op).model
    seen: list[Tensor] = []
    handle = fused.linear.register_forward_hook(lambda *call: seen.append(call[2]))
    torch.testing.assert_close(fused(input), _plain(fused, input))
    assert len(seen) == 2  # fused, and _plain
    handle.remove()
    fused.factor = 3.0
    torch.testing.assert_close(fused(input), _plain(fused, input))
    fused.factor = 2.0
    fused.linear = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    torch.testing.assert_close(fused(input), _plain(fused, input))

    deep = _fuse(Listed(), input, op=op).model
    deep.layers[1].register_forward_hook(lambda module, given, output: output + 1)
    torch.testing.assert_close(deep(input), F.relu(deep.layers[1](F.relu(deep.layers[0](input)))))

    twice = _fuse(Twice(), input, op=op).model
    twice.linear.register_forward_hook(lambda module, given, output: output + 1)
    torch.testing.assert_close(twice(input), F.relu(twice.linear(input)) * twice.linear(input))

    pair = _fuse(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), input, op=op).model
    torch.testing.assert_close(pair[:1](input), pair[0](input))
    pair.append(nn.Tanh())
    torch.testing.assert_close(pair(input), torch.tanh(F.relu(pair[0](input))))
    pair[1] = nn.Sigmoid()
    torch.testing.assert_close(pair(input), torch.tanh(torch.sigmoid(pair[0](input))))


def test_under_autocast_a_fused_linear_keeps_the_dtype(faster: None, op: FusedOp) -> None:
    model, input = Chain(), torch.randn(5, 16)
    fused = _fuse(model, input, op=op).model
    assert "bias_act" in type(fused).fused_source
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(input).dtype == model(input).dtype == torch.bfloat16


def test_a_change_in_place_after_the_chain_reads_leaves_the_model_as_it_was(faster: None) -> None:
    class Zeroes(nn.Module):
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
            doubled = input * 2
            total = input + 0.5 * doubled
            doubled.zero_()
            return F.relu(total), doubled

    input = torch.randn(5, 16)
    with cpu_choice.forced("cpp"):
        result = _fuse(Zeroes(), input, op=contract("add_mul_activation"))
    assert [tried.decision for tried in result.replacements] == [Decision.WRONG]
    torch.testing.assert_close(result.model(input), (F.relu(2 * input), torch.zeros(5, 16)))


def test_such_a_change_is_found_where_no_gradient_can_be_taken(faster: None, op: FusedOp) -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, input: Tensor) -> Tensor:
            scaled = input * 1
            hidden = self.linear(scaled)
            scaled.mul_(2)  # the linear's backward wants it as it was
            return F.relu(hidden) + scaled

    class InItsOwnDtype(Doubles):
        def __init__(self) -> None:
            super().__init__()
            self.constant = torch.eye(16)

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) @ self.constant

    for kind in (Doubles, InItsOwnDtype):
        model, input = kind().eval(), torch.randn(5, 16)
        result = _fuse(model, input, op=op)
        assert [tried.decision for tried in result.replacements] == [Decision.WRONG]
        with torch.no_grad():
            torch.testing.assert_close(result.model(input), model(input))


def test_an_output_of_another_container_keeps_its_kind(faster: None, op: FusedOp) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain, self.log = Chain(), []

        def forward(self, input: Tensor) -> OrderedDict[str, Tensor]:
            return OrderedDict(b=self.chain(input), a=F.relu(input + self.chain.linear.bias))

    result = _fuse(Named(), torch.randn(5, 16), op=op)
    assert type(result.model(torch.randn(5, 16))) is OrderedDict
    assert [tried.module for tried in result.kept] == ["chain"]


def test_compiled_children_stay_whole(faster: None, op: FusedOp) -> None:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU())

    scripted = torch.jit.script(layers())
    compiled = torch.compile(layers(), backend="eager")
    model = nn.Sequential(scripted, compiled, layers())
    input = torch.randn(5, 16)
    result = _fuse(model, input, op=op)
    assert [tried.module for tried in result.kept] == ["2"]
    assert [module.module for module in result.left if "compiled" in module.reason] == ["0", "1"]
    torch.testing.assert_close(result.model(input), model(input))


def test_a_model_that_cannot_be_copied_or_run_in_float64(faster: None, op: FusedOp) -> None:
    class Locked(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(TargetError, match="cannot be copied"):
        _fuse(Locked(), torch.randn(5, 16), op=op)
    result = _fuse(nn.DataParallel(Chain()), torch.randn(5, 16), op=op)
    assert len(result.kept) == 1 and "does not run in float64" in result.proof


def test_softmax_without_a_dim_is_refused(faster: None) -> None:
    result = _fuse(
        lambda input: F.softmax(input, dim=None, _stacklevel=5),
        torch.randn(5, 16),
        op=contract("softmax"),
    )
    assert [tried.decision for tried in result.replacements] == [Decision.REFUSED]
    assert result.replacements[0].reason.startswith("'dim' must be an int")
    assert "-> softmax: 'dim' must be an int" in str(result)  # the name once


def test_a_model_that_raises_is_one_sentence(op: FusedOp) -> None:
    with pytest.raises(TargetError, match="raised RuntimeError on the example inputs"):
        _fuse(nn.Linear(3, 2), torch.randn(4, 5), op=op)


def test_really_measures_and_says_what_it_did(model: Model, op: FusedOp) -> None:
    result = fuse_with_report(model, [torch.randn(8, 16)], ops=[op], budget_s=0.05)
    assert len(result.replacements) == 4
    for tried in result.replacements:
        assert tried.before_us is not None and 0.1 < tried.before_us < 1e7
    text = str(result)
    assert text.startswith(f"{len(result.kept)} of 4 chains replaced; forward and backward ")
    assert "test_fuse.py:" in text


def test_public_name(faster: None, model: Model, op: FusedOp) -> None:
    input = torch.randn(8, 16)
    fused = fuselab.fuse(model, input, ops=[op])
    torch.testing.assert_close(_same_draws(fused, input), _same_draws(model, input))


def _twice(input: Tensor) -> Tensor:
    doubled = input * 2
    return torch.relu(doubled + doubled)


class _BehindLinear(nn.Module):
    """A linear layer and an activation; ``before`` stands in front of them."""

    def __init__(self, before: Any) -> None:
        super().__init__()
        self.before, self.linear = before, nn.Linear(16, 16)

    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(self.linear(self.before(input)))


def test_a_value_that_is_both_operands_of_a_sum_is_no_part_of_a_chain(faster: None) -> None:
    input = torch.randn(8, 16)
    result = fuse_with_report(_twice, (input,), budget_s=0.01)
    assert torch.equal(result.model(input), _twice(input))
    assert all("mul" not in tried.chain for tried in result.replacements)


@pytest.mark.parametrize("before", [nn.Identity(), lambda input: input[0]])
def test_what_only_names_or_indexes_a_tensor_may_stand_before_a_chain(
    faster: None, op: FusedOp, before: Any
) -> None:
    model, input = _BehindLinear(before), torch.randn(4, 8, 16)
    result = _fuse(model, input, op=op)
    assert [tried.chain for tried in result.kept] == ["add → relu"]
    torch.testing.assert_close(result.model(input), model(input))


def test_a_hook_on_an_identity_runs_after_fusing_too(faster: None, op: FusedOp) -> None:
    model, input = _BehindLinear(nn.Identity()), torch.randn(4, 16)
    fused = _fuse(model, input, op=op).model
    fused.before.register_forward_hook(lambda module, args, output: output + 1)
    torch.testing.assert_close(fused(input), torch.relu(model.linear(input + 1)))


def test_inputs_that_do_not_fit_are_refused_with_the_signature(model: Model) -> None:
    input = torch.randn(8, 16)
    with pytest.raises(TargetError, match=r"^example_inputs does not fit Model\(input: .*too many"):
        fuselab.fuse(model, (input, input, input))
    with pytest.raises(TargetError, match=r"^example_inputs does not fit _twice\(.*missing"):
        fuse_with_report(_twice, ())
    with pytest.raises(TargetError, match=r"^kwargs is a Tensor, not a dict.* one tuple"):
        fuse_with_report(model, input, input)


@pytest.mark.parametrize("kind", ["closure", "attribute", "forward"])
def test_a_lambda_that_holds_layers_is_looked_into(faster: None, op: FusedOp, kind: str) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            if kind == "forward":
                self.forward = lambda input: torch.relu(self.linear(input))
            else:
                self.held = lambda input: torch.relu(self.linear(input))

        def forward(self, input: Tensor) -> Tensor:
            return self.held(input)

    holder, input = Holder(), torch.randn(5, 16)
    model = (lambda input: holder(input)) if kind == "closure" else holder
    result = _fuse(model, input, op=op)
    assert [tried.chain for tried in result.kept] == ["add → relu"] and result.left == ()
    assert result.training and "proved against float64" in result.proof
    torch.testing.assert_close(result.model(input), holder(input))
    assert not hasattr(type(holder), "fused_source")
    if kind == "forward":
        assert "forward" in vars(holder) and "forward" not in vars(result.model)
    with torch.no_grad():
        holder.linear.weight.zero_()  # the parameters are the same
    torch.testing.assert_close(result.model(input), holder(input))


LAYER = nn.Linear(16, 16)


def test_a_function_around_a_layer_of_its_file_is_looked_into(faster: None, op: FusedOp) -> None:
    def step(input: Tensor) -> Tensor:
        return torch.relu(LAYER(input))

    input = torch.randn(5, 16)
    result = _fuse(step, input, op=op)
    assert len(result.kept) == 1
    torch.testing.assert_close(result.model(input), step(input))
    assert step.__globals__["LAYER"] is LAYER


class Configured(nn.Module):
    """Reads its configuration and another one that is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))
        self.config = SimpleNamespace(scale=2.0, inner=SimpleNamespace(names=["a"]))

    def forward(self, x: Tensor, options: Any) -> Tensor:
        scale = self.config.scale * len(self.config.inner.names)
        return torch.relu(x + self.bias) * scale + options.shift


@pytest.mark.parametrize(
    "change",
    [
        lambda model, options: setattr(model.config, "scale", 3.0),
        lambda model, options: model.config.inner.names.append("b"),
        lambda model, options: setattr(model.config, "scale", torch.ones(4)),
        lambda model, options: setattr(options, "shift", 5.0),
        lambda model, options: setattr(options, "shift", torch.ones(4)),
    ],
)
def test_a_configuration_that_changes_is_obeyed(faster: None, op: FusedOp, change: Any) -> None:
    model, x, options = Configured(), torch.randn(3, 4), SimpleNamespace(shift=1.0)
    result = fuse_with_report(model, (x, options), ops=[op])
    assert result.kept
    torch.testing.assert_close(result.model(x, options), model(x, options))
    change(model, options)  # both models share these objects
    torch.testing.assert_close(result.model(x, options), model(x, options))


def test_an_argument_that_holds_tensors_or_arrays_is_compared(faster: None, op: FusedOp) -> None:
    @dataclass
    class Pair:
        first: Tensor
        second: Tensor

    class Shifted(nn.Module):
        def forward(self, x: Tensor, bias: Tensor, pair: Pair) -> Tensor:
            return torch.relu(x + bias)

    x, bias = torch.randn(3, 4), torch.randn(4)
    result = fuse_with_report(Shifted(), (x, bias, Pair(x, x)), ops=[op])
    assert result.kept
    torch.testing.assert_close(result.model(x, bias, Pair(bias, bias)), torch.relu(x + bias))

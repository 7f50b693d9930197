"""LoRALinear and its neighbours: formulas, what trains, merging, loading, fits, and peft itself."""

from __future__ import annotations

import copy
import importlib.util
import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselab.errors import (
    ArgumentError,
    DataError,
    DifferentiationError,
    DtypeError,
    OutputError,
    ShapeError,
    UnknownNameError,
)
from fuselab.nn import LoRALinear
from fuselab.nn.lora_linear import adapters_from_difference, add_adapters
from fuselab.nn.peft_checkpoint import load_adapters, save_adapters

NO_PEFT = "peft, the oracle of this test, is not installed"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def trained(layer: LoRALinear, seed: int = 0) -> LoRALinear:
    """The layer with an adapter as training leaves it: no factor 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for factor in (layer.lora_a, layer.lora_b):
            factor.copy_(torch.randn(factor.shape, generator=generator) / 4)
    return layer


class Block(nn.Module):
    """Two projections and a head, named as models name them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"q_proj": nn.Linear(8, 8), "v_proj": nn.Linear(8, 8)})
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8, bias=False))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention["q_proj"](x) * self.attention["v_proj"](x)
        return self.head(self.layers(x))


@pytest.fixture
def block() -> Block:
    return Block()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


# The layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["identity", "relu", "gelu"])
def test_the_formula(bias, activation, x):
    linear = nn.Linear(8, 6, bias=bias)
    layer = trained(LoRALinear.wrap(linear, rank=3, alpha=6.0, activation=activation))
    expected = F.linear(x, linear.weight, linear.bias)
    expected = expected + 2.0 * (x @ layer.lora_a.t()) @ layer.lora_b.t()
    expected = {"identity": lambda y: y, "relu": F.relu, "gelu": F.gelu}[activation](expected)
    torch.testing.assert_close(layer(x), expected)


def test_a_fresh_adapter_changes_no_bit(x):
    linear = nn.Linear(8, 6)
    layer = LoRALinear.wrap(linear, 4, 4)
    assert torch.equal(layer(x), linear(x))
    assert layer.lora_a.any() and not layer.lora_b.any()
    bound = 8**-0.5  # kaiming_uniform with a = sqrt(5)
    assert layer.lora_a.abs().max() <= bound and layer.lora_a.abs().max() > bound / 4


def test_it_shares_freezes_and_registers_its_parameters():
    linear = nn.Linear(8, 6).double()
    layer = LoRALinear.wrap(linear, 2, 4)
    assert layer.weight is linear.weight and layer.bias is linear.bias
    named = dict(layer.named_parameters())
    assert [name for name, value in named.items() if value.requires_grad] == ["lora_a", "lora_b"]
    assert named.keys() == {"weight", "bias", "lora_a", "lora_b"}
    assert {value.dtype for value in named.values()} == {torch.float64}
    assert {value.dtype for value in layer.bfloat16().parameters()} == {torch.bfloat16}


def test_training_moves_the_adapter_alone(x):
    layer = LoRALinear.wrap(nn.Linear(8, 6), 2, 2.0, "silu")
    before = copy.deepcopy(layer.state_dict())
    x.requires_grad_()
    optimizer = torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = (layer(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2 and x.grad is not None and x.grad.any()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]) == (name in ("weight", "bias"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_merge_and_unmerge_restore_every_bit(dtype, x):
    layer = trained(LoRALinear.wrap(nn.Linear(8, 6), 3, 1.0, "relu")).to(dtype).eval()
    before, output = copy.deepcopy(layer.state_dict()), layer(x.to(dtype))
    layer.merge()
    assert layer.merged and "merged=True" in repr(layer)
    exact = layer.weight.double() + layer.scale * layer.lora_b.double() @ layer.lora_a.double()
    assert torch.equal(layer.merged_weight, exact.float().to(dtype)) or torch.allclose(
        layer.merged_weight.double(), exact, rtol=torch.finfo(dtype).eps
    )
    expected = F.relu(F.linear(x.to(dtype), layer.merged_weight, layer.bias))
    assert torch.equal(layer(x.to(dtype)), expected)
    assert layer.state_dict().keys() == before.keys()  # what is saved is never the merged weight
    layer.unmerge()
    assert not layer.merged
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(layer(x.to(dtype)), output)


def test_a_merged_layer_refuses_to_train(x):
    layer = trained(LoRALinear.wrap(nn.Linear(8, 6), 3, 1.0))
    layer.merge()
    with pytest.raises(DifferentiationError, match="call unmerge"):
        layer(x)
    with torch.no_grad():
        layer(x)
    x.requires_grad_()
    layer.eval()(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.merged_weight.sum(0).expand(5, 8))


def test_state_dicts_of_the_layer_it_replaces_and_its_own(x):
    linear, other = nn.Linear(8, 6), nn.Linear(8, 6)
    layer = trained(LoRALinear.wrap(linear, 3, 1.0))
    adapter = layer.lora_a.clone()
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer.weight, other.weight) and torch.equal(layer.lora_a, adapter)
    fresh = LoRALinear.wrap(nn.Linear(8, 6), 3, 1.0)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), layer(x))
    half = layer.state_dict()
    del half["lora_b"]
    with pytest.raises(RuntimeError, match="lora_b"):
        fresh.load_state_dict(half)
    with pytest.raises(RuntimeError, match="weight"):
        fresh.load_state_dict({"bias": torch.zeros(6)})
    fresh.eval().merge()
    fresh.load_state_dict(trained(layer, seed=5).state_dict())
    torch.testing.assert_close(fresh(x), layer(x))  # merged anew, not with the old adapter


def test_refusals_of_the_layer():
    linear = nn.Linear(8, 6)
    with pytest.raises(ArgumentError, match="'rank' is 0"):
        LoRALinear.wrap(linear, 0, 1.0)
    with pytest.raises(UnknownNameError) as refused:
        LoRALinear.wrap(linear, 1, 1.0, "relu6")
    assert (refused.value.kind, refused.value.name) == ("activation", "relu6")
    assert linear.weight.requires_grad  # nothing is frozen by a refusal
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 6))
    with pytest.raises(ArgumentError, match="parametrization"):
        LoRALinear.wrap(normed, 1, 1.0)
    for rank in (1.5, "2", None):
        with pytest.raises(ArgumentError, match="'rank' is"):
            LoRALinear.wrap(linear, rank, 1.0)
    for alpha in (float("nan"), None, torch.ones(())):  # a NaN would only show in every output
        with pytest.raises(ArgumentError, match="'alpha' is"):
            LoRALinear.wrap(linear, 1, alpha)
    for other in (None, nn.Embedding(3, 4), nn.LazyLinear(3)):
        with pytest.raises(ArgumentError, match=r"expected an nn\.Linear"):
            LoRALinear.wrap(other, 1, 1.0)
    with pytest.raises(DtypeError, match="complex64"):
        LoRALinear.wrap(nn.Linear(8, 6, dtype=torch.complex64), 1, 1.0)
    with pytest.raises(ArgumentError, match="has an adapter"):
        LoRALinear.wrap(LoRALinear.wrap(linear, 1, 1.0), 1, 1.0)


def test_merged_in_inference_mode_it_still_gives_the_inputs_gradient(x):
    layer = trained(LoRALinear.wrap(nn.Linear(8, 6), 3, 1.0)).eval()
    apart = torch.func.grad(lambda input: layer(input).sum())(x)
    with torch.inference_mode():
        layer.merge()
    input = x.clone().requires_grad_()
    layer(input).sum().backward()
    torch.testing.assert_close(input.grad, apart)


# A model's layers


@pytest.mark.parametrize(
    "pattern, expected",
    [
        (["q_proj", "v_proj"], ["attention.q_proj", "attention.v_proj"]),
        (["attention.q_proj", "0"], ["attention.q_proj", "layers.0"]),
        (r"layers\.\d", ["layers.0", "layers.2"]),
        (".*", ["attention.q_proj", "attention.v_proj", "layers.0", "layers.2", "head"]),
    ],
)
def test_patterns_name_layers(block, x, pattern, expected):
    output = block(x)
    assert add_adapters(block, pattern, rank=2, alpha=4.0) is block
    found = [name for name, module in block.named_modules() if isinstance(module, LoRALinear)]
    assert found == expected
    assert torch.equal(block(x), output)
    trains = [name for name, value in block.named_parameters() if value.requires_grad]
    assert trains == [f"{name}.lora_{letter}" for name in expected for letter in "ab"]


def test_adapters_added_before_go_on_training(block):
    add_adapters(block, ["q_proj"], 2, 1.0)
    add_adapters(block, ["v_proj"], 4, 1.0)
    trains = [name for name, value in block.named_parameters() if value.requires_grad]
    assert [name.split(".")[1] for name in trains] == ["q_proj"] * 2 + ["v_proj"] * 2


def test_a_layer_of_two_names_stays_one(x):
    shared = nn.Linear(8, 8)
    model = add_adapters(nn.Sequential(shared, nn.ReLU(), shared), ".*", 2, 1.0)
    assert model[0] is model[2] and isinstance(model[0], LoRALinear)


def test_patterns_that_name_nothing_or_no_plain_linear(block):
    for pattern in (["k_proj"], "q_proj", []):  # the string is for the whole name
        with pytest.raises(ArgumentError, match="names no nn"):
            add_adapters(block, pattern, 2, 1.0)
    with pytest.raises(ArgumentError, match=r"LoRALinear\.wrap takes a single layer"):
        add_adapters(nn.Linear(3, 3), ".*", 2, 1.0)
    attention = nn.MultiheadAttention(8, 2)  # reads out_proj.weight itself
    with pytest.raises(ArgumentError, match="'out_proj' is a NonDynamicallyQuantizableLinear"):
        add_adapters(attention, ["out_proj"], 2, 1.0)
    for pattern in ("(", None, 3):
        with pytest.raises(ArgumentError, match="regular expression"):
            add_adapters(block, pattern, 2, 1.0)
    block.attention["out"] = attention.out_proj
    with pytest.raises(ArgumentError, match="out' is a NonDynamicallyQuantizableLinear"):
        add_adapters(block, ".*", 2, 1.0)  # after layers that it could wrap
    assert all(value.requires_grad for value in block.parameters())


def test_the_inference_path_of_a_transformer_does_not_pass_adapters_by():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    tokens = torch.randn(2, 3, 8)
    add_adapters(encoder, ["linear1", "linear2"], 2, 8.0)
    for name in ("linear1", "linear2"):
        trained(encoder.get_submodule(name))
    expected = encoder(tokens)
    with torch.inference_mode():
        torch.testing.assert_close(encoder.eval()(tokens), expected)


# Adapters from a difference of weights


@pytest.mark.parametrize("scale", [1.0, 0.5, -2.0])
def test_a_difference_of_low_rank_is_found(scale):
    difference = torch.randn(12, 3) @ torch.randn(3, 9)
    fit = adapters_from_difference(difference, 3, scale)
    assert (fit.lora_a.shape, fit.lora_b.shape) == ((3, 9), (12, 3))
    torch.testing.assert_close(scale * fit.lora_b @ fit.lora_a, difference, atol=1e-5, rtol=1e-5)
    assert fit.error_per_rank.shape == (10,) and fit.error_per_rank[0] == 1
    assert fit.error_per_rank[2] > 0.05 and fit.error_per_rank[3] < 1e-6


def test_the_error_of_every_rank_is_that_of_its_adapter():
    difference = torch.randn(7, 11, dtype=torch.float64)
    for rank in range(1, 8):
        fit = adapters_from_difference(difference, rank)
        error = (difference - fit.lora_b @ fit.lora_a).norm() / difference.norm()
        assert abs(error - fit.error_per_rank[rank]) < 1e-12
    assert (fit.error_per_rank.diff() < 0).all()
    half = adapters_from_difference(difference.half(), 2)
    assert half.lora_a.dtype == torch.float16
    nothing = adapters_from_difference(torch.zeros(4, 3), 1)
    assert not nothing.error_per_rank.any() and not nothing.lora_b.any()


@pytest.mark.parametrize(
    "difference, rank, scale, error, words",
    [
        (torch.ones(3), 1, 1.0, ShapeError, r"\(3,\)"),
        (torch.ones(3, 4), 4, 1.0, ArgumentError, "'rank' is 4; expected 1 to 3"),
        (torch.ones(3, 4), 0, 1.0, ArgumentError, "'rank' is 0"),
        (torch.ones(3, 4), 1.5, 1.0, ArgumentError, "'rank' is 1.5"),
        (torch.ones(3, 4), 1, None, ArgumentError, "'scale' is None"),
        (torch.ones(3, 4, dtype=torch.int32), 1, 1.0, DtypeError, "int32"),
        (torch.ones(3, 4), 1, 0.0, ArgumentError, "'scale' is 0"),
        (torch.full((3, 4), torch.nan), 1, 1.0, ArgumentError, "NaN"),
    ],
)
def test_differences_that_have_no_adapter(difference, rank, scale, error, words):
    with pytest.raises(error, match=words):
        adapters_from_difference(difference, rank, scale)


# Checkpoints


def adapted(block: Block) -> Block:
    """Adapters of two ranks and two alphas."""
    add_adapters(block, ["q_proj", "v_proj"], 2, 4.0)
    add_adapters(block, r"layers\.0", 3, 1.0)
    for seed, name in enumerate(("attention.q_proj", "attention.v_proj", "layers.0")):
        trained(block.get_submodule(name), seed)
    return block


@pytest.fixture(params=["safetensors", "torch.save"])
def file_format(request, monkeypatch):
    if request.param == "torch.save":
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "safetensors" else find(name)
        )
    else:
        pytest.importorskip("safetensors", reason="safetensors is not installed")
    return request.param


def test_a_checkpoint_comes_back(block, x, tmp_path, file_format):
    plain = copy.deepcopy(block)
    save_adapters(adapted(block), tmp_path)
    name = "adapter_model.safetensors" if file_format == "safetensors" else "adapter_model.bin"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", name]
    assert load_adapters(plain, tmp_path) is plain
    assert torch.equal(plain(x), block(x))
    assert plain.layers[0].rank == 3 and plain.layers[0].scale == 1 / 3
    trains = [name for name, value in plain.named_parameters() if value.requires_grad]
    assert len(trains) == 6 and all("lora_" in name for name in trains)
    load_adapters(plain, tmp_path)  # over what is there
    assert torch.equal(plain(x), block(x))


def test_keys_and_shapes_are_pefts(block, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "safetensors" else find(name)
    )
    save_adapters(adapted(block), tmp_path)
    tensors = torch.load(tmp_path / "adapter_model.bin", weights_only=True)
    assert tensors.keys() == {
        f"base_model.model.{name}.lora_{letter}.weight"
        for name in ("attention.q_proj", "attention.v_proj", "layers.0")
        for letter in "AB"
    }
    prefix = "base_model.model.layers.0"
    assert tensors[f"{prefix}.lora_A.weight"].shape == (3, 8)
    assert tensors[f"{prefix}.lora_B.weight"].shape == (12, 3)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 4.0)
    assert list(config["rank_pattern"].values()) == [3]
    assert list(config["alpha_pattern"].values()) == [1.0]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"peft_type": "IA3"}, "peft_type 'LORA'"),
        ({"lora_alpha": None}, "'lora_alpha' is None"),
        ({"use_dora": True}, "'use_dora' is set"),
        ({"lora_alpha": float("nan")}, "'lora_alpha' is nan"),
        ({"alpha_pattern": ["layers"]}, "expected numbers by name"),
        ({"alpha_pattern": {"layers": "2"}}, "expected numbers by name"),
        ({"alpha_pattern": {"(": 2}}, "no regular expression"),
    ],
)
def test_configurations_that_are_something_else(block, tmp_path, change, words):
    save_adapters(adapted(copy.deepcopy(block)), tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=words):
        load_adapters(block, tmp_path)


def test_checkpoints_that_do_not_fit_leave_the_model_alone(block, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "safetensors" else find(name)
    )
    save_adapters(adapted(copy.deepcopy(block)), tmp_path)
    whole = torch.load(tmp_path / "adapter_model.bin")
    prefix = "base_model.model"
    a, b = f"{prefix}.layers.0.lora_A.weight", f"{prefix}.layers.0.lora_B.weight"
    for changed, words in (
        ({f"{prefix}.layers.1.lora_A.weight": whole[a]}, "is a ReLU"),
        ({f"{prefix}.layers.9.lora_A.weight": whole[a]}, "does not exist"),
        ({a: whole[a][:2]}, r"expected \(r, 8\) and \(12, r\)"),
        ({f"{prefix}.layers.0.bias": whole[b]}, "is not an adapter of a linear layer"),
        ({a: None}, "lora_B of 'layers.0' and not the other half"),
        ({a: 1.0}, "lora_A.weight' is no dense tensor of a floating dtype"),
        ({a: torch.ones(3, 8, dtype=torch.int32)}, "no dense tensor of a floating dtype"),
        ({b: torch.ones(())}, r"expected \(r, 8\) and \(12, r\)"),
        (dict.fromkeys(whole), "holds no adapter"),
    ):
        tensors = {key: value for key, value in (whole | changed).items() if value is not None}
        torch.save(tensors, tmp_path / "adapter_model.bin")
        with pytest.raises(DataError, match=words):
            load_adapters(block, tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"PK nonsense")
    with pytest.raises(DataError, match="cannot be read"):
        load_adapters(block, tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        load_adapters(block, tmp_path / "nowhere")
    assert not any(isinstance(module, LoRALinear) for module in block.modules())
    assert all(value.requires_grad for value in block.parameters())


def test_what_cannot_be_saved(block, tmp_path):
    with pytest.raises(ArgumentError, match="no LoRALinear"):
        save_adapters(block, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        save_adapters(adapted(block), tmp_path / "file")


# peft itself


def test_peft_reads_what_we_write(block, x, tmp_path):
    peft = pytest.importorskip("peft", reason=NO_PEFT)
    plain = copy.deepcopy(block)
    save_adapters(adapted(block), tmp_path)
    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path))
    torch.testing.assert_close(theirs(x), block(x))
    adapted_names = [name for name, _ in theirs.named_parameters() if "lora_A" in name]
    assert len(adapted_names) == 3


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch.save"])
@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_we_read_what_peft_writes(block, x, tmp_path, safe, rank_stabilised):
    peft = pytest.importorskip("peft", reason=NO_PEFT)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "layers.0"],
        rank_pattern={"layers.0": 2},
        alpha_pattern={"q_proj": 16},
        use_rslora=rank_stabilised,
    )
    theirs = peft.get_peft_model(copy.deepcopy(block), config)
    for name, value in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(value, std=0.3)
    theirs.save_pretrained(str(tmp_path), safe_serialization=safe)
    ours = load_adapters(block, tmp_path)
    torch.testing.assert_close(ours(x), theirs(x))
    (loss, known) = (model(x).square().sum() for model in (ours, theirs))
    loss.backward()
    known.backward()
    gradients = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): value.grad
        for name, value in theirs.named_parameters()
        if value.grad is not None
    }
    for name, value in ours.named_parameters():
        if value.requires_grad:
            key = name.replace("lora_a", "lora_A").replace("lora_b", "lora_B")
            torch.testing.assert_close(value.grad, gradients[key])
    ours.eval()
    for module in ours.modules():
        if isinstance(module, LoRALinear):
            module.merge()
    torch.testing.assert_close(ours(x), theirs.merge_and_unload().eval()(x))

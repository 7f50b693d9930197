"""fuselab.fuse on models as people write them: embeddings, interactions, MLPs and LoRA layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselab.errors import DtypeError
from fuselab.fusion import fuse as fuse_module
from fuselab.fusion.fuse import fuse_with_report
from fuselab.fusion.result import Decision, FuseResult
from fuselab.measure.verdict import Outcome, Verdict
from fuselab.models.dlrm import SMALL, Dlrm, get_inputs
from fuselab.nn import FusedEmbeddingCollection
from fuselab.ops import contract

SIZES, WIDTH, BATCH = (5, 3, 7, 2), 3, 6
FASTER = Verdict(Outcome.FASTER, 2.0, 2.0, 2.0, 12)
LIBRARY = (
    "embedding_lookup",
    "dot_interaction",
    "outer_interaction_linear",
    "linear_activation",
    "linear_sigmoid",
    "lora_linear",
)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replacement that is right is kept, though a CPU would not choose or time it so."""
    monkeypatch.setattr(fuse_module, "measure", lambda *args, **kwargs: (2.0, 1.0, FASTER))
    monkeypatch.setattr(fuse_module, "choose", lambda op, arguments: "reference of the test")


def _fuse(model: nn.Module, *inputs: Tensor) -> FuseResult:
    return fuse_with_report(model, inputs, ops=[contract(name) for name in LIBRARY])


def _kept(result: FuseResult) -> list[str]:
    return sorted(tried.op.short_name for tried in result.kept)


def _by_column(tables: nn.ModuleList, ids: Tensor) -> list[Tensor]:
    return [table(ids[:, column]) for column, table in enumerate(tables)]


def _by_modulus(tables: nn.ModuleList, ids: Tensor) -> list[Tensor]:
    return [
        table((ids[:, column] + 1) % size)
        for column, (table, size) in enumerate(zip(tables, SIZES, strict=True))
    ]


def _by_row(tables: nn.ModuleList, ids: Tensor) -> list[Tensor]:
    transposed = ids.t()
    return [table(transposed[row]) for row, table in enumerate(tables)]


def _by_any(tables: nn.ModuleList, ids: Tensor) -> list[Tensor]:
    return [table(ids.select(1, column)) for column, table in enumerate(tables)]


def _as_bags(tables: nn.ModuleList, ids: Tensor) -> list[Tensor]:
    return [table(ids[:, column : column + 1]) for column, table in enumerate(tables)]


def _as_unsqueezed_bags(tables: nn.ModuleList, ids: Tensor) -> list[Tensor]:
    return [table(ids[:, column].unsqueeze(1)) for column, table in enumerate(tables)]


def _pairs(vectors: Tensor, dense: Tensor, count: int) -> Tensor:
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    lower = torch.tril_indices(count, count, offset=-1, device=products.device)
    return torch.cat([dense, products[:, lower[0], lower[1]]], dim=1)


def _dot_of_stack(dense: Tensor, vectors: list[Tensor]) -> Tensor:
    return _pairs(torch.stack([dense, *vectors], dim=1), dense, len(vectors) + 1)


def _dot_of_view(dense: Tensor, vectors: list[Tensor]) -> Tensor:
    batch, width = dense.shape
    row = torch.cat([dense, *vectors], dim=1)
    return _pairs(row.view((batch, -1, width)), dense, len(vectors) + 1)


def _dot_of_tensor(dense: Tensor, vectors: list[Tensor]) -> Tensor:
    embeddings = torch.stack(vectors, dim=1)
    return _pairs(torch.cat([dense[:, None], embeddings], dim=1), dense, len(vectors) + 1)


def _outer(dense: Tensor, vectors: list[Tensor]) -> Tensor:
    row = torch.cat([dense, *vectors], dim=1)
    return (row.unsqueeze(2) * row.unsqueeze(1)).flatten(1)


def _outer_by_bmm(dense: Tensor, vectors: list[Tensor]) -> Tensor:
    row = torch.cat([dense, *vectors], dim=-1)
    return torch.bmm(row.unsqueeze(2), row.unsqueeze(1)).flatten(start_dim=1)


def _cat(dense: Tensor, vectors: list[Tensor]) -> Tensor:
    return torch.cat([dense, *vectors], dim=1)


LookUp = Callable[[nn.ModuleList, Tensor], list[Tensor]]
Interact = Callable[[Tensor, list[Tensor]], Tensor]
INNER = {_dot_of_stack: 13, _dot_of_view: 13, _dot_of_tensor: 13, _cat: 15}


class Recommender(nn.Module):
    """A DLRM of four tables."""

    def __init__(self, look_up: LookUp = _by_column, interact: Interact = _dot_of_stack) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.look_up, self.interact = look_up, interact
        kind = nn.EmbeddingBag if look_up in (_as_bags, _as_unsqueezed_bags) else nn.Embedding
        self.tables = nn.ModuleList(kind(size, WIDTH) for size in SIZES)
        self.bottom = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, WIDTH), nn.ReLU())
        inner = INNER.get(interact, 15 * 15)
        self.top = nn.Sequential(nn.Linear(inner, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        vector = self.bottom(dense)
        return torch.sigmoid(self.top(self.interact(vector, self.look_up(self.tables, ids))))


def _inputs(batch: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    ids = [torch.randint(size, (batch,), generator=generator) for size in SIZES]
    return torch.randn(batch, 4, generator=generator), torch.stack(ids, dim=1)


def _train(model: nn.Module, steps: int = 5) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        dense, ids = _inputs(BATCH + step)
        loss = F.binary_cross_entropy(model(dense, ids), (ids[:, :1] % 2).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _assert_same(model: nn.Module, fused: nn.Module, *inputs: Tensor) -> None:
    expected, actual = model(*inputs), fused(*inputs)
    torch.testing.assert_close(actual, expected)
    wanted = [value for value in model.parameters() if value.requires_grad]
    torch.testing.assert_close(
        torch.autograd.grad(actual.square().sum(), wanted),
        torch.autograd.grad(expected.square().sum(), wanted),
    )


MLPS = ["linear_activation"] * 3


@pytest.mark.parametrize(
    ("look_up", "interact", "operators"),
    [
        (_by_column, _dot_of_stack, ["dot_interaction", *MLPS]),
        (_by_modulus, _dot_of_view, ["dot_interaction", *MLPS]),
        (_by_row, _dot_of_tensor, ["dot_interaction", *MLPS]),
        (_as_bags, _dot_of_stack, ["dot_interaction", *MLPS]),
        (_as_unsqueezed_bags, _cat, MLPS),
        # The first layer of ``top`` is replaced twice: here, and where ``top`` is called by itself.
        (_by_any, _outer, ["outer_interaction_linear", *MLPS]),
        (_by_column, _outer_by_bmm, ["outer_interaction_linear", *MLPS]),
    ],
)
def test_a_recommender_is_replaced_whole(
    taken: None,
    monkeypatch: pytest.MonkeyPatch,
    look_up: LookUp,
    interact: Interact,
    operators: list[str],
) -> None:
    model = Recommender(look_up, interact)
    result = _fuse(model, *_inputs())
    assert _kept(result) == sorted([*operators, "embedding_lookup", "linear_sigmoid"])
    assert "proved against float64" in result.proof
    for batch in (BATCH, 1, 2, 33):
        _assert_same(model, result.model, *_inputs(batch))
    source = type(result.model).fused_source
    assert "self.tables(" not in source and "bmm" not in source and "nn.linear" not in source
    # And it is that source which runs, though layers inside were replaced too.
    monkeypatch.setattr(Recommender, "forward", None)
    assert result.model(*_inputs()).shape == (BATCH, 1)


def test_it_trains_as_before_and_its_checkpoint_is_the_models(taken: None) -> None:
    model, plain = Recommender(_by_modulus), Recommender(_by_modulus)
    fused = _fuse(model, *_inputs()).model
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert all(a is b for a, b in zip(fused.parameters(), model.parameters(), strict=True))
    torch.testing.assert_close(_train(fused), _train(plain))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], value)
    other = Recommender(_by_modulus)
    other.load_state_dict(fused.state_dict())
    fused.load_state_dict(other.state_dict())
    fused.eval(), other.eval()
    torch.testing.assert_close(fused(*_inputs()), other(*_inputs()))


def test_a_hash_by_other_sizes_than_the_tables_stays_what_it_is(taken: None) -> None:
    model = Recommender(_by_modulus)
    fused = _fuse(model, *_inputs()).model
    ids = torch.randint(-1, 10**6, (BATCH, 4))
    _assert_same(model, fused, _inputs()[0], ids)
    fused.tables[0] = model.tables[0] = nn.Embedding(50, WIDTH)  # the sizes of the hash stay
    _assert_same(model, fused, _inputs()[0], ids)


def test_more_columns_than_tables(taken: None) -> None:
    model = Recommender()
    dense, ids = _inputs()
    wide = torch.cat([ids, ids], dim=1)
    result = _fuse(model, dense, wide)
    assert "embedding_lookup" in _kept(result)
    _assert_same(model, result.model, dense, wide)


def test_one_sample_without_a_batch(taken: None) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Embedding(5, 3), nn.Embedding(4, 3)

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return torch.stack([self.first(first), self.second(second)], dim=1)

    model, batch = Looks(), (torch.tensor([1, 2]), torch.tensor([0, 3]))
    fused = _fuse(model, *batch)
    assert _kept(fused) == ["embedding_lookup"]
    _assert_same(model, fused.model, batch[0][0], batch[1][0])
    refused = _fuse(model, batch[0][0], batch[1][0])
    assert [tried.decision for tried in refused.replacements] == [Decision.REFUSED]
    _assert_same(model, refused.model, *batch)


def test_an_id_out_of_range_is_an_error_still(taken: None) -> None:
    fused = _fuse(Recommender(), *_inputs()).model
    dense, ids = _inputs()
    ids[1, 2] = SIZES[2]
    with pytest.raises(IndexError):
        fused(dense, ids)


def test_ids_that_an_embedding_refuses_are_an_error_still(taken: None) -> None:
    result = _fuse(Recommender(_by_column, _cat), *_inputs())
    assert "embedding_lookup" in _kept(result)
    fused, (dense, ids) = result.model, _inputs()
    for dtype in (torch.float32, torch.uint8):
        with pytest.raises(DtypeError, match="'ids'"):
            fused(dense, ids.to(dtype))


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_a_collection_that_steps_in_its_backward_keeps_its_bits(optimizer: str) -> None:
    tables = FusedEmbeddingCollection(SIZES, WIDTH, optimizer=optimizer, learning_rate=0.5)
    model = nn.Sequential(tables, nn.Flatten(), nn.Linear(12, 3), nn.ReLU())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = fuse_with_report(model, [_inputs()[1]], budget_s=0.02)
    assert result.training and not result.left
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert result.model[0][0].weight is tables[0].weight


@pytest.mark.parametrize(
    ("option", "reason"), [({"padding_idx": 0}, "padding_idx=0"), ({"sparse": True}, "sparse=True")]
)
def test_a_table_that_is_more_than_a_look_up_stays(
    taken: None, option: dict[str, Any], reason: str
) -> None:
    model = Recommender()
    model.tables[2] = nn.Embedding(SIZES[2], WIDTH, **option)
    result = _fuse(model, *_inputs())
    assert "embedding_lookup" not in _kept(result)
    assert "dot_interaction" in _kept(result)
    assert [left.module for left in result.left] == ["tables.2"]
    assert reason in result.left[0].reason
    torch.testing.assert_close(result.model(*_inputs()), model(*_inputs()))


def test_a_hook_on_a_table_keeps_it_and_one_added_later_is_obeyed(taken: None) -> None:
    model = Recommender()
    handle = model.tables[1].register_forward_hook(lambda module, given, output: output + 1)
    result = _fuse(model, *_inputs())
    assert "embedding_lookup" not in _kept(result)
    assert ("tables.1", "it has hooks") in {(one.module, one.reason) for one in result.left}
    _assert_same(model, result.model, *_inputs())
    handle.remove()
    fused = _fuse(model, *_inputs()).model
    model.tables[1].register_forward_hook(lambda module, given, output: output + 1)
    _assert_same(model, fused, *_inputs())


def test_a_subclass_of_a_layer_is_left(taken: None) -> None:
    class Doubled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return 2 * super().forward(ids)

    model = Recommender()
    model.tables[0] = Doubled(SIZES[0], WIDTH)
    result = _fuse(model, *_inputs())
    assert "embedding_lookup" not in _kept(result)
    _assert_same(model, result.model, *_inputs())


def test_tables_that_share_a_weight_or_are_one(taken: None) -> None:
    model = Recommender()
    model.tables[2].weight = nn.Parameter(torch.randn(SIZES[0], WIDTH))
    model.tables[0].weight = model.tables[2].weight
    model.tables[3] = model.tables[1]
    dense, ids = _inputs()
    ids = ids % 2
    result = _fuse(model, dense, ids)
    assert "embedding_lookup" in _kept(result)
    _assert_same(model, result.model, dense, ids)


def test_bags_with_offsets_are_left_with_the_reason(taken: None) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(4, 3, mode="sum") for _ in range(2))

        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            return torch.cat([table(ids, offsets) for table in self.tables], dim=1)

    model, ids, offsets = Bags(), torch.tensor([0, 1, 3, 2]), torch.tensor([0, 1])
    result = _fuse(model, ids, offsets)
    assert result.kept == ()
    assert {one.module for one in result.left} == {"tables.0", "tables.1"}
    assert "more than one id" in str(result)


def test_pairs_in_another_order_are_no_dot_interaction(taken: None) -> None:
    def upper(dense: Tensor, vectors: list[Tensor]) -> Tensor:
        stacked = torch.stack([dense, *vectors], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        pairs = torch.triu_indices(5, 5, offset=1, device=products.device)
        return torch.cat([dense, products[:, pairs[0], pairs[1]]], dim=1)

    def columns_first(dense: Tensor, vectors: list[Tensor]) -> Tensor:
        stacked = torch.stack([dense, *vectors], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        pairs = torch.tril_indices(5, 5, offset=0, device=products.device)
        return torch.cat([dense, products[:, pairs[1], pairs[0]]], dim=1)[:, :13]

    for interact in (upper, columns_first):
        INNER[interact] = 13
        model = Recommender(_by_column, interact)
        result = _fuse(model, *_inputs())
        assert "dot_interaction" not in _kept(result)
        _assert_same(model, result.model, *_inputs())


def test_under_autocast_and_torch_compile(taken: None) -> None:
    model = Recommender(_by_modulus)
    fused = _fuse(model, *_inputs()).model
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(*_inputs()), fused(*_inputs())
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    _assert_same(model, compiled, *_inputs())


class Adapted(nn.Module):
    """A LoRA layer in plain PyTorch; ``spelling`` says how."""

    def __init__(self, spelling: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spelling, self.scale = spelling, 0.5
        self.weight = nn.Parameter(torch.randn(6, 5), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(6), requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(2, 5))
        self.lora_b = nn.Parameter(torch.randn(6, 2))

    def forward(self, input: Tensor) -> Tensor:
        return self.spelling(input, self.weight, self.bias, self.lora_a, self.lora_b, self.scale)


@pytest.mark.parametrize(
    "spelling",
    [
        lambda x, W, b, A, B, scale: F.linear(x, W, b) + scale * (x @ A.T) @ B.T,
        lambda x, W, b, A, B, scale: F.linear(x, W, b) + (x @ A.t() @ B.t()) * scale,
        lambda x, W, b, A, B, scale: scale * F.linear(F.linear(x, A), B) + F.linear(x, W, b),
        lambda x, W, b, A, B, scale: F.relu(
            x @ W.T + b + scale * (x @ A.transpose(0, 1) @ B.transpose(0, 1))
        ),
        lambda x, W, b, A, B, scale: F.gelu(F.linear(x, W) + F.linear(F.linear(x, A), B) * scale),
    ],
)
def test_lora_in_plain_pytorch(taken: None, spelling: Callable[..., Tensor]) -> None:
    model, input = Adapted(spelling), torch.randn(7, 5)
    result = _fuse(model, input)
    assert _kept(result) == ["lora_linear"]
    source = type(result.model).fused_source
    assert "matmul" not in source and ".T" not in source and "transpose" not in source
    for shape in ((7, 5), (1, 5), (0, 5), (2, 3, 5), (5,)):
        _assert_same(model, result.model, torch.randn(shape))
    result.model.scale = 3.0
    model.scale = 3.0
    _assert_same(model, result.model, input)


def test_lora_with_a_weight_that_trains_is_refused(taken: None) -> None:
    model = Adapted(lambda x, W, b, A, B, scale: F.linear(x, W, b) + scale * (x @ A.T) @ B.T)
    model.weight.requires_grad_(True)
    result = _fuse(model, torch.randn(7, 5))
    assert [tried.decision for tried in result.replacements] == [Decision.REFUSED]
    assert "weight" in result.replacements[0].reason


def test_peft(taken: None) -> None:
    peft = pytest.importorskip("peft", reason="peft is the oracle of this test")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0", "2"], init_lora_weights=False)
    )
    input = torch.randn(7, 5)
    result = fuse_with_report(model, [input], ops=[contract("lora_linear")])
    assert _kept(result) == ["lora_linear"] * 2
    assert list(result.model.state_dict()) == list(model.state_dict())
    _assert_same(model, result.model, input)
    with torch.no_grad():
        adapted = model(input)
        with result.model.disable_adapter():
            assert not torch.allclose(result.model(input), adapted)
            with model.disable_adapter():
                torch.testing.assert_close(result.model(input), model(input))
        result.model.merge_adapter()
        torch.testing.assert_close(result.model(input), adapted)
        result.model.unmerge_adapter()
        torch.testing.assert_close(result.model(input), adapted)
    half = copy.deepcopy(model).to(torch.bfloat16)
    fused_half = copy.deepcopy(result.model).to(torch.bfloat16)
    torch.testing.assert_close(fused_half(input.bfloat16()), half(input.bfloat16()))


@pytest.mark.gpu
@pytest.mark.parametrize("interaction", ["dot", "outer", "cat"])
@pytest.mark.parametrize("training", [True, False])
def test_dlrm_on_a_gpu(taken: None, interaction: str, training: bool) -> None:
    torch.manual_seed(0)
    config = replace(SMALL, interaction=interaction, largest_table=100)
    model = Dlrm(config).cuda().train(training)
    inputs = [tensor.cuda() for tensor in get_inputs(batch=64)]
    result = _fuse(model, *inputs)
    wanted = {"embedding_lookup", "linear_activation", "linear_sigmoid"}
    wanted |= {"dot": {"dot_interaction"}, "outer": {"outer_interaction_linear"}}.get(
        interaction, set()
    )
    assert {*_kept(result)} == wanted
    assert "proved against float64" in result.proof
    for batch in (64, 1, 257):
        inputs = [tensor.cuda() for tensor in get_inputs(batch=batch)]
        _assert_same(model, result.model, *inputs)

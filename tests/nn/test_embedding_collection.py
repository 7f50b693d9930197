"""FusedEmbeddingCollection: a ModuleList of embeddings in every respect, looked up at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fuselab.errors import ArgumentError, ShapeError, UnknownNameError
from fuselab.nn import FusedEmbeddingCollection

SIZES = (5, 1, 30)


def ids_of(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(0, size, (batch,), generator=generator) for size in SIZES]
    return torch.stack(columns, 1)


def plain(**options):
    torch.manual_seed(1)
    return nn.ModuleList(nn.Embedding(size, 4, **options) for size in SIZES)


def look_up(modules, ids):
    return torch.stack([table(ids[:, place]) for place, table in enumerate(modules)], 1)


def test_state_dicts_go_both_ways():
    modules, fused = plain(), FusedEmbeddingCollection(SIZES, 4)
    assert list(fused.state_dict()) == list(modules.state_dict())
    assert fused.load_state_dict(modules.state_dict()).missing_keys == []
    ids = ids_of(9)
    assert torch.equal(fused(ids), look_up(modules, ids))
    nn.init.zeros_(modules[0].weight)
    modules.load_state_dict(fused.state_dict())
    assert torch.equal(look_up(modules, ids), fused(ids))


def test_it_is_a_module_list():
    fused = FusedEmbeddingCollection(SIZES, 4)
    ids = ids_of(9)
    assert len(fused) == 3 and isinstance(fused[2], nn.Embedding)
    assert torch.equal(fused(ids), look_up(fused, ids))
    names = [name for name, _ in fused.named_parameters()]
    assert names == ["0.weight", "1.weight", "2.weight"]


@pytest.mark.parametrize("optimizer", [None, "rowwise_adagrad"])
def test_a_slice_is_a_collection_of_the_same_tables(optimizer):
    fused = FusedEmbeddingCollection(SIZES, 4, hash="modulus", optimizer=optimizer, eps=0.5)
    part, ids = fused.eval()[1:], ids_of(9)[:, 1:] - 70
    assert torch.equal(part(ids), fused(torch.cat([ids[:, :1], ids], 1))[:, 1:])
    assert part[1].weight is fused[2].weight and part.eps == 0.5 and not part.training
    assert part.optimizer == optimizer and len(part.state_dict()) == len(part) * (
        1 + bool(optimizer)
    )


def test_a_table_without_adagrads_state_is_named():
    fused = FusedEmbeddingCollection(SIZES, 4, optimizer="rowwise_adagrad")
    fused[2] = nn.Embedding(30, 4)
    with pytest.raises(ArgumentError, match="table 2 has no row-wise Adagrad state"):
        fused(ids_of(4))


def test_gradients_and_a_trajectory_of_50_steps_are_embeddings():
    modules = plain()
    fused = FusedEmbeddingCollection(SIZES, 4)
    fused.load_state_dict(modules.state_dict())
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (modules, fused)
    ]
    for step in range(50):
        ids, target = ids_of(8, step), torch.randn(8, 3, 4)
        losses = [
            ((vectors - target) ** 2).mean() for vectors in (look_up(modules, ids), fused(ids))
        ]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for ours, theirs in zip(fused.parameters(), modules.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_fused_sgd_is_sparse_embeddings_and_sgd_over_50_steps():
    modules = plain(sparse=True)
    fused = FusedEmbeddingCollection(SIZES, 4, optimizer="sgd", learning_rate=0.5)
    fused.load_state_dict(modules.state_dict())
    theirs = torch.optim.SGD(modules.parameters(), lr=0.5)
    ours = torch.optim.SGD(fused.parameters(), lr=100.0)  # finds no gradient, does nothing
    for step in range(50):
        ids, target = ids_of(8, step), torch.randn(8, 3, 4)
        theirs.zero_grad()
        ((look_up(modules, ids) - target) ** 2).mean().backward()
        theirs.step()
        ((fused(ids) - target) ** 2).mean().backward()
        ours.step()
    for mine, other in zip(fused.parameters(), modules.parameters(), strict=True):
        assert mine.grad is None
        torch.testing.assert_close(mine, other)


@pytest.fixture
def adagrad():
    fused = FusedEmbeddingCollection(SIZES, 4, optimizer="rowwise_adagrad", learning_rate=0.1)
    fused(ids_of(8)).square().mean().backward()
    return fused


def test_adagrads_state_is_saved_moved_and_copied_with_its_table(adagrad):
    assert float(adagrad[2].row_state.max()) > 0
    assert "2.row_state" in adagrad.state_dict()
    copied = copy.deepcopy(adagrad)
    fresh = FusedEmbeddingCollection(SIZES, 4, optimizer="rowwise_adagrad", learning_rate=0.1)
    fresh.load_state_dict(adagrad.state_dict())
    before = [table.clone() for table in adagrad.state_dict().values()]
    for other in (copied, fresh):
        other(ids_of(8, 1)).square().mean().backward()
    assert all(map(torch.equal, adagrad.state_dict().values(), before))  # shares nothing
    adagrad(ids_of(8, 1)).square().mean().backward()
    for other in (copied, fresh):
        for mine, theirs in zip(
            adagrad.state_dict().values(), other.state_dict().values(), strict=True
        ):
            assert torch.equal(mine, theirs)


def test_adagrads_state_follows_the_dtype_of_sums(adagrad):
    state = adagrad[2].row_state.clone()
    adagrad.to(torch.bfloat16)
    assert adagrad[2].weight.dtype == torch.bfloat16
    assert adagrad[2].row_state.dtype == torch.float32
    adagrad(ids_of(8, 1)).square().mean().backward()
    assert bool((adagrad[2].row_state >= state * 0.99).all())
    adagrad.double()
    assert adagrad[2].row_state.dtype == torch.float64
    adagrad(ids_of(8, 2)).square().mean().backward()


def test_a_plain_checkpoint_loads_into_adagrad(adagrad):
    modules = plain()
    state = adagrad[2].row_state.clone()
    adagrad.load_state_dict(modules.state_dict())
    assert torch.equal(adagrad[2].weight, modules[2].weight)
    assert torch.equal(adagrad[2].row_state, state)


def test_from_embeddings_holds_their_parameters():
    modules = plain()
    fused = FusedEmbeddingCollection.from_embeddings(modules, optimizer="rowwise_adagrad")
    assert all(map(lambda one, other: one.weight is other.weight, fused, modules))
    before = modules[2].weight.detach().clone()
    fused(ids_of(8)).square().sum().backward()
    assert not torch.equal(modules[2].weight, before)
    assert fused[2].row_state.device.type == "cpu" and float(fused[2].row_state.max()) > 0


def test_from_embeddings_refuses_what_it_would_drop():
    for option in ({"padding_idx": 0}, {"max_norm": 1.0}, {"sparse": True}):
        with pytest.raises(ArgumentError, match=f"embedding 0 has {next(iter(option))}="):
            FusedEmbeddingCollection.from_embeddings(plain(**option))

    class Scaled(nn.Embedding):
        def forward(self, input):
            return super().forward(input) * 2

    hooked, computed = nn.Embedding(3, 4), nn.Embedding(3, 4)
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    nn.utils.parametrizations.weight_norm(computed)
    for module, what in (
        (Scaled(3, 4), "has a forward of its own"),
        (hooked, "has hooks"),
        (computed, "has a weight that is computed"),
        (nn.EmbeddingBag(3, 4), "is a EmbeddingBag"),
    ):
        with pytest.raises(ArgumentError, match=f"embedding 1 {what}"):
            FusedEmbeddingCollection.from_embeddings([nn.Embedding(3, 4), module])
    with pytest.raises(ShapeError, match="embedding 1 is 5 wide and embedding 0 4"):
        FusedEmbeddingCollection.from_embeddings([nn.Embedding(3, 4), nn.Embedding(3, 5)])
    with pytest.raises(ArgumentError, match="no embedding"):
        FusedEmbeddingCollection.from_embeddings([])


def test_frozen_tables_stay():
    fused = FusedEmbeddingCollection(SIZES, 4, optimizer="sgd", learning_rate=0.1)
    fused.requires_grad_(False)
    assert not fused(ids_of(4)).requires_grad


def test_hash_and_stray_ids():
    hashed = FusedEmbeddingCollection(SIZES, 4, hash="modulus")
    ids = torch.tensor([[-1, 7, 2**40], [12, -3, 31]])
    assert torch.equal(hashed(ids), look_up(hashed, ids % torch.tensor(SIZES)))
    ignoring = FusedEmbeddingCollection(SIZES, 4, out_of_range="ignore")
    assert not ignoring(ids).any()
    with pytest.raises(IndexError):
        FusedEmbeddingCollection(SIZES, 4)(ids)
    with pytest.raises(UnknownNameError) as refused:
        FusedEmbeddingCollection(SIZES, 4, optimizer="adam")
    assert (refused.value.kind, refused.value.name) == ("optimizer", "adam")


def test_compiles():
    fused = FusedEmbeddingCollection(SIZES, 4)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    ids = ids_of(9)
    compiled(ids).square().sum().backward()
    grads = [table.weight.grad.clone() for table in fused]
    fused.zero_grad()
    fused(ids).square().sum().backward()
    for one, other in zip(grads, fused, strict=True):
        torch.testing.assert_close(one, other.weight.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_moves_to_the_gpu_and_trains_there(optimizer):
    fused = FusedEmbeddingCollection(SIZES, 4, optimizer=optimizer, learning_rate=0.1)
    there = copy.deepcopy(fused).cuda()
    for step in range(50):
        for each, ids in ((fused, ids_of(64, step)), (there, ids_of(64, step).cuda())):
            (each(ids) - 0.1 * step).square().mean().backward()
    for name, value in fused.state_dict().items():
        torch.testing.assert_close(there.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-5)

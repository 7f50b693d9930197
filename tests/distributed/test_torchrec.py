"""TorchRec both ways: tables, plans, sharded modules, and a DLRM in its pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip(
    "torchrec", reason="torchrec is not installed; docs/scale.md has the line that installs it"
)

import torchrec
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan as TorchrecPlan

from fuselab.data import Batch
from fuselab.data.layout import SPARSE_COLUMNS
from fuselab.distributed.ranks import Ranks
from fuselab.distributed.sharding import Placement, ShardingPlan
from fuselab.distributed.tables import ShardedTables, cut
from fuselab.distributed.torchrec_dlrm import TorchrecBatch, TorchrecDlrm
from fuselab.distributed.torchrec_tables import (
    features,
    from_torchrec,
    from_torchrec_plan,
    ids_of,
    read_blocks,
    to_torchrec,
    to_torchrec_plan,
    write_blocks,
)
from fuselab.errors import ArgumentError
from fuselab.models.dlrm import Dlrm, DlrmConfig
from fuselab.nn import FusedEmbeddingCollection
from fuselab.train.dlrm_modes import PlainStep

NAMES = ["user", "item"]
IDS = torch.tensor([[4, 0], [1, 8], [4, 8]])
CONFIG = DlrmConfig((8,), 8, (8,), "dot", largest_table=40)


@pytest.mark.parametrize("pooled", [True, False])
def test_tables_are_shared_both_ways(pooled: bool) -> None:
    ours = FusedEmbeddingCollection([5, 9], 8)
    theirs = to_torchrec(ours, NAMES, pooled=pooled)
    asked = features(IDS, NAMES)
    found = theirs(asked)
    if pooled:
        got = found.values().view(3, 2, 8)
    else:
        got = torch.stack([found[name].values() for name in NAMES], 1)
    assert torch.equal(got, ours(IDS))
    prefix = "embedding_bags" if pooled else "embeddings"
    assert list(theirs.state_dict()) == [f"{prefix}.{name}.weight" for name in NAMES]
    back = from_torchrec(theirs)
    assert all(mine.weight is old.weight for mine, old in zip(back, ours, strict=True))
    assert torch.equal(ids_of(asked, NAMES), IDS)


def test_what_a_look_up_cannot_express_is_refused() -> None:
    ours = FusedEmbeddingCollection([5, 9], 8)
    with pytest.raises(ArgumentError, match=r"2 names \(1 of them"):
        to_torchrec(ours, ["user", "user"])
    with pytest.raises(ArgumentError, match=r"'item' is torch\.float64"):
        to_torchrec(FusedEmbeddingCollection([5, 9], 8, dtype=torch.float64), ["item", "user"])
    config = torchrec.EmbeddingBagConfig(
        name="t", num_embeddings=5, embedding_dim=8, feature_names=["a", "b"]
    )
    with pytest.raises(ArgumentError, match="features a, b read table 't'"):
        from_torchrec(torchrec.EmbeddingBagCollection([config]))
    config.feature_names = ["a"]
    with pytest.raises(ArgumentError, match="weights its ids"):
        from_torchrec(torchrec.EmbeddingBagCollection([config], is_weighted=True))
    with pytest.raises(ArgumentError, match="is Linear"):
        from_torchrec(nn.Linear(1, 1))
    bags = torchrec.KeyedJaggedTensor(["user"], torch.tensor([1, 2]), lengths=torch.tensor([2, 0]))
    with pytest.raises(ArgumentError, match="or several, for 'user'"):
        ids_of(bags, ["user"])


PLAN = ShardingPlan(
    2,
    ((5, 8), (3, 8), (6, 8), (9, 8)),
    (
        Placement("row", (0, 1), (3, 2)),
        Placement("replicated"),
        Placement("column", (1, 0), (4, 4)),
        Placement("table", (1,)),
    ),
)


def test_plans_go_both_ways() -> None:
    names = list("abcd")
    theirs = to_torchrec_plan(PLAN, names, "cuda")
    kinds = [theirs[name].sharding_type for name in names]
    assert kinds == ["row_wise", "data_parallel", "column_wise", "table_wise"]
    second = theirs["c"].sharding_spec.shards[0]
    assert (second.shard_offsets, second.shard_sizes) == ([0, 0], [6, 4])
    assert str(second.placement) == "rank:1/cuda:1"
    sizes = dict(zip(names, PLAN.tables, strict=True))
    assert from_torchrec_plan(theirs, sizes, 2) == PLAN
    with pytest.raises(ArgumentError, match="no table 'e'"):
        from_torchrec_plan(theirs, {"e": (1, 4)}, 2)
    # 5 rows on 4 ranks are 2, 2 and 1 there: the last rank has none
    few = ShardingPlan(4, ((5, 8),), (Placement("row", (0, 1, 2), (2, 2, 1)),))
    cut_there = to_torchrec_plan(few, ["a"], "cpu")
    assert [shard.shard_sizes[0] for shard in cut_there["a"].sharding_spec.shards] == [2, 2, 1, 0]
    assert from_torchrec_plan(cut_there, {"a": (5, 8)}, 4) == few
    with pytest.raises(ArgumentError, match=r"into \[3, 2\] for ranks 0 to 1"):
        to_torchrec_plan(replace(PLAN, placements=(
            Placement("row", (1, 0), (3, 2)), *PLAN.placements[1:]
        )), names, "cuda")  # fmt: skip
    with pytest.raises(ArgumentError, match="multiples of 4"):
        to_torchrec_plan(replace(PLAN, placements=(
            *PLAN.placements[:2], Placement("column", (1, 0), (6, 2)), PLAN.placements[3]
        )), names, "cuda")  # fmt: skip


def _batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    at = {"generator": generator}
    sizes = torch.tensor(CONFIG.table_sizes)
    return [
        Batch(
            torch.rand(16, **at).round(),
            torch.rand(16, 13, **at),
            (torch.rand(16, SPARSE_COLUMNS, **at) * sizes).int(),
        )
        for _ in range(count)
    ]


def _train(ranks: Ranks, plan: ShardingPlan, rate: float) -> tuple[list[float], bool]:
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.distributed.model_parallel import get_default_sharders
    from torchrec.optim.keyed import KeyedOptimizerWrapper

    torch.manual_seed(0)
    model = TorchrecDlrm(Dlrm(CONFIG))
    names = model.names
    whole = {name: model.embeddings.embedding_bags[name].weight.detach() for name in names}
    _apply_optimizer_in_backward(
        torch.optim.SGD, model.embeddings.parameters(), optimizer_kwargs={"lr": rate}
    )
    theirs = TorchrecPlan({"embeddings": to_torchrec_plan(plan, names, "cpu")})
    parallel = DistributedModelParallel(
        model, device=ranks.device, plan=theirs, sharders=get_default_sharders()
    )
    sharded = parallel.module.embeddings
    tables = ShardedTables(plan, ranks)
    for place, name in enumerate(names):
        tables.fill(place, whole[name])
    write_blocks(tables, sharded, names)
    dense = KeyedOptimizerWrapper(
        {name: value for name, value in parallel.named_parameters() if "embeddings" not in name},
        lambda parameters: torch.optim.SGD(parameters, lr=rate),
    )
    pipeline = TrainPipelineSparseDist(parallel, dense, ranks.device)
    half = slice(8 * ranks.rank, 8 * ranks.rank + 8)
    given = iter(
        TorchrecBatch.of(Batch(*(part[half] for part in batch)), names) for batch in _batches(5)
    )
    losses = []
    for _ in range(5):
        loss, _, _ = pipeline.progress(given)
        mean = loss / 2
        ranks.add_up(mean)
        losses.append(mean.item())
    # what was trained there comes into our blocks, and differs from the beginning
    read_blocks(tables, sharded, names)
    moved = any(
        not torch.equal(value, cut(whole[names[what.table]], what))
        for what, value in tables.held()
        if not isinstance(what, int)
    )
    return losses, moved


def test_a_dlrm_trains_in_torchrec_s_pipeline(start: Callable[..., list[Any]]) -> None:
    """The loss curve of two ranks is that of our plain step in one process."""
    rate = 0.5
    sizes = tuple((rows, CONFIG.embedding_dim) for rows in CONFIG.table_sizes)
    placements = [Placement("table", (place % 2,)) for place in range(len(sizes))]
    placements[0] = Placement("column", (1, 0), (4, 4))
    plan = ShardingPlan(2, sizes, tuple(placements))
    torch.manual_seed(0)
    step = PlainStep(Dlrm(CONFIG), "sgd")
    wanted = [step(batch, rate).item() for batch in _batches(5)]
    for losses, moved in start(2, _train, plan, rate):
        assert losses == pytest.approx(wanted, rel=2e-6)
        assert moved


@pytest.mark.parametrize("interaction", ["dot", "cat", "outer"])
def test_the_loss_is_that_of_the_model(interaction: str) -> None:
    model = Dlrm(replace(CONFIG, interaction=interaction, embedding_dim=4))
    batch = _batches(1)[0]
    theirs = TorchrecDlrm(model)
    loss, (_, logits, _) = theirs(TorchrecBatch.of(batch, theirs.names))
    wanted = model.logits_of_rows(batch.dense, batch.sparse)[:, 0]
    torch.testing.assert_close(logits, wanted)
    plain = torch.nn.functional.binary_cross_entropy_with_logits(wanted, batch.labels)
    torch.testing.assert_close(loss, plain)
    mine = torch.autograd.grad(loss, theirs.embeddings.embedding_bags["embedding_3"].weight)
    expected = torch.autograd.grad(plain, model.embeddings[3].weight)
    torch.testing.assert_close(mine, expected)

"""A DLRM on several ranks trains as on one: curves, checkpoints, and the plans' every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fuselab.distributed import sharded_files
from fuselab.distributed.ranks import Ranks
from fuselab.models.dlrm import DlrmConfig
from fuselab.train import checkpoint
from fuselab.train.dlrm import Plan, Run, load_model
from fuselab.train.dlrm_ranks import RankRun, Sharding

CONFIG = DlrmConfig(
    dense_hidden=(24,),
    embedding_dim=16,
    prediction_hidden=(16,),
    interaction="dot",
    largest_table=300,
)
RATES = {"sgd": 0.2, "adagrad": 0.02, "adam": 0.01}
# rounding: the parts of a batch are multiplied and added up apart
CLOSE = {"rel": 2e-6, "abs": 0}
# (mode, optimizer, kind): every kind, mode and optimizer, and the pairs that have code of their own
WAYS = [
    ("eager", "sgd", "planned"),
    ("eager", "adagrad", "row"),
    ("eager", "adam", "column"),
    ("fused", "sgd", "table"),
    ("fused", "adagrad", "row"),
    ("fused", "adam", "row"),
    ("fused", "adam", "column"),
    ("fused", "adagrad", "replicated"),
    ("fused", "adam", "replicated"),
]


def _plan(mode: str, optimizer: str, steps: int = 12) -> Plan:
    # 100 rows a batch: parts of different sizes for 3 ranks
    return Plan(
        CONFIG, mode, rows=3000, batch_size=100, steps=steps, optimizer=optimizer,
        lr=RATES[optimizer],
    )  # fmt: skip


def _course(run: Run) -> tuple[list[float], Any]:
    trained = run.train()
    found = trained.metrics
    return [loss for _, loss in trained.course.curve], None if found is None else found.loss


def _train_all(ranks: Ranks) -> list[Any]:
    return [
        _course(RankRun(_plan(mode, optimizer), ranks.device, None, ranks, Sharding(kind)))
        for mode, optimizer, kind in WAYS
    ]


def test_the_curve_is_that_of_one_process(start: Callable[..., list[Any]]) -> None:
    wanted = {}
    for optimizer in RATES:
        wanted[optimizer] = _course(Run(_plan("eager", optimizer), torch.device("cpu")))
    first, *others = start(3, _train_all)
    for (mode, optimizer, kind), (curve, held_out) in zip(WAYS, first, strict=True):
        expected_curve, expected = wanted[optimizer]
        assert curve == pytest.approx(expected_curve, **CLOSE), (mode, optimizer, kind)
        assert held_out == pytest.approx(expected, **CLOSE), (mode, optimizer, kind)
    # every rank has the loss of the whole batch, and the first alone the metrics
    for other in others:
        assert [curve for curve, _ in other] == [curve for curve, _ in first]
        assert {held_out for _, held_out in other} == {None}


def _go_on(ranks: Ranks, folder: Path, kind: str, optimizer: str, steps: int) -> int:
    plan = _plan("fused", optimizer, steps)
    run = RankRun(plan, ranks.device, folder, ranks, Sharding(kind))
    run.resume()
    run.train()
    return run.begin


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_a_checkpoint_goes_on_with_any_number_of_ranks(
    start: Callable[..., list[Any]], tmp_path: Path, optimizer: str
) -> None:
    """One process, 2 ranks, 3 ranks, and one process again, over the end of an epoch."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    whole.mkdir()
    moved.mkdir()
    cpu = torch.device("cpu")
    Run(_plan("eager", optimizer, 40), cpu, whole).train()
    Run(_plan("eager", optimizer, 10), cpu, moved).train()
    assert start(2, _go_on, moved, "table", optimizer, 20) == [10, 10]
    assert start(3, _go_on, moved, "row", optimizer, 30) == [20, 20, 20]
    written = checkpoint.latest(moved)
    assert written is not None
    assert written.name == "step-00000030.dcp"
    last = Run(_plan("eager", optimizer, 40), cpu, moved)
    last.resume()
    assert last.begin == 30
    last.train()
    wanted = checkpoint.load(whole, "dlrm")
    found = checkpoint.load(moved, "dlrm")
    assert found.facts["position"] == wanted.facts["position"] == [1, 1500]
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, value in wanted.tensors.items():
        if not name.startswith("random/"):
            torch.testing.assert_close(
                found.tensors[name].float(), value.float(), rtol=1e-4, atol=1e-6, msg=name
            )
    # plain PyTorch reads the ranks' folder, and so does predict
    target = tmp_path / "plain.pt"
    dcp_to_torch_save(written, target)
    plain = torch.load(target)
    model, _ = load_model(written)
    assert sharded_files.sizes(written)["model/embeddings.0.weight"][0] == (300, 16)
    for name, value in model.state_dict().items():
        assert torch.equal(plain[f"model/{name}"], value), name

"""The model of step time: fitted on two GPUs, checked on what it was not fitted on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from fuselab.distributed import planner
from fuselab.distributed.planner import Demand
from fuselab.distributed.sharding import Placement, ShardingPlan
from fuselab.distributed.step_time import Network, StepModel, fit
from fuselab.errors import ArgumentError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FACTS = json.loads((BENCHMARKS / "nvidia-h200" / "scale.json").read_text())


@pytest.fixture
def scale_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import scale_model

    return scale_model


def test_it_gives_what_was_measured(scale_model: ModuleType) -> None:
    model = scale_model.fitted(FACTS)
    two = scale_model.demand_of(2, FACTS["rows_per_gpu"])
    time = model.predict(
        planner.uniform(two, "table"), two, scale_model.dense_parameters(scale_model.CONFIG)
    )
    assert time.total == pytest.approx(FACTS["two_gpus_us"])
    assert time.exchange == pytest.approx(FACTS["two_gpus_profile_us"]["send_and_receive"])
    assert time.reduce == pytest.approx(FACTS["two_gpus_profile_us"]["all_reduce"])
    # neither was fitted
    for what, predicted, measured in scale_model.checks(FACTS, model):
        assert predicted == pytest.approx(measured, rel=0.03), what
    # one GPU: the line is a tenth below the 2048 rows in the middle
    for rows, us in FACTS["one_gpu_us"].items():
        assert model.one(int(rows)) == pytest.approx(us, rel=0.11)


def test_the_parts_by_hand() -> None:
    """16 ranks on machines of 8, 10 rows each, one table of 4 columns on rank 0, in 16 bits."""
    plan = ShardingPlan(16, ((100, 4),), (Placement("table", (0,)),))
    demand = Demand(plan.tables, 16, 160, vector_bytes=2)
    model = StepModel(5.0, 2.0, 0.25, 0.5, 3.0, 0.1)
    time = model.predict(plan, demand, 1000, Network(8, 400.0, 100.0))
    assert time.compute == 25
    assert time.ordering == 10 * 4 * 2 * 0.25
    # the owner sends 80 bytes to each of 15 ranks, forward, and gets as many; 8 of 15 are away
    assert time.exchange == pytest.approx(2 * 80 * 8 / 100 / 0.5 * 1e6)
    reduced = 2 * 4 * 1000 * 15 / 16
    assert time.reduce == pytest.approx(2 * 3.0 * 4 + reduced / (0.5 * 100) * 1e6)
    assert time.total == pytest.approx(45 + time.exchange + time.reduce - 1.0)
    alone = ShardingPlan(1, plan.tables, plan.placements)
    assert model.predict(alone, Demand(plan.tables, 1, 10), 1000).total == 25
    # hidden transfers cost nothing, but do not pay back
    hidden = replace(model, hidden_us=math.inf).predict(plan, demand, 1000)
    assert hidden.total == 45
    with pytest.raises(ArgumentError, match="fitted on 2 GPUs, and the plan is for 16"):
        fit(FACTS, plan, demand, 1000)


def test_whole_tables_stop_at_their_number(scale_model: ModuleType) -> None:
    """With 26 tables an owner serves every further rank alone: rows per second stay the same."""
    model = scale_model.fitted(FACTS)
    rates = {}
    for gpus in (2, 8, 64, 1024):
        demand = scale_model.demand_of(gpus, FACTS["rows_per_gpu"])
        time = model.predict(planner.uniform(demand, "table"), demand, 1)
        rates[gpus] = gpus * FACTS["rows_per_gpu"] / time.total
    assert rates[2] < rates[8] < rates[64]
    assert rates[1024] == pytest.approx(rates[64], rel=0.15)

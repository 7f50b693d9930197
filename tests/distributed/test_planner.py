"""The planner: what it chooses, what that costs, and the plan as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuselab.distributed.planner import Bandwidths, Demand, choose, facts, loads, uniform
from fuselab.distributed.sharding import Placement, Shard, ShardingPlan
from fuselab.errors import ArgumentError, FuselabError
from fuselab.report.plan_text import plan_text

EVEN = Bandwidths(link=1e9, memory=1e12)


def kinds(plan: ShardingPlan) -> list[str]:
    return [placement.kind for placement in plan.placements]


def test_equal_tables_are_shared_out_evenly() -> None:
    plan = choose(Demand(((100_000, 16),) * 8, 4, 4096), EVEN)
    assert kinds(plan) == ["table"] * 8
    assert sorted(len(plan.shards(rank)) for rank in range(4)) == [2, 2, 2, 2]
    busy = [load.seconds(EVEN) for load in loads(plan, Demand(((100_000, 16),) * 8, 4, 4096))]
    assert max(busy) == pytest.approx(min(busy))


def test_small_tables_are_replicated_if_the_all_reduce_is_cheaper() -> None:
    """Two ranks, 1000 rows each: a vector costs 64 bytes, so from some 1000 rows on it does not
    pay."""
    plan = choose(Demand(((10, 16), (50_000, 16), (60_000, 16)), 2, 2000), EVEN)
    assert kinds(plan) == ["replicated", "table", "table"]
    assert plan.replicated == [0]
    assert kinds(choose(Demand(((10, 16),), 1, 2000), EVEN)) == ["table"]


def test_a_single_table_is_cut_where_its_owner_would_be_the_bottleneck() -> None:
    """On 4 ranks an owner sends 3 vectors for one that it gets; 4 blocks send 3/4 each, and as
    many gradients. On 2 ranks a cut changes nothing."""
    plan = choose(Demand(((50_000, 64),), 4, 4000), EVEN)
    assert plan.placements[0] == Placement("column", (0, 1, 2, 3), (16, 16, 16, 16))
    assert kinds(choose(Demand(((50_000, 64),), 2, 2000), EVEN)) == ["table"]
    # whole rows only: each of 4 blocks of rows would send as much as the owner
    assert kinds(choose(Demand(((50_000, 64),), 4, 4000, columns_allowed=False), EVEN)) == ["table"]


def test_memory_is_obeyed() -> None:
    tables = ((1_000_000, 16), (10_000, 16), (10_000, 16))  # 64 MB and twice 0.64 MB
    demand = Demand(tables, 2, 100, memory_bytes=40_000_000)
    plan = choose(demand, EVEN)
    assert plan.placements[0] == Placement("row", (0, 1), (500_000, 500_000))
    assert all(load.held <= 40_000_000 for load in loads(plan, demand))
    with pytest.raises(ArgumentError, match=r"table 0 of 1,000,000 rows .* 0\.06 GB .* 2 ranks"):
        choose(Demand(tables, 2, 100, memory_bytes=20_000_000), EVEN)
    # Adam's two moments do not fit any more
    with pytest.raises(ArgumentError, match="use more ranks"):
        choose(Demand(tables, 2, 100, state_bytes=(0, 8), memory_bytes=40_000_000), EVEN)


def test_the_bytes_of_a_step() -> None:
    """Two ranks with 10 rows each, one table of 16 columns on rank 1."""
    demand = Demand(((100, 16),), 2, 20)
    plan = ShardingPlan(2, demand.tables, (Placement("table", (1,)),))
    asking, owner = loads(plan, demand)
    assert (asking.ids_sent, asking.gradients_sent, asking.received) == (40, 640, 640)
    assert (owner.vectors_sent, owner.received, owner.held) == (640, 680, 6400)
    assert asking.seconds(Bandwidths(1, 1e30)) == pytest.approx(680)
    half = loads(plan, Demand(((100, 16),), 2, 20, lookups=(0.5,), vector_bytes=2))
    assert (half[1].vectors_sent, half[0].ids_sent) == (160, 20)
    copies = ShardingPlan(2, demand.tables, (Placement("replicated"),))
    assert [load.reduced for load in loads(copies, demand)] == [6400, 6400]
    by_rows = loads(uniform(demand, "row"), demand)
    assert [load.vectors_sent for load in by_rows] == [640, 640]  # zeros for the other's rows


def test_hot_tables_weigh_more() -> None:
    """One table is looked up ten times as often as the others together: it is alone on its rank."""
    tables = ((100_000, 16),) * 3
    plan = choose(Demand(tables, 2, 2000, lookups=(1.0, 20.0, 1.0), columns_allowed=False), EVEN)
    if plan.placements[1].kind == "table":
        hot = plan.placements[1].ranks
        assert hot not in (plan.placements[0].ranks, plan.placements[2].ranks)
    else:
        assert plan.placements[1].kind == "row"


def test_uniform_plans_cut_small_tables_less_often() -> None:
    demand = Demand(((3, 16), (10, 2)), 4, 100)
    assert uniform(demand, "row").placements[0] == Placement("row", (0, 1, 2), (1, 1, 1))
    assert uniform(demand, "column").placements[1] == Placement("column", (0, 1), (1, 1))
    assert uniform(demand, "row").shards(1) == [Shard(0, 1, 1, 1, 0, 16), Shard(1, 1, 2, 3, 0, 2)]


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    tables = ((1000, 16), (7, 16), (50, 16), (9, 16))
    placements = (
        Placement("row", (2, 0), (400, 600)),
        Placement("replicated"),
        Placement("column", (0, 1, 2), (8, 4, 4)),
        Placement("table", (1,)),
    )
    plan = ShardingPlan(3, tables, placements)
    plan.write(tmp_path / "plan.json")
    assert ShardingPlan.read(tmp_path / "plan.json", tables, 3) == plan
    shown = plan_text(facts(plan, Demand(tables, 3, 300), EVEN))
    assert "replicated" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "no sharding plan"),
        ({"version": 2}, "version 2"),
        ({"ranks": 2}, "plan for 2 ranks, and 1 run"),
        ({"ranks": True}, "true stands where an integer"),
        ({"tables": [{"rows": 5}]}, "lacks 'columns'"),
        ({"tables": 3}, "no list"),
        ({"tables": []}, "plans 0 tables"),
        ({"kind": "rows"}, "unknown kind of table 0 'rows'"),
        ({"ranks of 0": [1]}, "rank 1, and the ranks are 0 to 0"),
        ({"ranks of 0": []}, "has 0 ranks"),
        ({"kind": "row", "sizes": [4]}, "cut into .4. rows, and it has 5"),
        ({"kind": "row", "ranks of 0": [0, 0], "sizes": [2, 3]}, "names a rank twice"),
        ({"rows": 6}, "6 rows of 4 columns there, and 5 of 4"),
    ],
)
def test_a_wrong_plan_is_one_sentence(tmp_path: Path, change: dict[str, object], said: str) -> None:
    described = ShardingPlan(1, ((5, 4),), (Placement("table", (0,)),)).describe()
    for key, value in change.items():
        if key in described:
            described[key] = value
        else:
            described["tables"][0][key.removesuffix(" of 0")] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(described))
    with pytest.raises(FuselabError, match=said) as caught:
        ShardingPlan.read(path, ((5, 4),), 1)
    assert str(path) in str(caught.value)


def test_no_plan_at_all(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot read"):
        ShardingPlan.read(tmp_path / "none.json", (), 1)
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ArgumentError, match="is no JSON"):
        ShardingPlan.read(tmp_path / "text.json", (), 1)

"""A model of a DLRM step's time on N GPUs, fitted on measurements on one and two.

Every GPU has the same number of rows, whatever N is. A step's time is

    launch + rows * compute            the step of one GPU
    + bytes ordered / memory           vectors and gradients put in the order of messages
    + what is not hidden of
        bytes sent / link              of the rank that sends or receives most
        + all-reduce                   latency * log2 N + bytes / link

Look-ups and updates are in the first term; that they differ between ranks is left out. A part of
the transfers proportional to the rows runs while the bottom layers compute. On several machines
the bytes for other machines go over their network while the rest goes over NVLink.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fuselab.distributed.planner import Demand, Load, loads
from fuselab.distributed.sharding import ShardingPlan
from fuselab.errors import ArgumentError

_REDUCES = 2  # all-reduces of a step: the top layers' gradients, then the bottom layers'


@dataclass(frozen=True)
class Network:
    """Bytes per second of a GPU in each direction, as the maker's sheets have them.

    The defaults are a DGX H200's: NVLink 4 has 900 GB/s in both directions together (NVIDIA H200
    data sheet), and each of 8 GPUs has a ConnectX-7 of 400 Gb/s (NVIDIA DGX H200 data sheet).
    """

    gpus_per_node: int = 8
    nvlink: float = 450e9
    between_nodes: float = 50e9


@dataclass(frozen=True)
class StepTime:
    """The parts of a step in microseconds; ``total`` adds them up."""

    compute: float
    ordering: float
    exchange: float
    reduce: float
    hidden: float

    @property
    def total(self) -> float:
        exposed = max(0.0, self.exchange + self.reduce - self.hidden)
        return self.compute + self.ordering + exposed


@dataclass(frozen=True)
class StepModel:
    """The fitted constants.

    Args:
        launch_us: of a step with no rows, on one GPU.
        row_us: per row.
        ordering_us: per byte of a step's vectors, forward and backward together.
        efficiency: share of a link's bandwidth that all_to_all reaches.
        latency_us: of one all-reduce between two GPUs; it grows with log2 N (a tree).
        hidden_us: per row, of transfers that run while the bottom layers compute.
    """

    launch_us: float
    row_us: float
    ordering_us: float
    efficiency: float
    latency_us: float
    hidden_us: float

    def one(self, rows: int) -> float:
        """Return the microseconds of a step of one GPU without an exchange."""
        return self.launch_us + rows * self.row_us

    def predict(
        self,
        plan: ShardingPlan,
        demand: Demand,
        dense_parameters: int,
        network: Network = Network(),
    ) -> StepTime:
        """Return the step's time under a plan; ``demand.batch_size`` counts all ranks' rows."""
        world = plan.world_size
        rows = demand.batch_size // world
        if world == 1:
            return StepTime(self.one(rows), 0.0, 0.0, 0.0, 0.0)
        found = loads(plan, demand)
        exchange = max(self._exchange_us(load, world, network) for load in found)
        # replicated tables' gradients travel with the dense layers'
        reduced = 2 * 4 * dense_parameters * (world - 1) / world + max(
            load.reduced for load in found
        )
        slowest = network.nvlink if world <= network.gpus_per_node else network.between_nodes
        reduce = _REDUCES * self.latency_us * math.log2(world)
        reduce += reduced / (self.efficiency * slowest) * 1e6
        ordered = rows * _row_bytes(plan, demand) * self.ordering_us
        return StepTime(self.one(rows), ordered, exchange, reduce, rows * self.hidden_us)

    def _exchange_us(self, load: Load, world: int, network: Network) -> float:
        # Vectors come from where their gradients go: each is sent once and received once. Ids
        # travel while the step before runs.
        moved = 2 * max(load.vectors_sent, load.gradients_sent)
        away = max(0, world - network.gpus_per_node) / (world - 1)
        seconds = max(moved * (1 - away) / network.nvlink, moved * away / network.between_nodes)
        return seconds / self.efficiency * 1e6


def fit(
    facts: Mapping[str, object],
    plan: ShardingPlan,
    demand: Demand,
    dense_parameters: int,
    network: Network = Network(),
) -> StepModel:
    """Return the model whose step on two GPUs takes what was measured.

    ``facts`` are those of ``benchmarks/nvidia-h200/scale.json``, and ``plan`` and ``demand`` the
    case of its two GPUs. Raises ArgumentError if the plan is not for two ranks.
    """
    if plan.world_size != 2:
        raise ArgumentError(
            f"the model is fitted on 2 GPUs, and the plan is for {plan.world_size}."
        )
    alone, profile = facts["one_gpu_us"], facts["two_gpus_profile_us"]
    assert isinstance(alone, Mapping)
    assert isinstance(profile, Mapping)
    launch_us, row_us = _line({int(rows): us for rows, us in alone.items()})
    rows = demand.batch_size // 2
    ordering = profile["index_select"] + profile["cat"] + profile["casts"]
    exact = StepModel(
        launch_us, row_us, ordering / (rows * _row_bytes(plan, demand)), 1.0, 0.0, 0.0
    )
    ideal = exact.predict(plan, demand, dense_parameters, network)
    efficiency = ideal.exchange / profile["send_and_receive"]
    rest = profile["all_reduce"] - ideal.reduce / efficiency
    made = replace(exact, efficiency=efficiency, latency_us=max(0.0, rest) / _REDUCES)
    total = made.predict(plan, demand, dense_parameters, network).total
    measured = facts["two_gpus_us"]
    assert isinstance(measured, float)
    return replace(made, hidden_us=max(0.0, total - measured) / rows)


def _line(points: Mapping[int, float]) -> tuple[float, float]:
    """Return a and b of ``us = a + b rows`` with the least squares of relative errors."""
    weights = {rows: us**-2 for rows, us in points.items()}
    total = sum(weights.values())
    mean_rows = sum(weights[rows] * rows for rows in points) / total
    mean_us = sum(weights[rows] * us for rows, us in points.items()) / total
    spread = sum(weights[rows] * (rows - mean_rows) ** 2 for rows in points)
    slope = (
        sum(weights[rows] * (rows - mean_rows) * (us - mean_us) for rows, us in points.items())
        / spread
    )
    return mean_us - slope * mean_rows, slope


def _row_bytes(plan: ShardingPlan, demand: Demand) -> int:
    """Return the bytes of one row's vectors."""
    return sum(columns for _, columns in plan.tables) * demand.vector_bytes

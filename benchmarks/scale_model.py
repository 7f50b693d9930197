"""Print what the model of step time says of 2, 8, 64 and 1,024 GPUs, beside what was measured.

    python benchmarks/scale_model.py [--facts benchmarks/nvidia-h200/scale.json]

``fuselab.distributed.step_time`` has the model. Two lines check it against figures that it was
not fitted on. Then every number of GPUs is shown with the efficiency that all_to_all reached
between two, and with 80 % of every link.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from fuselab.data.layout import DENSE_COLUMNS
from fuselab.distributed import planner
from fuselab.distributed.planner import Demand
from fuselab.distributed.step_time import StepModel, fit
from fuselab.models.dlrm import MAIN, DlrmConfig

GPUS = (1, 2, 8, 64, 1024)
CONFIG = replace(MAIN, largest_table=2**31)


def dense_parameters(config: DlrmConfig) -> int:
    """Return how many weights and biases the two MLPs have."""
    bottom = (DENSE_COLUMNS, *config.dense_hidden, config.embedding_dim)
    top = (config.interaction_width, *config.prediction_hidden, 1)
    return sum(
        inputs * outputs + outputs
        for widths in (bottom, top)
        for inputs, outputs in pairwise(widths)
    )


def demand_of(gpus: int, rows: int, config: DlrmConfig = CONFIG) -> Demand:
    """Return what the planner is asked for, with vectors in 16 bits."""
    sizes = tuple((size, config.embedding_dim) for size in config.table_sizes)
    return Demand(sizes, gpus, rows * gpus, vector_bytes=2)


def fitted(facts: dict[str, object]) -> StepModel:
    """Return the model fitted on the facts' two GPUs with whole tables."""
    two = demand_of(2, int(str(facts["rows_per_gpu"])))
    return fit(facts, planner.uniform(two, "table"), two, dense_parameters(CONFIG))


def checks(facts: dict[str, object], model: StepModel) -> list[tuple[str, float, float]]:
    """Return (what, predicted us, measured us) for figures that the model was not fitted on."""
    rows = int(str(facts["rows_per_gpu"]))
    two = demand_of(2, rows)
    ordering = model.predict(planner.uniform(two, "table"), two, dense_parameters(CONFIG)).ordering
    again = facts["one_gpu_again_us"]
    assert isinstance(again, dict)
    found = [
        (f"one GPU, {each} rows, another day", model.one(int(each)), us)
        for each, us in again.items()
    ]
    several = float(str(facts["one_gpu_as_several_us"]))
    return [*found, ("the step of several ranks, on one GPU", model.one(rows) + ordering, several)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    here = Path(__file__).parent
    parser.add_argument("--facts", type=Path, default=here / "nvidia-h200" / "scale.json")
    facts = json.loads(parser.parse_args().facts.read_text())
    model, rows = fitted(facts), facts["rows_per_gpu"]
    print(
        f"launch {model.launch_us:.0f} us, {model.row_us * 1000:.2f} ns per row, all_to_all at "
        f"{model.efficiency:.0%} of the link, all-reduce {model.latency_us:.0f} us, hidden "
        f"{model.hidden_us * rows:.0f} us"
    )
    for what, predicted, measured in checks(facts, model):
        off = predicted / measured - 1
        print(f"{what}: {predicted:.0f} us predicted, {measured:.0f} measured, {off:+.1%}")
    for title, chosen in (
        (f"links at {model.efficiency:.0%}", model),
        ("links at 80 %", replace(model, efficiency=0.8)),
    ):
        print(f"\n{title}: GPUs, plan, us (compute + ordering + exchange + all-reduce - hidden), "
              "million rows/s, share of linear")  # fmt: skip
        for gpus in GPUS:
            demand = demand_of(gpus, rows)
            for kind in ("table", "planned"):
                plan = (
                    planner.choose(demand) if kind == "planned" else planner.uniform(demand, kind)
                )
                time = chosen.predict(plan, demand, dense_parameters(CONFIG))
                share = chosen.one(rows) / time.total
                print(
                    f"{gpus:5} {kind:8} {time.total:8.0f} ({time.compute:.0f} + "
                    f"{time.ordering:.0f} + {time.exchange:.0f} + {time.reduce:.0f} - "
                    f"{time.hidden:.0f})  {gpus * rows / time.total:9.1f}  {share:6.1%}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())

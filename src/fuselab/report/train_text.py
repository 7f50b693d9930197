"""The screens of ``fuselab train`` and ``fuselab predict``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fuselab.report.screen import table


def train_text(facts: Mapping[str, Any]) -> str:
    """Return the text for the facts of ``Run.describe``."""
    done = facts["steps"] - facts["resumed_from"]
    lines = [
        f"{facts['mode']}: {done:,} steps of {facts['batch_size']:,} rows in "
        f"{facts['seconds']:.1f} s, {facts['rows_per_s']:,.0f} rows/s"
    ]
    if not done:
        lines = [f"all {facts['planned_steps']:,} steps were done before"]
    curve = facts["curve"]
    if len(curve) > 1:
        lines.append(f"training loss  {curve[0][1]:.4f} at first, {curve[-1][1]:.4f} at last")
    elif curve:
        lines.append(f"training loss  {curve[0][1]:.4f}")
    held_out = facts["held_out"]
    if held_out is not None:
        lines.append(f"held-out rows  {metrics_text(held_out)}")
    if facts["checkpoint"] is not None:
        lines.append(f"checkpoint     {facts['checkpoint']}")
    return "\n".join(lines)


def metrics_text(measured: Mapping[str, Any]) -> str:
    """Return the text for the facts of ``fuselab.train.metrics.Metrics``."""
    return (
        f"{measured['rows']:,}: loss {measured['loss']:.4f}, accuracy {measured['accuracy']:.4f}, "
        f"AUC {measured['auc']:.4f}"
    )


def gradients_text(compared: Sequence[Mapping[str, Any]]) -> str:
    """Return the table for the result of ``fuselab.train.dlrm_gradients.compare``."""
    rows = [
        [
            each["name"],
            *(f"{each[key]:.3g}" for key in ("largest", "error", "eager_error")),
            "right" if each["right"] else "WRONG",
        ]
        for each in compared
    ]
    columns = ["gradient of", "largest", "error", "eager's", ""]
    return "\n".join(table(columns, rows, right=(1, 2, 3)))


def latency_text(measured: Sequence[Mapping[str, Any]]) -> str:
    """Return the table for the result of ``fuselab.train.dlrm_predict.latencies``."""
    rows = [
        [f"{each['batch']:,}", each["way"], f"{each['us']:.1f}", f"{each['rows_per_s']:,.0f}"]
        for each in measured
    ]
    return "\n".join(table(["batch", "forward", "us", "rows/s"], rows, right=(0, 2, 3)))

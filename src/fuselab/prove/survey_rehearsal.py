"""A process that calls each provider of an operator once at its share of a survey's points.

What it compiles stays in the caches on disk for the process that times.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Sequence

import torch

from fuselab.prove import survey
from fuselab.prove.load import load


def rehearse(
    named: str,
    points: Sequence[int],
    seed: int,
    backward: bool,
    providers: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    device: str,
) -> None:
    """Call every provider of the operator ``named`` once at each point."""
    where = torch.device(device)
    phases = ("forward", "forward+backward") if backward else ("forward",)
    chosen = [getattr(torch, name) for name in dtypes] if dtypes else None
    warnings.simplefilter("ignore")
    calls = survey.calls_of(load(named), points, seed, phases, providers, chosen, where)
    for call in calls:
        with contextlib.suppress(Exception):  # any provider may raise anything
            call()
            torch.cuda.synchronize(where)


if __name__ == "__main__":
    rehearse(**json.loads(sys.argv[1]))

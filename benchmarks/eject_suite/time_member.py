"""Time one package of the suite, when the parent says that nothing else runs.

    python benchmarks/eject_suite/time_member.py PACKAGE --dtype D --seed N --budget S
        --providers NAME,... --json F

Everything is compiled and called once; then the process prints ``ready`` and waits for a line on
its standard input before it times anything, so that many members can compile side by side and be
timed one after the other. ``run.py`` is the parent.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from fuselab.device.ceiling import measured_ceilings
from fuselab.device.environment import describe
from fuselab.device.select import select as select_device
from fuselab.prove.bench import give_memory_back
from fuselab.prove.bench_providers import select
from fuselab.prove.bench_run import Run
from fuselab.prove.bench_work import CaseArguments, Work
from fuselab.prove.load import load_op
from fuselab.runtime import fallback

READY = "ready"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, required=True, help="seconds for each phase")
    parser.add_argument("--providers", required=True)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    device, dtype = select_device("auto"), getattr(torch, given.dtype)
    op = load_op(str(given.package))
    case = next((case for case in op.cases if "bench" in case.tags), op.cases[0])
    made = CaseArguments(op, case, device, dtype)
    providers = select(op, given.providers.split(","))
    ceilings = measured_ceilings(device)
    runs = []
    with fallback.strict():
        for phase in ("forward", "forward+backward") if op.gradient else ("forward",):
            work = Work(op, case, device, dtype, phase, made)
            run = Run(work, providers, ceilings, given.budget, given.seed, energy=False)
            run.prepare()
            for calls in run.calls.values():
                with suppress(Exception):  # timing the call records what it raises
                    calls.checked()
            runs.append(run)
        give_memory_back(device)
        print(READY, flush=True)
        sys.stdin.readline()
        groups = [asdict(run.timed()) for run in runs]
    facts = {"environment": describe(device), "groups": groups}
    given.json.write_text(json.dumps(facts, default=str), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Everything about the library that only a GPU can show, in one command.

    python tools/gpu_campaign.py OUT test check sanitize tune bench [--operator NAME ...]
    python tools/gpu_campaign.py OUT full-check --seed 11 --seed 12 [--operator NAME ...]

Stages run in the order given. ``test``: the GPU-marked tests. ``check``: ``fuselab check --quick``
of every operator, ``full-check``: without ``--quick``, at every ``--seed``. ``sanitize``:
``tools/sanitize.py`` alone, which compiles its kernels, then under memcheck, racecheck and
initcheck; with ``--draws N`` each operator's own cases and N drawn calls per implementation and
dtype. ``tune``: ``fuselab bench --tune`` of every operator that declares configurations. ``bench``:
``fuselab bench --backward``. Stages that only check results run several commands at a time, spread
over the GPUs; stages that measure times run one at a time.

``check`` and ``full-check`` need no GPU: without one they check what a CPU can, with two threads
per operator. A full check at one seed takes about 20 minutes for all operators on an H200 with 32
cores, and several hours on two CPU cores. Compiled kernels are in the caches of fuselab and Triton,
which all seeds and operators share; a second seed compiles only what no earlier one drew.

Every command's output is in ``OUT/STAGE-OPERATOR[-SEED].log``, the results of check, tune and bench
beside it as JSON. A line per command says how it ended and how long it took. After a check a line
per operator says PASS or FAIL, of how many trials, and whether time cut any short. The last line
counts the failures; the exit status is 1 if there is one. Options that this command does not know
(``--budget 60``) go to ``fuselab check`` and ``fuselab bench``.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from fuselab import ops

CLONE = Path(__file__).resolve().parent.parent
AT_ONCE = {"test": 1, "plain": 8, "sanitize": 8, "tune": 1, "bench": 1}
CHECKS = ("check", "full-check")
STAGES = ("test", *CHECKS, "plain", "sanitize", "tune", "bench")
SANITIZERS = ("memcheck", "racecheck", "initcheck")
# A check on a GPU has a process per implementation and dtype, mostly 12, half of them waiting.
CORES_PER_CHECK = {"cuda": 8, "cpu": 2}


@dataclass(frozen=True)
class Command:
    """One command of a stage; its files are named after ``name``."""

    name: str
    words: tuple[str, ...]


def at_once(stage: str) -> int:
    """Return how many commands of a stage run at a time on this machine."""
    if stage not in CHECKS:
        return AT_ONCE[stage]
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return max(1, len(os.sched_getaffinity(0)) // CORES_PER_CHECK[kind])


def commands(
    stage: str,
    operators: Sequence[str],
    out: Path,
    options: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    draws: int = 0,
) -> Iterator[Command]:
    """Yield the commands of a stage. ``options`` go to ``fuselab check`` and ``fuselab bench``.

    All commands of ``plain``, which compiles and records which calls are enough, must end before
    ``sanitize`` begins.
    """
    python = sys.executable
    fuselab = (python, "-m", "fuselab")
    if stage == "test":
        # Neighbouring tests stay with one worker, because they share kernels, which two workers
        # would both compile.
        spread = ("-n", "10", "--dist", "worksteal", "-p", "no:cacheprovider")
        for name, marked, how in (
            ("test", "gpu and not timing", spread),
            ("test-timing", "gpu and timing", ("-p", "no:cacheprovider")),  # one at a time
        ):
            words = (python, "-m", "pytest", "-m", marked, "-q", *how, str(CLONE / "tests"))
            yield Command(name, words)
        return
    script = str(CLONE / "tools" / "sanitize.py")
    drawn = ("--draws", str(draws), "--seed", str(seeds[0])) if draws else ()
    for name in operators if stage == "plain" else ():
        yield Command(
            f"plain-{name}",
            (python, script, name, *drawn, "--record", str(out / f"{name}.json")),
        )
    for tool in SANITIZERS if stage == "sanitize" else ():
        watch = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "3", python, script)
        for name in operators:
            only = () if tool == "memcheck" else ("--only", str(out / f"{name}.json"))
            zeroed = ("--zeroed-products",) if tool == "initcheck" else ()
            yield Command(f"{tool}-{name}", (*watch, name, *drawn, *only, *zeroed))
    if stage in CHECKS:
        quick = ("--quick",) if stage == "check" else ()
        for seed in seeds:
            for name in operators:
                file = f"{stage}-{name}-{seed}"
                words = (*fuselab, "check", name, *quick, "--seed", str(seed), *options)
                yield Command(file, (*words, "--json", str(out / f"{file}.json")))
    for name in operators:
        json_words = ("--json", str(out / f"{stage}-{name}.json"))
        if stage == "tune" and ops.contract(name).configs:
            yield Command(
                f"tune-{name}", (*fuselab, "bench", name, "--tune", *options, *json_words)
            )
        elif stage == "bench":
            backward = ("--backward",) if ops.contract(name).gradient is not None else ()
            yield Command(
                f"bench-{name}", (*fuselab, "bench", name, *backward, *options, *json_words)
            )


def run(command: Command, out: Path, environment: Mapping[str, str] | None = None) -> bool:
    """Run one command, print how it ended, and return whether it succeeded."""
    begin = time.monotonic()
    log = out / f"{command.name}.log"
    with log.open("w") as file:
        ended = subprocess.run(
            command.words,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    seconds = time.monotonic() - begin
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1][:100] if lines else ""
    print(f"{ended.returncode} {seconds:6.1f} s  {command.name}: {last}", flush=True)
    return ended.returncode == 0


def environments(stage: str) -> list[dict[str, str]]:
    """Return the environment variables of each of the commands that run at a time.

    Each gets a GPU of its own if there are several, and in a check without a GPU its share of the
    threads.
    """
    count = torch.cuda.device_count()
    if stage in CHECKS and count == 0:
        return [{"OMP_NUM_THREADS": str(CORES_PER_CHECK["cpu"])}] * at_once(stage)
    if at_once(stage) == 1 or count < 2:
        return [{}] * at_once(stage)
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = [name for name in given.split(",") if name] or [str(place) for place in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": devices[slot % count]} for slot in range(at_once(stage))]


def run_all(stage: str, listed: Sequence[Command], out: Path) -> int:
    """Run the commands of a stage, several at a time; return how many failed."""
    free: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for environment in environments(stage):
        free.put(environment)

    def run_one(command: Command) -> bool:
        environment = free.get()
        try:
            return run(command, out, environment)
        finally:
            free.put(environment)

    with ThreadPoolExecutor(at_once(stage)) as pool:
        return sum(not well for well in pool.map(run_one, listed))


def verdicts(stage: str, operators: Sequence[str], out: Path, seeds: Sequence[int]) -> list[str]:
    """Return one line per operator that sums up its checks at all seeds."""
    lines = []
    for name in operators:
        found = [out / f"{stage}-{name}-{seed}.json" for seed in seeds]
        reports = [json.loads(file.read_text()) for file in found if file.is_file()]
        groups = [group for report in reports for group in report["groups"]]
        trials, planned = (sum(group[key] for group in groups) for key in ("trials", "planned"))
        failed = [
            seed
            for seed, file in zip(seeds, found, strict=True)
            if not file.is_file() or not json.loads(file.read_text())["passed"]
        ]
        verdict = f"FAIL at {', '.join(map(str, failed))}" if failed else "PASS"
        if any(report["cut_short"] for report in reports):
            verdict += f", cut short: {trials} of {planned}"
        else:
            verdict += f": {trials}"
        lines.append(f"{name}: {verdict} trials at {len(seeds)} seeds")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("stages", nargs="+", choices=STAGES, metavar="STAGE")
    parser.add_argument("--operator", action="append", choices=ops.operators(), metavar="NAME")
    parser.add_argument("--seed", action="append", type=int, metavar="N")
    parser.add_argument("--draws", type=int, default=0, metavar="N")
    options, passed_on = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = options.seed or [0]
    failures = 0
    stages = [("plain", stage) if stage == "sanitize" else (stage,) for stage in options.stages]
    for stage in (stage for pair in stages for stage in pair):
        operators = options.operator or list(ops.operators())
        listed = commands(stage, operators, options.out, passed_on, seeds, options.draws)
        failures += run_all(stage, list(listed), options.out)
        if stage in CHECKS:
            print(*verdicts(stage, operators, options.out, seeds), sep="\n", flush=True)
    print(f"{failures} commands failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

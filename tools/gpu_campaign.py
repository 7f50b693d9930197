"""Everything of the library that only a GPU can show, in one command.

    python tools/gpu_campaign.py OUT test check sanitize tune bench [--operator NAME ...]

Stages run in the order given. ``test``: the GPU-marked tests. ``check``: ``fuselab check --quick``
of every operator, ``full-check``: without ``--quick``. ``sanitize``: ``tools/sanitize.py`` alone,
which compiles its kernels, then under memcheck, racecheck and initcheck. ``tune``: ``fuselab bench
--tune`` of every operator that declares configurations. ``bench``: ``fuselab bench --backward``.
What only asks for answers runs several at a time; what takes times has the GPU to itself.

Every command's output lies in ``OUT/STAGE-OPERATOR.log``, the results of check, tune and bench
beside it as JSON. A line per command says how it ended and how long it took; the last line counts
the failures. Exit status 1 where there is one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fuselab import ops

CLONE = Path(__file__).resolve().parent.parent
# A check has a process per implementation and dtype, up to one a core: 4 are 48 on 16 cores.
AT_ONCE = {"test": 1, "check": 4, "full-check": 1, "plain": 8, "sanitize": 8, "tune": 1, "bench": 1}
SANITIZERS = ("memcheck", "racecheck", "initcheck")


@dataclass(frozen=True)
class Command:
    """One command of a stage; ``name`` names its files."""

    name: str
    words: tuple[str, ...]


def commands(stage: str, operators: list[str], out: Path, options: list[str]) -> Iterator[Command]:
    """What a stage runs; ``options`` go to ``fuselab bench`` in ``tune`` and ``bench``. All of
    ``plain``, which compiles and says which calls are enough, ends before ``sanitize`` begins."""
    python = sys.executable
    fuselab = (python, "-m", "fuselab")
    if stage == "test":
        # Neighbours stay with one worker: they share kernels, which two would compile at a time.
        spread = ("-n", "10", "--dist", "worksteal", "-p", "no:cacheprovider")
        yield Command(
            "test", (python, "-m", "pytest", "-m", "gpu", "-q", *spread, str(CLONE / "tests"))
        )
        return
    script = str(CLONE / "tools" / "sanitize.py")
    for name in operators if stage == "plain" else ():
        yield Command(
            f"plain-{name}", (python, script, name, "--record", str(out / f"{name}.json"))
        )
    for tool in SANITIZERS if stage == "sanitize" else ():
        watch = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "3", python, script)
        for name in operators:
            only = () if tool == "memcheck" else ("--only", str(out / f"{name}.json"))
            zeroed = ("--zeroed-products",) if tool == "initcheck" else ()
            yield Command(f"{tool}-{name}", (*watch, name, *only, *zeroed))
    for name in operators:
        json = ("--json", str(out / f"{stage}-{name}.json"))
        if stage in ("check", "full-check"):
            quick = ("--quick",) if stage == "check" else ()
            yield Command(f"{stage}-{name}", (*fuselab, "check", name, *quick, *json))
        elif stage == "tune" and ops.contract(name).configs:
            yield Command(f"tune-{name}", (*fuselab, "bench", name, "--tune", *options, *json))
        elif stage == "bench":
            backward = ("--backward",) if ops.contract(name).gradient is not None else ()
            yield Command(f"bench-{name}", (*fuselab, "bench", name, *backward, *options, *json))


def run(command: Command, out: Path) -> bool:
    """Run one command, say how it ended, and whether it ended well."""
    begin = time.monotonic()
    log = out / f"{command.name}.log"
    with log.open("w") as file:
        ended = subprocess.run(command.words, stdout=file, stderr=subprocess.STDOUT)
    seconds = time.monotonic() - begin
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1][:100] if lines else ""
    print(f"{ended.returncode} {seconds:6.1f} s  {command.name}: {last}", flush=True)
    return ended.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("stages", nargs="+", choices=AT_ONCE, metavar="STAGE")
    parser.add_argument("--operator", action="append", choices=ops.operators(), metavar="NAME")
    options, for_bench = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failures = 0
    stages = [("plain", stage) if stage == "sanitize" else (stage,) for stage in options.stages]
    for stage in (stage for pair in stages for stage in pair):
        operators = options.operator or list(ops.operators())
        with ThreadPoolExecutor(AT_ONCE[stage]) as pool:
            listed = commands(stage, operators, options.out, for_bench)
            ended = pool.map(lambda command: run(command, options.out), list(listed))
            failures += sum(not well for well in ended)
    print(f"{failures} commands failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

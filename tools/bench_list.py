"""Run a list of ``fuselab bench`` commands in one process, one result file each.

    python tools/bench_list.py benchmarks/nvidia-h200/commands.txt OUT [--seconds S] [WORD ...]

A line of the list is ``NAME: OPTIONS``; OPTIONS follow ``fuselab bench`` on a command line. ``#``
begins a comment. ``OUT/NAME.json`` is the command's ``--json``, ``OUT/NAME.txt`` its output; a
survey is kept in the folder ``OUT/NAME`` too, and goes on there when the list runs again. WORDs
are added to every line's options (``--budget 0.3``). No command begins after S seconds. The exit
status is 1 if any command's is not 0.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import shlex
import sys
import time
import warnings
from pathlib import Path

import torch

from fuselab.cli.main import run


def lines(path: Path) -> list[tuple[str, list[str]]]:
    """Return the name and the words of every command of a list."""
    found = []
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, options = line.partition(": ")
            found.append((name.strip(), shlex.split(options)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("list", type=Path, metavar="LIST")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S")
    given, further = parser.parse_known_args()
    given.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.seconds
    failures = 0
    for name, words in lines(given.list):
        begin = time.monotonic()
        if begin > end:
            print(f"time is up before {name}", flush=True)
            return 1
        command = ["bench", *words, *further, "--json", str(given.out / f"{name}.json")]
        if "--survey" in words:
            command += ["--output", str(given.out / name)]
        with (
            (given.out / f"{name}.txt").open("w") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            status = run(command)
        failures += status != 0
        print(f"{status} {time.monotonic() - begin:6.1f} s  {name}", flush=True)
        torch._dynamo.reset()  # otherwise all commands would share its limit of recompilations
        gc.collect()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

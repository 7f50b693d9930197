"""Every operator with a C++ kernel on this CPU, as each instruction set runs it: one table.

    python benchmarks/cpu_operators.py [--instruction-set avx2 ...] [--operator softmax ...]
                                       [--without-tables]

For every instruction set that this machine has (or those named), in fresh processes whose PyTorch
and whose kernels are both limited to it, the script

1. times the calls that decide what ``implementation="auto"`` takes, and writes them to
   ``src/fuselab/runtime/measured/cpu-NAME.json``, where they ship with the package;
2. times twelve sizes of every operator, 64 kB to 200 MB of float32, in inference and in training:
   eager PyTorch, torch.compile (``dynamic=True``: one compilation for all sizes) and ``auto``, in
   turns, with a warm cache; and puts the rows into ``benchmarks/cpu/operators.json``, beside those
   of instruction sets measured elsewhere, and the table into ``benchmarks/cpu/operators.md``.
   With ``--operator`` the other operators' rows and times stay, with the machine they are of.

The exit status is 1 if ``auto`` takes more than eager / 0.97 anywhere. An instruction set takes a
quarter of an hour on two idle cores; anything else that runs meanwhile spoils the times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fuselab.prove import cpu_points, cpu_times
from fuselab.runtime import instruction_set

CLONE = Path(__file__).resolve().parent.parent
RESULTS = CLONE / "benchmarks" / "cpu" / "operators.json"
TABLE = RESULTS.with_suffix(".md")
TABLES = CLONE / "src" / "fuselab" / "runtime" / "measured"
LEAST = 0.97  # least ratio of eager's time to auto's


def measure(
    name: str, with_tables: bool, operators: Sequence[str], kept: dict[str, Any] | None
) -> dict[str, Any]:
    """Measure one instruction set and return what ``cpu_times --rows`` wrote, with the rows of
    ``kept`` that are of other operators."""
    os.environ[instruction_set.VARIABLE] = os.environ["ATEN_CPU_CAPABILITY"] = name
    # The machine's own table, if there is one, must not decide.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FUSELAB_CACHE"] = cache
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache) / "inductor")
        named = [word for operator in operators for word in ("--operator", operator)]
        if with_tables and cpu_times.measure_in_process(TABLES / f"cpu-{name}.json", named) != 0:
            raise SystemExit(1)
        rows = Path(cache) / "rows.json"
        if operators and kept is not None:
            rows.write_text(json.dumps(kept), encoding="utf-8")
        if cpu_times.measure_in_process(rows, ("--rows", *named)) != 0:
            raise SystemExit(1)
        found: dict[str, Any] = json.loads(rows.read_text(encoding="utf-8"))
        return found


def markdown(results: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of all instruction sets, each with a summary of its rows."""
    yield "# Operators with a C++ kernel on a CPU"
    yield ""
    yield "us per call, medians; `auto` over eager above 1 is faster. `benchmarks/cpu_operators.py`"
    yield "makes this page and says how each figure is taken."
    for name, found in results.items():
        rows = found["rows"]
        ratios = [row["eager_over_auto"][0] for row in rows]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        yield ""
        yield f"## {name}"
        yield ""
        yield (
            f"{len(rows)} rows, eager over auto {mean:.2f} in the geometric mean, "
            f"{min(ratios):.2f} at least."
        )
        yield ""
        for place, where in enumerate(found["environments"]):
            of = {row["operator"]: None for row in rows if row["environment"] == place}
            yield (
                f"- {where['threads']} threads of {where['cpu']}, torch {where['torch']}, "
                f"{where['date']}: {', '.join(f'`{name}`' for name in of)}"
            )
        yield ""
        yield "| operator | size | use | MB | eager | compile | auto | takes | eager / auto |"
        yield "|---|---|---|---|---|---|---|---|---|"
        for row in rows:
            us = row["us"]
            low, high = row["eager_over_auto"][1:]
            yield (
                f"| `{row['operator']}` | {row['case']} | {row['use']} "
                f"| {row['bytes_moved'] / 1e6:.3g} | {_figure(us['reference'])} "
                f"| {_figure(us['compile'])} | {_figure(us['auto'])} | {row['auto_takes']} "
                f"| {row['eager_over_auto'][0]:.2f} ({low:.2f} to {high:.2f}) |"
            )


def _figure(us: float | None) -> str:
    return "–" if us is None else f"{us:.0f}" if us >= 100 else f"{us:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    held = instruction_set.available()
    parser.add_argument("--instruction-set", action="append", choices=held)
    parser.add_argument("--without-tables", action="store_true")
    parser.add_argument("--operator", action="append", choices=cpu_points.timed_operators())
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    slow = 0
    for name in options.instruction_set or held:
        named = options.operator or ()
        found = measure(name, not options.without_tables, named, results.get(name))
        results[name] = found
        for row in found["rows"]:
            if row["eager_over_auto"][0] < LEAST:
                slow += 1
                ratio = row["eager_over_auto"][0]
                print(f"{name}: {row['operator']} {row['case']} {row['use']}: {ratio:.3f}")
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        TABLE.write_text("\n".join(markdown(results)) + "\n", encoding="utf-8")
    print(f"{slow} rows where auto is slower than eager / {LEAST}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())

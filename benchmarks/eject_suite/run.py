"""Eject every member of the suite, check it, and time it against eager and torch.compile.

    python benchmarks/eject_suite/run.py OUT [--only NAME ...] [--dtype bfloat16] [--seed N]
        [--check] [--without-times] [--budget S] [--jobs N]

Each step of each member is a process of its own: it writes the package to ``OUT/packages/NAME``;
with ``--check``, ``fuselab check --quick`` judges it; ``time_member.py`` times eager, torch.compile
and the package's kernels in one process, interleaved, forward and forward+backward, and compares
every result with the reference. With ``--jobs`` above 1 so many members eject, check and compile
side by side; they are always timed one after the other, while nothing else of the suite runs.
``OUT/NAME/*.log`` has the output of each step. A step that ended is not run again by a later call
with the same OUT, so an interrupted run resumes; remove ``OUT/NAME`` to repeat a member.

``OUT/results.json`` has everything, ``OUT/results.md`` the table and ``OUT/results.svg`` the plot;
they are written anew after each member. It needs no GPU: on a CPU the members are a sixteenth of
their size. The exit status is 1 if a member failed a step; a member that eject refuses is no
failure, and the table says why it was refused.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import attention  # noqa: F401  (adds its members)
import families  # noqa: F401
import losses  # noqa: F401
import norms  # noqa: F401
import pointwise  # noqa: F401
import positions  # noqa: F401
import reductions  # noqa: F401
import torch
from suite import MEMBERS
from time_member import READY

from fuselab.device.ceiling import measured_ceilings
from fuselab.device.select import select as select_device
from fuselab.ejection.eject import eject
from fuselab.errors import EjectError
from fuselab.measure.fresh import PINNED_ALLOCATION, child_environment

LIMIT_S = 1800  # for one step of one member
PEERS = ("eager", "compile")
OURS = {"cuda": ("triton", "cuda"), "cpu": ("cpp",)}
PHASES = ("forward", "forward+backward")
REFUSED = 3  # exit status of the step that ejects


def eject_member(name: str, folder: Path, on_gpu: bool) -> int:
    """Write the package of a member to ``folder``; return the exit status."""
    member = MEMBERS[name]
    examples = member.examples(on_gpu)
    try:
        eject(member.function(), *examples, out=folder, name=name, force=True)
    except EjectError as error:
        print(error)
        return REFUSED
    return 0


class Suite:
    """The results of a run in the folder ``out``, step by step."""

    def __init__(self, out: Path, given: argparse.Namespace) -> None:
        self.out = out
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = given.dtype or ("bfloat16" if self.device == "cuda" else "float32")
        self.given = given
        self.results: dict[str, dict[str, Any]] = {}

    def run(self, names: Sequence[str]) -> None:
        """Run the steps of the members that have not ended yet."""
        with ThreadPoolExecutor(self.given.jobs) as pool:
            for name, result in zip(names, pool.map(self.made, names), strict=True):
                self.results[name] = result
                if self.given.without_times:
                    self.say(name)
        self.write()
        if self.given.without_times:
            return
        measured_ceilings(select_device("auto"))  # stored: the members' processes read it
        ejected = [name for name in names if self.results[name]["eject"]["status"] == 0]
        for first in range(0, len(ejected), self.given.jobs):
            batch = ejected[first : first + self.given.jobs]
            self.time(batch)
            for name in batch:
                self.say(name)
            self.write()

    def say(self, name: str) -> None:
        """Print one line about a member."""
        result = self.results[name]
        word = "refused" if result.get("refused") else "FAILED" if _failed(result) else "ok"
        ratios = [f"{row['phase']} {row['over_compile'] or '–'}" for row in result.get("times", ())]
        print(f"{word:7} {name}  {'  '.join(ratios)}", flush=True)

    def made(self, name: str) -> dict[str, Any]:
        """Write a member's package and, where asked, check it; return the result so far."""
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        package = self.out / "packages" / name
        result: dict[str, Any] = {"group": MEMBERS[name].group}
        command = [sys.executable, __file__, str(package), "--eject-one", name]
        step = self.step(folder / "eject", command)
        result["eject"] = step
        if step["status"] != 0:
            result["refused"] = step["output"] if step["status"] == REFUSED else None
            return result
        if self.given.check:
            words = [sys.executable, "-m", "fuselab", "check", str(package), "--quick"]
            words += ["--dtype", self.dtype, "--seed", str(self.given.seed)]
            result["check"] = self.step(folder / f"check.{self.dtype}.{self.given.seed}", words)
        return result

    def time(self, names: Sequence[str]) -> None:
        """Compile the members side by side, then time them one after the other."""
        stems = {name: self.out / name / f"bench.{self.dtype}.{self.given.seed}" for name in names}
        started = {
            name: self.timed_member(name, stem)
            for name, stem in stems.items()
            if not Path(f"{stem}.json").is_file()
        }
        for process in started.values():
            _wait_until_ready(process)
        for name, process in started.items():
            begin = time.monotonic()
            try:
                process.communicate("go\n", timeout=LIMIT_S)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                process.kill()
                process.wait()
            self.end(stems[name], process.returncode, begin)
        for name, stem in stems.items():
            result = self.results[name]
            result["bench"] = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
            written = Path(f"{stem}.times.json")
            if written.is_file():
                bench = json.loads(written.read_text(encoding="utf-8"))
                result["environment"] = bench["environment"]
                result["times"] = list(self.times(bench["groups"]))

    def timed_member(self, name: str, stem: Path) -> subprocess.Popen[str]:
        """Start the process that times a member."""
        words = [sys.executable, str(Path(__file__).with_name("time_member.py"))]
        words += [str(self.out / "packages" / name), "--dtype", self.dtype]
        words += ["--seed", str(self.given.seed), "--budget", str(self.given.budget)]
        words += ["--providers", ",".join((*PEERS, *OURS[self.device]))]
        words += ["--json", f"{stem}.times.json"]
        pinned = PINNED_ALLOCATION if self.device == "cpu" else {}
        with Path(f"{stem}.log").open("w", encoding="utf-8") as log:
            return subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(**pinned),
                text=True,
            )

    def step(self, stem: Path, command: Sequence[str]) -> dict[str, Any]:
        """Run a command once; return its exit status, seconds, and output where it failed."""
        ended = Path(f"{stem}.json")
        if ended.is_file():
            found: dict[str, Any] = json.loads(ended.read_text(encoding="utf-8"))
            return found
        begin = time.monotonic()
        log = Path(f"{stem}.log")
        with log.open("w", encoding="utf-8") as output:
            try:
                done = subprocess.run(
                    command, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S
                )
                status = done.returncode
            except subprocess.TimeoutExpired:
                status = -1
                output.write(f"stopped after {LIMIT_S} s\n")
        return self.end(stem, status, begin)

    def end(self, stem: Path, status: int, begin: float) -> dict[str, Any]:
        """Write down that a step ended; return its status, seconds, and output where it failed."""
        step: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - begin, 1)}
        if status:
            text = Path(f"{stem}.log").read_text(encoding="utf-8", errors="replace")
            step["output"] = "\n".join(text.strip().splitlines()[-5:])
        Path(f"{stem}.json").write_text(json.dumps(step), encoding="utf-8")
        return step

    def times(self, groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the median times of each phase in microseconds, and how much faster than eager and
        than torch.compile the fastest kernel of the package is."""
        for group in groups:
            records = {one["provider"]: one for one in group["records"]}
            medians = {name: one["median_us"] for name, one in records.items()}
            ours = [medians[one] for one in OURS[self.device] if medians.get(one)]
            fastest = min(ours, default=None)
            yield {
                "phase": group["phase"],
                "dtype": group["dtype"],
                "bytes_moved": (group["bytes_read"] or 0) + (group["bytes_written"] or 0),
                "us": medians,
                "status": {
                    name: one["reason"] or one["status"]
                    for name, one in records.items()
                    if one["status"] != "ok"
                },
                "over_eager": _ratio(medians.get("eager"), fastest),
                "over_compile": _ratio(medians.get("compile"), fastest),
            }

    # --- what is written

    def write(self) -> None:
        """Write the JSON, the table and the plot of the members that have run."""
        payload = {
            "device": self.device,
            "dtype": self.dtype,
            "seed": self.given.seed,
            "members": self.results,
        }
        path = self.out / "results.json"
        path.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
        text = "\n".join(self.table()) + "\n"
        (self.out / "results.md").write_text(text, encoding="utf-8")
        if not self.given.without_times:
            self.plot()

    def table(self) -> Iterator[str]:
        """Yield the lines of the table, then a summary of each phase."""
        providers = (*PEERS, *OURS[self.device])
        yield f"# The suite of ejected functions, {self.dtype} on {self.device}"
        yield ""
        yield "Times are medians in microseconds. The last two columns say how many times faster"
        yield "than eager and than torch.compile the fastest kernel of the package is."
        yield ""
        yield f"| member | check | phase | {' | '.join(providers)} | / eager | / compile |"
        yield "|---" * (5 + len(providers)) + "|"
        for name, result in self.results.items():
            checked = result.get("check")
            judged = "–" if checked is None else "FAIL" if checked["status"] else "PASS"
            if result["eject"]["status"]:
                reason = result["refused"] or f"eject failed: {result['eject']['output']}"
                yield f"| {name} | refused: {_cell(reason)} |" + " |" * (3 + len(providers))
                continue
            for row in self.shown(result):
                cells = [_figure(row["us"].get(one)) for one in providers]
                cells += [_figure(row["over_eager"]), _figure(row["over_compile"])]
                yield f"| {name} | {judged} | {row['phase']} | {' | '.join(cells)} |"
            if not self.shown(result):
                yield f"| {name} | {judged} | not timed |" + " |" * (2 + len(providers))
        ejected = sum(one["eject"]["status"] == 0 for one in self.results.values())
        yield ""
        yield f"{ejected} of {len(self.results)} members were ejected."
        for phase in PHASES:
            for over in ("over_eager", "over_compile"):
                ratios = [value for _, value in self.ratios(phase, over)]
                if ratios:
                    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                    yield (
                        f"{phase}, {over.replace('_', ' ')}: geometric mean {mean:.2f}, least "
                        f"{min(ratios):.2f}, {sum(one >= 1 for one in ratios)} of {len(ratios)} "
                        "at least as fast."
                    )

    def shown(self, result: dict[str, Any]) -> list[dict[str, Any]]:
        return [row for row in result.get("times", ()) if row["phase"] in PHASES]

    def ratios(self, phase: str, over: str) -> list[tuple[str, float]]:
        """Return the members timed in a phase with one of their ratios, the least first."""
        found = [
            (name, row[over])
            for name, result in self.results.items()
            for row in self.shown(result)
            if row["phase"] == phase and row[over]
        ]
        return sorted(found, key=lambda pair: pair[1])

    def plot(self) -> None:
        """Draw how many times faster than torch.compile each member is, phase by phase."""
        try:
            import matplotlib
        except ImportError:
            return  # the table has the same figures
        matplotlib.use("Agg")
        from matplotlib import pyplot

        rows = max((len(self.ratios(phase, "over_compile")) for phase in PHASES), default=0)
        if not rows:
            return
        figure, axes = pyplot.subplots(
            1, len(PHASES), figsize=(15, 1.5 + 0.2 * rows), layout="constrained"
        )
        for phase, axis in zip(PHASES, axes, strict=True):
            pairs = self.ratios(phase, "over_compile")
            colors = ["#009E73" if value >= 1 else "#D55E00" for _, value in pairs]
            axis.barh([name for name, _ in pairs], [value for _, value in pairs], color=colors)
            axis.axvline(1, color="#000000", linewidth=1)
            axis.set_xscale("log", base=2)
            axis.tick_params(axis="y", labelsize=7)
            axis.set_title(phase)
            axis.set_xlabel("time of torch.compile / time of the fastest ejected kernel")
        figure.suptitle(f"Ejected functions, {self.dtype} on {self.device}")
        figure.savefig(self.out / "results.svg")
        pyplot.close(figure)


def _wait_until_ready(process: subprocess.Popen[str]) -> None:
    """Read what a member prints until it is ready or has ended; one that hangs is killed."""
    output: IO[str] | None = process.stdout
    assert output is not None
    killer = threading.Timer(LIMIT_S, process.kill)
    killer.start()
    for line in output:
        if line.strip() == READY:
            break
    killer.cancel()


def _ratio(peer: float | None, ours: float | None) -> float | None:
    return round(peer / ours, 3) if peer and ours else None


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _failed(result: dict[str, Any]) -> bool:
    steps = [result.get("check"), result.get("bench")]
    refused = result["eject"]["status"] in (0, REFUSED)
    return not refused or any(step is not None and step["status"] != 0 for step in steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--only", nargs="+", choices=MEMBERS, metavar="NAME")
    parser.add_argument("--dtype", help="bfloat16 on a GPU and float32 on a CPU by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="judge every package")
    parser.add_argument("--without-times", action="store_true", help="time nothing")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per case and phase")
    parser.add_argument("--jobs", type=int, default=1, help="members that compile side by side")
    parser.add_argument("--eject-one", choices=MEMBERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.eject_one:
        return eject_member(given.eject_one, given.out, torch.cuda.is_available())
    given.out.mkdir(parents=True, exist_ok=True)
    suite = Suite(given.out.resolve(), given)
    suite.run(given.only or list(MEMBERS))
    failures = sum(map(_failed, suite.results.values()))
    print(f"{failures} members failed a step; the table is {suite.out / 'results.md'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

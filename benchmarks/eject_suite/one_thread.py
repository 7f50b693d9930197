"""Time the C++ of ejected members against torch.compile and eager, in CPU time of one thread.

    python benchmarks/eject_suite/one_thread.py OUT [--instruction-set avx2] [--only NAME ...]
        [--budget S]

Each member is a process of its own. It writes the package to ``OUT/packages/NAME``, compiles it for
the instruction set, to which PyTorch and Inductor are limited, too, and calls eager, torch.compile
and the C++ kernels in turns, forward and forward+backward. A figure is the least CPU time that the
thread took for a call, with warm caches: unlike wall time it bears other work on the machine. The
results of the kernels are compared with the reference in float64 before they are timed.

``OUT/SET.json`` has everything and ``OUT/SET.md`` the table, slowest members first; both are
written anew after each member. A call without ``--only`` leaves out the members that the file
already has, so an interrupted run resumes. The exit status is 1 if a member failed or was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

LIMIT_S = 900  # for one member
PHASES = ("forward", "forward+backward")
PEERS = ("eager", "compile")
OURS = "cpp"
FEWEST_ROUNDS = 7
SHORTEST_SAMPLE_S = 5e-4  # a sample of a shorter call is several calls

# --- the process of one member --------------------------------------------------------------------


def time_member(name: str, package: Path, budget_s: float) -> dict[str, Any]:
    """Eject a member, and return the microseconds of each provider in each phase."""
    import run  # noqa: F401  (adds all members)
    import torch
    from suite import MEMBERS

    from fuselab.device.environment import describe
    from fuselab.ejection.eject import eject
    from fuselab.prove.bench_providers import select
    from fuselab.prove.bench_work import Work
    from fuselab.prove.load import load_op
    from fuselab.runtime import fallback

    torch.set_num_threads(1)
    member, device = MEMBERS[name], torch.device("cpu")
    eject(member.function(), *member.examples(False), out=package, name=name, force=True)
    torch._dynamo.reset()
    op = load_op(str(package))
    case = next((case for case in op.cases if "bench" in case.tags), op.cases[0])
    found: dict[str, Any] = {"environment": describe(device), "us": {}}
    with fallback.strict():
        for phase in PHASES if op.gradient else PHASES[:1]:
            work = Work(op, case, device, torch.float32, phase)
            calls = {}
            for provider in select(op, [*PEERS, OURS]):
                prepared = work.calls(
                    *provider.prepare(work.args),
                    bool(op.mutates) and provider.kind == "implementation",
                )
                if provider.name == OURS and (problem := work.problem(prepared.checked)):
                    raise SystemExit(f"{phase}: {problem}")
                calls[provider.name] = prepared.timed
            found["us"][phase] = in_turns(calls, budget_s)
    return found


def in_turns(calls: dict[str, Callable[[], object]], budget_s: float) -> dict[str, float]:
    """Return the least CPU time of each call in microseconds; the calls take turns."""
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, math.ceil(SHORTEST_SAMPLE_S / sampled(call, 1)))
    least = dict.fromkeys(calls, math.inf)
    deadline, rounds = perf_counter() + budget_s, 0
    while rounds < FEWEST_ROUNDS or perf_counter() < deadline:
        for name, call in calls.items():
            least[name] = min(least[name], sampled(call, repeats[name]))
        rounds += 1
    return {name: float(f"{seconds * 1e6:.4g}") for name, seconds in least.items()}


def sampled(call: Callable[[], object], repeats: int) -> float:
    """Return the CPU seconds of this thread for one of ``repeats`` calls."""
    begin = thread_time()
    for _ in range(repeats):
        call()
    return (thread_time() - begin) / repeats


# --- the parent -----------------------------------------------------------------------------------


def measured(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run the process of a member; return what it found, or why it failed."""
    from fuselab.measure.fresh import PINNED_ALLOCATION, child_environment
    from fuselab.runtime import instruction_set

    environment = child_environment(
        ATEN_CPU_CAPABILITY=given.instruction_set,
        OMP_NUM_THREADS="1",
        # Inductor's cache takes a graph compiled for another instruction set for the same one.
        TORCHINDUCTOR_CACHE_DIR=str(given.out / "inductor" / given.instruction_set),
        **{instruction_set.VARIABLE: given.instruction_set},
        **PINNED_ALLOCATION,
    )
    words = [sys.executable, __file__, str(given.out), "--member", name]
    words += ["--budget", str(given.budget)]
    try:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"stopped after {LIMIT_S} s"}
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return {"failed": lines[-1] if lines else f"exit status {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def ratios(results: dict[str, Any], phase: str, peer: str) -> list[float]:
    """Return how many times as fast as ``peer`` each member is in a phase."""
    timed = [found["us"][phase] for found in results.values() if phase in found.get("us", ())]
    return [us[peer] / us[OURS] for us in timed]


def slowest(found: dict[str, Any]) -> float:
    """Return the least ratio of torch.compile's time to ours; 0 for a member that failed."""
    return min((us["compile"] / us[OURS] for us in found.get("us", {}).values()), default=0.0)


def table(results: dict[str, Any], instruction_set: str) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"# Ejected C++ in CPU time of one thread, {instruction_set}, float32"
    yield ""
    yield "Least microseconds of a call, and how many times as fast the C++ kernels are as eager"
    yield "and as torch.compile. `benchmarks/eject_suite/one_thread.py` makes this page."
    yield ""
    for phase in PHASES:
        for peer in PEERS:
            found = ratios(results, phase, peer)
            if found:
                mean = math.exp(sum(map(math.log, found)) / len(found))
                yield (
                    f"- {phase}, {peer} / C++: geometric mean {mean:.2f} of {len(found)} members, "
                    f"least {min(found):.2f}, {sum(one >= 1 for one in found)} at least 1."
                )
    yield ""
    yield "| member | phase | eager | compile | C++ | eager / C++ | compile / C++ |"
    yield "|---|---|---|---|---|---|---|"
    for name, found in sorted(results.items(), key=lambda pair: slowest(pair[1])):
        if "failed" in found:
            yield f"| {name} | failed: {found['failed'].replace('|', '/')} |" + " |" * 5
            continue
        for phase, us in found["us"].items():
            cells = [f"{us[one]:.4g}" for one in (*PEERS, OURS)]
            cells += [f"{us[peer] / us[OURS]:.2f}" for peer in PEERS]
            yield f"| {name} | {phase} | {' | '.join(cells)} |"


def main() -> int:
    from fuselab.runtime import instruction_set

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--instruction-set", choices=instruction_set.available())
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measured again if need be")
    parser.add_argument("--budget", type=float, default=0.7, help="seconds per phase")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.member:
        package = given.out / "packages" / given.member
        print(json.dumps(time_member(given.member, package, given.budget), default=str))
        return 0
    import run  # noqa: F401
    from suite import MEMBERS

    unknown = sorted(set(given.only or ()) - set(MEMBERS))
    if unknown:
        parser.error(f"no member is called {', '.join(unknown)}")
    given.instruction_set = given.instruction_set or instruction_set.instruction_set()
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{given.instruction_set}.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    names = given.only or [name for name in MEMBERS if name not in results]
    for name in names:
        found = results[name] = measured(name, given)
        ratio = found.get("failed") or "  ".join(
            f"{phase} {us['compile'] / us[OURS]:.2f}" for phase, us in found["us"].items()
        )
        print(f"{name}  {ratio}", flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        text = "\n".join(table(results, given.instruction_set)) + "\n"
        path.with_suffix(".md").write_text(text, encoding="utf-8")
    return 1 if any("failed" in results[name] for name in names) else 0


if __name__ == "__main__":
    sys.exit(main())

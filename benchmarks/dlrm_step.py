"""A DLRM's training step and forward, main configuration: ours against every peer, in one run.

    python benchmarks/dlrm_step.py [--device cuda] [--case dot-128 ...] [--provider ours ...]
                                   [--largest ROWS] [--budget S] [--json FILE]

Providers: ``eager``, ``compile`` and ``compile+graphs`` are the usual spelling (26 look-ups with
sparse gradients, torch.optim.SGD, the layers after the tables eager or through torch.compile);
``strong`` is plain PyTorch at its best (one table, ``index_add_`` for its update, a compiled dense
part, the whole step in one CUDA graph); ``ours`` is the fused mode of ``fuselab train dlrm``, by
default. ``ours-branches`` and ``ours+branches``, asked for by name, never and always use a branch
beside the chain of products. On a GPU each runs in tf32 and bf16. ``forward`` cases are inference:
rows to probabilities, which stay where the graph leaves them.

A case is ``dot-2048``, ``outer-2048``, ``forward-128``. ``loop`` is microseconds per step of a loop
that is waited for at its end, with rounds of all providers in turn; ``cold`` is the device's time
with a cold L2 if the step is one CUDA graph; ``peak`` is memory above parameters and gradients of
the dense layers (SGD has no state). Rows are uniform. Everything that torch.compile must build is
built first, in child processes side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.data import Batch
from fuselab.data.layout import DENSE_COLUMNS
from fuselab.device.environment import describe
from fuselab.measure.device_timer import timer
from fuselab.measure.fresh import allocation_is_pinned, run_pinned
from fuselab.models.branch import branch_of
from fuselab.models.dlrm import MAIN, Dlrm, DlrmConfig
from fuselab.models.dlrm_fused import FusedDlrm, dense_parameters
from fuselab.report.files import write_json
from fuselab.runtime import autograd_node
from fuselab.train.captured import Captured
from fuselab.train.dlrm_modes import FusedStep, PlainStep

RATE = 0.1
CASES = {
    "cuda": ("dot-128", "dot-2048", "dot-65536", "outer-2048", "forward-128", "forward-2048"),
    "cpu": ("dot-2048",),
}
PROVIDERS = ("eager", "compile", "compile+graphs", "strong", "ours")
BRANCHES = {"ours": None, "ours-branches": False, "ours+branches": True}
# Compiling takes longer than timing, so only these cases have the two peers that are host-bound.
COMPILED_AS_WRITTEN = ("dot-2048", "outer-2048")
# of 16 cores; each is a process with a CUDA context and some gigabytes of host memory
CHILDREN = 12


@dataclass(frozen=True)
class Candidate:
    """A provider's step, ready to be timed.

    ``step`` is timed; ``graph`` says whether it is one CUDA graph; ``work`` is the same without the
    graph, to measure its memory.
    """

    step: Callable[[], object]
    work: Callable[[], object]
    graph: bool


@dataclass(frozen=True)
class Measured:
    """One measurement, in microseconds per step and bytes."""

    case: str
    provider: str
    precision: str
    loop_us: float
    loop_low_us: float
    loop_high_us: float
    cold_us: float | None
    peak_bytes: int | None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", nargs="+")
    parser.add_argument("--provider", nargs="+", choices=sorted({*PROVIDERS, *BRANCHES}))
    parser.add_argument("--precision", nargs="+", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--largest", type=int, help="rows of the largest table")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of timing per case")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only-build", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    autograd_node.start()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    if not on_gpu and not allocation_is_pinned():
        sys.exit(_again_pinned())
    cases = options.case or CASES[device.type]
    providers = options.provider or [
        name for name in PROVIDERS if on_gpu or name in ("eager", "compile", "ours")
    ]
    precisions = options.precision or (("tf32", "bf16") if on_gpu else ("fp32",))
    largest = options.largest or (2**31 if on_gpu else MAIN.largest_table)
    wanted = [
        (case, provider, precision)
        for case, provider, precision in itertools.product(cases, providers, precisions)
        if not _left_out(case, provider)
    ]
    if options.only_build:
        for case, provider, precision in wanted:
            with _precision(precision):
                candidate(case, provider, precision, 1000, device).work()
        return
    begin = time.monotonic()
    if on_gpu:
        build_side_by_side(wanted)
        print(f"built in {time.monotonic() - begin:.0f} s", flush=True)
    found: list[Measured] = []
    for case in cases:
        names = [(provider, precision) for at, provider, precision in wanted if at == case]
        measured = measure(case, names, largest, device, options.budget)
        show(case, measured)
        found += measured
        torch._dynamo.reset()  # compiled code keeps its model alive, two gigabytes
        print(f"{time.monotonic() - begin:.0f} s since the start", flush=True)
        if options.json is not None:  # written after every case
            facts = {"environment": describe(device), "largest_table": largest}
            write_json(options.json, {**facts, "measured": found})


def _again_pinned() -> int:
    """Run the script again with pinned allocation, since page faults bias timings on a CPU."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    )
    return run_pinned(Path(__file__).stem, sys.argv[1:])


def _left_out(case: str, provider: str) -> bool:
    compiled = provider.startswith("compile")
    forward = case.startswith("forward") and provider in ("compile+graphs", *list(BRANCHES)[1:])
    return forward or (compiled and case not in COMPILED_AS_WRITTEN)


def build_side_by_side(wanted: Sequence[tuple[str, str, str]]) -> None:
    """Fill the compilers' disk caches in child processes, for this process to use."""
    waiting = [each for each in wanted if each[1] != "eager"]
    running: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    for case, provider, precision in waiting:
        while sum(child.poll() is None for child in running) >= CHILDREN:
            time.sleep(0.1)
        words = [sys.executable, __file__, "--only-build", "--case", case]
        words += ["--provider", provider, "--precision", precision]
        running.append(subprocess.Popen(words, stderr=subprocess.DEVNULL, env=environment))
    for child in running:  # a build that fails here fails again below, and is shown there
        child.wait()


def measure(
    case: str,
    names: Sequence[tuple[str, str]],
    largest: int,
    device: torch.device,
    budget_s: float,
) -> list[Measured]:
    """Measure all providers of a case, in rounds of shuffled order."""
    ready: dict[tuple[str, str], Candidate] = {}
    peaks: dict[tuple[str, str], int | None] = {}
    for name in names:
        try:
            before = _allocated(device)
            ready[name] = candidate(case, *name, largest, device)
            with _precision(name[1]):
                for _ in range(3):
                    ready[name].step()
                peaks[name] = _peak(ready[name], before, case, largest, device)
        except Exception as error:  # a compiler or a full memory may raise anything
            print(f"  {' '.join(name)}: {type(error).__name__}: {str(error).splitlines()[0]}")
            ready.pop(name, None)
    calls = {}
    for name, each in ready.items():
        with _precision(name[1]):
            calls[name] = _calls(each.step, device)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in ready}
    order, draw = list(ready), random.Random(0)
    if not order:
        return []
    deadline = time.monotonic() + budget_s
    while len(times[order[0]]) < 5 or time.monotonic() < deadline:
        draw.shuffle(order)
        for name in order:
            with _precision(name[1]):
                times[name].append(_loop_us(ready[name].step, calls[name], device))
    return [
        Measured(
            case,
            *name,
            loop_us=median(times[name]),
            loop_low_us=min(times[name]),
            loop_high_us=max(times[name]),
            cold_us=_cold_us(each, device) if each.graph else None,
            peak_bytes=peaks[name],
        )
        for name, each in ready.items()
    ]


def candidate(
    case: str, provider: str, precision: str, largest: int, device: torch.device
) -> Candidate:
    """Return one provider's step or forward, with its own tables and batch."""
    forward = case.startswith("forward")
    config = config_of(case, largest)
    batch = batch_of(config, int(case.rsplit("-", 1)[1]), device)
    half = precision == "bf16"
    with _precision(precision):
        if provider == "strong":
            return strong(config, batch, half, forward)
        with torch.device(device):
            torch.manual_seed(0)
            model = Dlrm(config)
        if forward:
            return forward_of(provider, model, batch, half)
        if provider in BRANCHES:
            fused = FusedStep(model, "sgd", len(batch.labels), half, BRANCHES[provider])
            fused(batch, RATE)
            if fused.graph is None:
                return Candidate(lambda: fused(batch, RATE), lambda: fused(batch, RATE), False)
            return Candidate(fused.graph, fused._work, True)
        modes = {"eager": None, "compile": "default", "compile+graphs": "reduce-overhead"}
        plain = PlainStep(model, "sgd", half, compiled=modes[provider])
        return Candidate(lambda: plain(batch, RATE), lambda: plain(batch, RATE), False)


def config_of(case: str, largest: int) -> DlrmConfig:
    kind = case.rsplit("-", 1)[0]
    return replace(MAIN, interaction="dot" if kind == "forward" else kind, largest_table=largest)


def batch_of(config: DlrmConfig, size: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(1)
    bounds = torch.tensor(config.table_sizes, dtype=torch.float64)
    uniform = torch.rand((size, len(bounds)), generator=generator, dtype=torch.float64)
    labels = (torch.rand(size, generator=generator) < 0.25).float()
    dense = torch.rand((size, DENSE_COLUMNS), generator=generator) * 5
    return Batch(labels.to(device), dense.to(device), (uniform * bounds).int().to(device))


def forward_of(provider: str, model: Dlrm, batch: Batch, half: bool) -> Candidate:
    device = batch.dense.device
    if provider == "ours":
        fused = FusedDlrm(model, half, branch_of(device, len(batch.labels)))

        def ours() -> None:
            with torch.no_grad():
                fused.probabilities(batch.dense, batch.sparse)

        return _captured(ours, device)

    def plain() -> None:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=half):
            torch.sigmoid(model.logits_of_rows(batch.dense, batch.sparse).float())

    return Candidate(plain, plain, False)


def strong(config: DlrmConfig, batch: Batch, half: bool, forward: bool) -> Candidate:
    """Return plain PyTorch at its best; its forward is compiled as in the step, without a loss."""
    device = batch.dense.device
    sizes, width = config.table_sizes, config.embedding_dim
    flat = torch.empty(sum(sizes), width, device=device).uniform_(-0.01, 0.01)
    starts = torch.tensor([0, *sizes[:-1]], device=device).cumsum(0)
    with torch.device(device):
        torch.manual_seed(0)
        # only its dense layers are used
        model = Dlrm(replace(config, cardinalities=(1,) * len(sizes)))
    parameters = [value for _, value in dense_parameters(model)]
    vectors_of = len(sizes) + 1
    row, column = torch.tril_indices(vectors_of, vectors_of, -1, device=device).unbind()
    places = row * vectors_of + column

    def logits(dense: Tensor, vectors: Tensor) -> Tensor:
        first = model.dense_mlp(dense)
        every = torch.cat([first.unsqueeze(1), vectors.to(first.dtype)], 1)
        if config.interaction == "outer":
            flattened = every.flatten(1)
            mixed = (flattened.unsqueeze(2) * flattened.unsqueeze(1)).flatten(1)
        else:
            pairs = torch.bmm(every, every.transpose(1, 2)).flatten(1)
            mixed = torch.cat([first, pairs.index_select(1, places)], 1)
        return model.prediction_mlp(mixed)

    @torch.compile(dynamic=False)
    def loss_of(dense: Tensor, vectors: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            found = logits(dense, vectors)
        return F.binary_cross_entropy_with_logits(found.float()[:, 0], labels)

    @torch.compile(dynamic=False)
    def probability_of(dense: Tensor, vectors: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            return torch.sigmoid(logits(dense, vectors).float())

    def look_up() -> tuple[Tensor, Tensor]:
        rows = (batch.sparse + starts).flatten()
        return rows, flat.index_select(0, rows).view(-1, len(sizes), width)

    def work() -> None:
        rows, vectors = look_up()
        vectors.requires_grad_()
        loss = loss_of(batch.dense, vectors, batch.labels)
        *grads, of_vectors = torch.autograd.grad(loss, [*parameters, vectors])
        flat.index_add_(0, rows, of_vectors.reshape(-1, width), alpha=-RATE)
        torch._foreach_add_([value.detach() for value in parameters], grads, alpha=-RATE)

    def infer() -> None:
        with torch.no_grad():
            probability_of(batch.dense, look_up()[1])

    return _captured(infer if forward else work, device)


def _captured(work: Callable[[], None], device: torch.device) -> Candidate:
    if device.type != "cuda":
        return Candidate(work, work, False)
    return Candidate(Captured(work, device), work, True)


@contextlib.contextmanager
def _precision(precision: str) -> Iterator[None]:
    """Use tf32 products within the block if ``precision`` is tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _calls(step: Callable[[], object], device: torch.device) -> int:
    """Return how many calls take about 20 ms."""
    return max(1, min(200, round(20_000 / max(_loop_us(step, 2, device), 1))))


def _loop_us(step: Callable[[], object], calls: int, device: torch.device) -> float:
    _wait(device)
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    _wait(device)
    return (time.perf_counter() - begin) * 1e6 / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cold_us(each: Candidate, device: torch.device) -> float:
    clock = timer(each.step, device, cold=True)
    return median(clock.sample() for _ in range(5))


def _peak(
    each: Candidate, before: int, case: str, largest: int, device: torch.device
) -> int | None:
    """Return the peak bytes of a step above parameters and dense gradients; SGD keeps no state.

    ``before`` is the number of bytes allocated before the candidate was made. Returns None if
    others freed some of them.
    """
    if device.type != "cuda":
        return None
    with torch.device("meta"):
        config = config_of(case, largest)
        dense = sum(value.numel() for _, value in dense_parameters(Dlrm(config)))
    parameters = sum(config.table_sizes) * config.embedding_dim + dense
    gradients = 0 if case.startswith("forward") else dense
    torch.cuda.reset_peak_memory_stats(device)
    each.work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before - 4 * (parameters + gradients)
    return peak if peak >= 0 else None


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)


def show(case: str, measured: Sequence[Measured]) -> None:
    print(f"{case}, us per step:")
    for each in measured:
        cold = "" if each.cold_us is None else f"  cold {each.cold_us:9.1f}"
        peak = "" if each.peak_bytes is None else f"  peak {each.peak_bytes / 1e6:9.1f} MB"
        name = f"{each.provider} {each.precision}"
        interval = f"[{each.loop_low_us:.1f}, {each.loop_high_us:.1f}]"
        print(f"  {name:22} {each.loop_us:9.1f}  {interval:>20}{cold}{peak}", flush=True)


if __name__ == "__main__":
    main()

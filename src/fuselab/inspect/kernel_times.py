"""Times of each kernel and library call of compiled graphs, from a profile of whole steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fuselab.inspect.inductor_capture import CompiledGraph, Launch
from fuselab.inspect.kineto import Span, Window
from fuselab.inspect.profile import Recorder
from fuselab.inspect.profile_tables import device_us

# Inductor opens this range around every call of a compiled graph.
_GRAPH_CALL = "## Call CompiledFxGraph"

# A kernel or operator that ran inside a graph's call: its name and microseconds.
Run = tuple[str, float]


def times_of_launches(
    step: Callable[[], Any], graphs: Sequence[CompiledGraph], steps: int
) -> dict[tuple[int, int], float]:
    """Return microseconds by (position of the graph, order of the launch): the median of ``steps``.

    It is device time if the kernel ran on a GPU, else host time. A launch that cannot be identified
    (a replayed CUDA graph) is left out.
    """
    with Recorder((1, 1, steps, 1), "kernels") as recorder:
        for _ in range(steps + 2):
            step()
            recorder.step()
    samples: dict[tuple[int, int], list[float]] = defaultdict(list)
    for window in recorder.windows:
        for runs in _graph_calls(window):
            position, matched = _best_match(runs, graphs)
            for order, us in matched.items():
                samples[position, order].append(us)
    return {key: sorted(values)[len(values) // 2] for key, values in samples.items()}


def _graph_calls(window: Window) -> Iterator[list[Run]]:
    """Yield, for every call of a compiled graph, what ran in it, in order."""
    for span in window.spans:
        if span.name.startswith(_GRAPH_CALL) and span.kind in ("op", "range"):
            yield list(_runs(span))


def _runs(span: Span) -> Iterator[Run]:
    for child in span.children:
        if child.kind == "op":
            yield child.name, device_us(child) or child.duration_us
        else:  # Triton's kernels: launched by a runtime call, or inside the wrapper's own range
            yield from ((kernel.name, kernel.duration_us) for kernel in child.kernels)
            yield from _runs(child)


def _best_match(
    runs: Sequence[Run], graphs: Sequence[CompiledGraph]
) -> tuple[int, dict[int, float]]:
    """Return the position of the graph whose launches match these runs, and its launches' times."""
    matches = [_match(runs, graph.launches) for graph in graphs]
    position = max(range(len(graphs)), key=lambda i: _fit(matches[i], graphs[i]), default=0)
    return position, matches[position] if matches else {}


def _fit(matched: dict[int, float], graph: CompiledGraph) -> tuple[float, int]:
    return (len(matched) / max(len(graph.launches), 1), len(matched))


def _match(runs: Sequence[Run], launches: Sequence[Launch]) -> dict[int, float]:
    """Return the times of the launches found in order among the runs."""
    matched = {}
    start = 0
    for order, launch in enumerate(launches):
        for index in range(start, len(runs)):
            if _is_run_of(runs[index][0], launch):
                matched[order] = runs[index][1]
                start = index + 1
                break
    return matched


def _is_run_of(name: str, launch: Launch) -> bool:
    if launch.kind == "fused":
        return name == launch.name or name.endswith(f"_{launch.name}")
    operator = launch.name.removeprefix("aten.").split(".")[0]
    return name == f"aten::{operator}"

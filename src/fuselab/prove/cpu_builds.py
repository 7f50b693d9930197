"""Compiling the C++ kernels of the library's operators ahead of their first call, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch

from fuselab import ops
from fuselab.errors import FuselabError
from fuselab.op import Case, FusedOp
from fuselab.prove.cpu_points import Point, points_of, timed_operators
from fuselab.runtime import autograd_node, cache, cpu_choice, fallback, launcher

TRAINING, INFERENCE = "training", "inference"


@dataclass(frozen=True)
class Built:
    """What ``build_all`` has done: ``libraries`` compiled, of ``operators``, in ``seconds``;
    ``failed`` says of each kind of call that could not be built why."""

    libraries: int
    operators: tuple[str, ...]
    seconds: float
    failed: tuple[str, ...]


def build(op: FusedOp, points: Sequence[tuple[Case, torch.dtype]]) -> None:
    """Compile every C++ kernel that these calls can run."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda call: call(), _first_calls(op, points, Point.implementations)))


def build_all(progress: Callable[[str], None]) -> Built:
    """Compile the launcher, autograd's node and every C++ kernel of the library that ``auto`` can
    take on this machine; what is compiled already is kept.

    Args:
        progress: called with one line per kind of call.
    """
    begin, before = monotonic(), _libraries()
    with fallback.strict(), ThreadPoolExecutor(os.cpu_count()) as threads:
        futures: dict[Future[Any], str] = {
            threads.submit(extension.library): extension.source.name
            for extension in (autograd_node.EXTENSION, launcher.EXTENSION)
        }
        for name in timed_operators():
            op = ops.contract(name)
            for call in _first_calls(op, list(points_of(op)), _taken_by_auto):
                futures[threads.submit(call)] = name
        failed = []
        for count, future in enumerate(as_completed(futures), 1):
            progress(f"{count} of {len(futures)}, {futures[future]}")
            error = future.exception()
            if isinstance(error, FuselabError):
                failed.append(f"{futures[future]}: {error}")
            elif error is not None:
                raise error
    return Built(
        _libraries() - before,
        tuple(dict.fromkeys(name for name in futures.values() if not name.endswith(".cpp"))),
        monotonic() - begin,
        tuple(failed),
    )


def _libraries() -> int:
    return sum(1 for _ in cache.folder().rglob("*.so"))


def _taken_by_auto(point: Point) -> list[str]:
    taken = cpu_choice.can_take(point.op, point.use, point.dtype, point.regime)
    return [name for name in point.implementations() if name in taken]


def _first_calls(
    op: FusedOp,
    points: Sequence[tuple[Case, torch.dtype]],
    implementations: Callable[[Point], Sequence[str]],
) -> Iterator[Callable[[], None]]:
    """Yield one call per use, regime, dtype and implementation, of the smallest case."""
    smallest: dict[tuple[str, str, str], Point] = {}
    for case, dtype in points:
        for use in (TRAINING, INFERENCE) if op.gradient is not None else (INFERENCE,):
            point = Point(op, case, dtype, use)
            key = use, point.regime, point.dtype
            if key not in smallest or point.moved < smallest[key].moved:
                smallest[key] = point
    for point in smallest.values():
        for name in implementations(point):
            yield _FirstCall(point, name)


@dataclass(frozen=True)
class _FirstCall:
    point: Point
    implementation: str

    def __call__(self) -> None:
        with cpu_choice.forced(self.implementation):
            self.point.call(self.implementation)()

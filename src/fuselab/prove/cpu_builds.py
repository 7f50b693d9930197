"""Compiling the C++ kernels of the library's operators ahead of their first call, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from time import monotonic

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fuselab import ops
from fuselab.errors import FuselabError
from fuselab.op import Case, FusedOp
from fuselab.prove.cpu_points import CPU, Point, points_of, timed_operators
from fuselab.runtime import autograd_node, cache, cpu_choice, fallback, launch_plans


@dataclass(frozen=True)
class Built:
    """The result of ``build_all``: how many libraries were compiled in how many seconds, for which
    operators, and for each kind of call that could not be built the reason."""

    libraries: int
    operators: tuple[str, ...]
    seconds: float
    failed: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of call: what decides which kernels it runs, with the smallest case of it."""

    op: FusedOp
    use: str
    dtype: str
    regime: str
    case: Case
    case_dtype: torch.dtype

    def build(self, wanted: Callable[[Kind, str], bool] = lambda kind, name: True) -> None:
        """Compile its kernels, of the implementations that are ``wanted``, by calling it."""
        point = Point(self.op, self.case, self.case_dtype, self.use)
        for name in point.implementations():
            if wanted(self, name):
                with cpu_choice.forced(name):
                    point.call(name)()

    def is_taken(self, implementation: str) -> bool:
        """Return whether ``auto`` takes the implementation for such calls at some size."""
        return implementation in cpu_choice.can_take(self.op, self.use, self.dtype, self.regime)


def build(op: FusedOp, points: Sequence[tuple[Case, torch.dtype]]) -> None:
    """Compile every C++ kernel that these calls can run, side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(Kind.build, kinds(op, points)))


def build_all(progress: Callable[[str], None]) -> Built:
    """Compile the launcher, autograd's node and every C++ kernel of the library that ``auto`` can
    take on this machine; what is compiled already is kept.

    Args:
        progress: called with one line per build that is done.
    """
    begin, before = monotonic(), _libraries()
    jobs: list[tuple[str, Callable[[], object]]] = [
        (extension.source.name, extension.library)
        for extension in (launch_plans.EXTENSION, autograd_node.EXTENSION)
    ]
    operators = []
    for name in timed_operators():
        op = ops.contract(name)
        taken = [
            kind
            for kind in kinds(op, list(points_of(op)))
            if any(map(kind.is_taken, op.implementations))
        ]
        jobs += [(name, partial(kind.build, Kind.is_taken)) for kind in taken]
        operators += [name] if taken else []
    failed = []
    with fallback.strict(), ThreadPoolExecutor(os.cpu_count()) as threads:
        futures = {threads.submit(job): name for name, job in jobs}
        for count, future in enumerate(as_completed(futures), 1):
            progress(f"{count} of {len(futures)}, {futures[future]}")
            error = future.exception()
            if isinstance(error, FuselabError):
                failed.append(f"{futures[future]}: {error}")
            elif error is not None:
                raise error
    seconds = monotonic() - begin
    return Built(_libraries() - before, tuple(operators), seconds, tuple(failed))


def _libraries() -> int:
    return sum(1 for _ in cache.folder().rglob("*.so"))


def kinds(op: FusedOp, points: Sequence[tuple[Case, torch.dtype]]) -> list[Kind]:
    """Return the kinds of call among these cases, each once."""
    smallest: dict[tuple[str, str, str], tuple[int, Kind]] = {}
    for case, case_dtype in points:
        moved, dtype, regime = _facts(op, case, case_dtype)
        for use in ("training", "inference") if op.gradient is not None else ("inference",):
            key = use, dtype, regime
            if key not in smallest or moved < smallest[key][0]:
                smallest[key] = moved, Kind(op, *key, case, case_dtype)
    return [kind for _, kind in smallest.values()]


def _facts(op: FusedOp, case: Case, dtype: torch.dtype) -> tuple[int, str, str]:
    """Return bytes moved, dtype and regime of a case, without its memory where it can be made so
    (filling the largest ones takes longer than a compiler)."""

    def facts() -> tuple[int, str, str]:
        args = op.bind(case.make(CPU, dtype, torch.Generator().manual_seed(0)))
        return (
            op.cost(*args).bytes_moved,
            cpu_choice.dtype_of(args),
            cpu_choice.regime_of(op, args),
        )

    try:
        with FakeTensorMode():
            return facts()
    except Exception:  # its inputs are computed from values
        return facts()

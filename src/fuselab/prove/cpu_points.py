"""The calls of the library's operators that are timed on a CPU, and compiled ahead there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch

from fuselab import ops
from fuselab.measure.cpu_timer import time_calls_us, without_garbage_collection
from fuselab.op import Case, FusedOp
from fuselab.prove.arguments import at, differentiable, filled, with_own_copies
from fuselab.runtime import cpu_choice, dispatch

CPU = torch.device("cpu")
MOST_ROUNDS = 200
SAMPLE_US = 100.0
REFERENCE = "reference"


def timed_operators() -> list[str]:
    """Return the library's operators that have a kernel for the CPU."""
    return [name for name in ops.operators() if ops.contract(name).cpu_cases]


def points_of(op: FusedOp) -> Iterator[tuple[Case, torch.dtype]]:
    """Yield the calls that are timed: an operator that names none for a CPU is timed on all of its
    cases, in every dtype."""
    for case in op.cpu_cases or op.cases:
        has_all = "dtypes" in case.tags or not op.cpu_cases
        for dtype in op.dtypes if has_all else op.dtypes[:1]:
            yield case, dtype


def _calls_per_sample(call: Callable[[], object]) -> int | None:
    """Return how many calls make a sample of at least 100 us, warm; None where the call raises."""
    try:
        call()
        once_us = time_calls_us(call, 1)
    except Exception:  # torch.compile may refuse an expression in ways of its own
        return None
    if once_us > SAMPLE_US:
        return 1
    return max(1, round(SAMPLE_US / max(time_calls_us(call, 3), 0.1)))


class Point:
    """One case in one dtype and use, with its arguments made.

    An implementation is timed as ``auto`` runs it: its backward is what ``Gradient.prefer`` gives.
    """

    def __init__(self, op: FusedOp, case: Case, dtype: torch.dtype, use: str) -> None:
        self.op, self.use = op, use
        made = op.bind(case.make(CPU, dtype, torch.Generator().manual_seed(0)))
        self.places = differentiable(op, made) if use == "training" else []
        leaves = [tensor.detach().requires_grad_() for tensor in at(made, self.places)]
        self.args = tuple(filled(made, self.places, leaves))
        self.leaves = at(self.args, self.places)
        self.moved = op.cost(*self.args).bytes_moved
        self.dtype = cpu_choice.dtype_of(self.args)
        self.regime = cpu_choice.regime_of(op, self.args)
        self.upstream: list[torch.Tensor] | None = None
        if self.leaves:
            self.upstream = [
                torch.ones_like(output).uniform_(0.5, 1.5)
                for output in differentiable_in(op.reference(*self.args))
            ]

    def implementations(self) -> list[str]:
        """Return the implementations for the CPU that take these arguments."""
        return [
            name
            for name, known in self.op.implementations.items()
            if known.device == "cpu" and dispatch.why_not(self.op, name, self.args) is None
        ]

    def time(
        self, providers: Sequence[str], budget_s: float, fewest: int
    ) -> dict[str, list[float]]:
        """Time the providers in turns: ``reference``, ``compile``, ``auto``, an implementation.
        Returns microseconds per call, one figure a round; none for a provider that raises."""
        forced = next((name for name in providers if name in self.op.implementations), None)
        calls = {name: self.call(name) for name in providers}
        times: dict[str, list[float]] = {name: [] for name in providers}
        with cpu_choice.forced(forced), without_garbage_collection():
            counted = {name: _calls_per_sample(call) for name, call in calls.items()}
            counts = {name: count for name, count in counted.items() if count is not None}
            order, shuffle = list(counts), random.Random(0).shuffle
            deadline = perf_counter() + budget_s
            for done in range(MOST_ROUNDS):
                if done >= fewest and perf_counter() > deadline:
                    break
                shuffle(order)  # whoever follows the same one every time inherits its caches
                for name in order:
                    times[name].append(time_calls_us(calls[name], counts[name]))
        return times

    def call(self, provider: str) -> Callable[[], object]:
        """Return the call to time."""
        function: Callable[..., Any]
        if provider == "compile":
            # One compilation serves all sizes; static shapes would take minutes for each operator.
            function = torch.compile(self.op.reference, dynamic=True)
        elif provider == REFERENCE and not self.op.mutates:
            function = self.op.reference
        else:
            public = dispatch.operator(self.op)
            name = REFERENCE if provider == REFERENCE else "auto"

            def function(*args: Any) -> Any:
                return public(*args, implementation=name)

        args, leaves, upstream = self.args, self.leaves, self.upstream
        if self.op.mutates:
            args = tuple(with_own_copies(self.op, args))
        if upstream is None:
            return lambda: function(*args)
        return lambda: torch.autograd.grad(
            differentiable_in(function(*args)), leaves, upstream, allow_unused=True
        )


def differentiable_in(outputs: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of an operator's outputs that have a gradient."""
    listed = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    return [output for output in listed if output.requires_grad]

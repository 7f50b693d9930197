"""One phase of one case as callables, and whether their results are right.

A phase is ``forward``, ``backward`` (alone, through a graph that is kept) or ``forward+backward``.
Results are held against the reference before the timing and after it. Free memory is poisoned
first, so that an output left unwritten shows, and the second time the inputs have new values in the
same memory, so that a result kept from an earlier call shows. The bar is four times as wide as
``check``'s: a benchmark sorts out wrong results, ``check`` judges accuracy, and a peer may round
more often.

What writes over arguments is timed on copies of its own, whose values drift from call to call, and
verified on fresh ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuselab.measure.memory import poison
from fuselab.measure.timer import Call
from fuselab.op import Case, FusedOp, tensors_in
from fuselab.prove.accuracy import ULPS, as_rows, error_of_rows, judge, ulp_of_rows, upcast
from fuselab.prove.arguments import (
    at,
    differentiable,
    filled,
    mapped,
    overlaps_itself,
    with_own_copies,
)

PHASES = ("forward", "backward", "forward+backward")
SLACK = 4.0
SEED = 0


@dataclass(frozen=True)
class Calls:
    """One provider's call as it is ``timed``, and ``checked``, which returns its results."""

    timed: Call
    checked: Call


class Work:
    """Arguments of one case on one device, ready for one phase."""

    def __init__(
        self, op: FusedOp, case: Case, device: torch.device, dtype: torch.dtype, phase: str
    ) -> None:
        self.op, self.case, self.device, self.dtype, self.phase = op, case, device, dtype, phase
        made = self._made(SEED)
        self.places = [] if phase == "forward" else differentiable(op, made)
        leaves = [tensor.detach().requires_grad_() for tensor in at(made, self.places)]
        self.args = tuple(filled(made, self.places, leaves))
        self.inputs = at(self.args, self.places)
        self.upstream = None if phase == "forward" else self._make_upstream()
        self._expect()

    def _made(self, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(seed)
        return self.op.bind(self.case.make(self.device, self.dtype, generator))

    def _make_upstream(self) -> Tensor:
        with torch.no_grad():
            output = self.op.reference(*self.args)
        generator = torch.Generator().manual_seed(SEED)
        return torch.randn(output.shape, generator=generator).to(output.device, output.dtype)

    def calls(
        self, function: Callable[..., Any], args: Sequence[Any], writes: bool = False
    ) -> Calls:
        """``function(*args)`` as this phase runs it; ``args`` hold the tensors of ``self.args``, of
        which the function ``writes`` over some or does not.

        The checked call returns the output (or outputs) and, where there is a backward, the
        gradients after it.
        """
        if writes:
            own = with_own_copies(self.op, args)

            def checked() -> tuple[Tensor, ...]:
                fresh = with_own_copies(self.op, args)
                function(*fresh)
                return self.op.mutated(fresh)

            return Calls(lambda: function(*own), checked)
        if self.phase == "forward":
            return _alike(lambda: function(*args))
        if self.phase == "backward":
            output = function(*args)
            return _alike(lambda: self._with_gradients(output, self.inputs, retain_graph=True))
        return _alike(lambda: self._with_gradients(function(*args), self.inputs))

    def _with_gradients(
        self, output: Tensor, inputs: Sequence[Tensor], retain_graph: bool = False
    ) -> tuple[Tensor | None, ...]:
        assert self.upstream is not None
        upstream = self.upstream.to(output.dtype)
        gradients = torch.autograd.grad(
            output, inputs, upstream, retain_graph=retain_graph, allow_unused=True
        )
        return output.detach(), *gradients

    def _reference_results(self, args: Sequence[Any]) -> list[Tensor | None]:
        output = self.op.reference(*args)
        if self.phase == "forward":
            return list(tensors_in((output,)))
        return list(self._with_gradients(output, at(args, self.places)))

    def _expect(self) -> None:
        self._eager = self._reference_results(self.args)
        self._exact = self._reference_results(mapped(upcast, self.args))

    def renew(self) -> None:
        """New values in the same memory, and what the reference makes of them. Left out for
        ``backward``, whose graph holds the old values, and for tensors that overlap themselves."""
        if self.phase == "backward":
            return
        made = tensors_in(self._made(SEED + 1))
        for value, fresh in zip(tensors_in(self.args), made, strict=True):
            if not overlaps_itself(value):
                value.detach().copy_(fresh)
        self._expect()

    def problem(self, call: Call) -> str | None:
        """What is wrong with the results of a checked ``call``, in a few words; None if they are
        right."""
        poison([value for value in self._eager if value is not None])
        returned: Any = call()
        results = [returned] if isinstance(returned, Tensor) else list(returned)
        for place, (ours, eager, exact) in enumerate(
            zip(results, self._eager, self._exact, strict=True)
        ):
            problem = _problem(ours, eager, exact)
            if problem is not None:
                return f"{self._name(place)} {problem}"
        return None

    def _name(self, place: int) -> str:
        if self.phase == "forward":
            return "output" if len(self._eager) == 1 else f"output {place}"
        return f"gradient {place - 1}" if place else "output"


def _alike(call: Call) -> Calls:
    return Calls(call, call)


def _problem(ours: Tensor | None, eager: Tensor | None, exact: Tensor | None) -> str | None:
    if eager is None or exact is None or ours is None:  # an input without a gradient
        missing = ours is None and eager is not None
        return "is missing" if missing else None
    if not eager.is_floating_point() or not eager.numel():
        return judge(ours, eager, exact).problem
    rows = as_rows(exact.detach())
    error = error_of_rows(as_rows(eager.detach()), rows)
    allowance = SLACK * error + ULPS * ulp_of_rows(rows, eager.dtype)
    return judge(ours, eager, exact, allowance).problem

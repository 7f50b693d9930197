"""One phase of one case as callables, and whether their results are right.

A phase is ``forward``, ``backward`` (alone, through a graph that is kept) or ``forward+backward``.
Results are compared with the reference before the timing and after it. Free memory is poisoned
first, so that an unwritten output shows. Before the second comparison the inputs get new values in
the same memory, so that a result kept from an earlier call shows. The bar is that of ``check``,
four times as wide: a benchmark only has to find wrong results, ``check`` judges accuracy, and a
peer may round more often.

A provider that overwrites arguments is timed on its own copies, whose values change from call to
call, and verified on fresh ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuselab.measure.memory import poison
from fuselab.measure.timer import Call
from fuselab.op import Case, FusedOp, tensors_in
from fuselab.prove.accuracy import Bar
from fuselab.prove.arguments import at, differentiable, filled, with_own_copies
from fuselab.prove.outputs import floating, outputs_in, pulled_back
from fuselab.runtime.dispatch.overlap import overlaps_itself

PHASES = ("forward", "backward", "forward+backward")
SLACK = 4.0
SEED = 0


@dataclass(frozen=True)
class Calls:
    """One provider's calls: ``timed`` is the one to time, ``checked`` also returns its results."""

    timed: Call
    checked: Call


class CaseArguments:
    """The arguments of a case, by seed.

    On a GPU they are kept, and each call returns copies with the same layout, because drawing a
    large case takes the host seconds and every phase needs it twice.
    """

    def __init__(self, op: FusedOp, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self.op, self.case, self.device, self.dtype = op, case, device, dtype
        self.keeps = device.type == "cuda"
        self.kept: dict[int, tuple[Any, ...]] = {}

    def __call__(self, seed: int) -> tuple[Any, ...]:
        if seed in self.kept:
            return copy.deepcopy(self.kept[seed])
        generator = torch.Generator().manual_seed(seed)
        made = self.op.bind(self.case.make(self.device, self.dtype, generator))
        if self.keeps:
            self.kept[seed] = copy.deepcopy(made)
        return made


class Work:
    """Arguments of one case on one device, ready for one phase."""

    def __init__(
        self,
        op: FusedOp,
        case: Case,
        device: torch.device,
        dtype: torch.dtype,
        phase: str,
        made: CaseArguments | None = None,
    ) -> None:
        self.op, self.case, self.device, self.dtype, self.phase = op, case, device, dtype, phase
        self._made = made or CaseArguments(op, case, device, dtype)
        drawn = self._made(SEED)
        self.places = [] if phase == "forward" else differentiable(op, drawn)
        leaves = [tensor.detach().requires_grad_() for tensor in at(drawn, self.places)]
        self.args = tuple(filled(drawn, self.places, leaves))
        self.inputs = at(self.args, self.places)
        # One upstream gradient per floating output.
        self.upstream = None if phase == "forward" else self._make_upstream()
        self._expect()

    def _make_upstream(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            outputs = floating(outputs_in(self.op.reference(*self.args)))
        generator = torch.Generator().manual_seed(SEED)
        return tuple(
            torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
            for output in outputs
        )

    def calls(
        self, function: Callable[..., Any], args: Sequence[Any], writes: bool = False
    ) -> Calls:
        """Return the calls of ``function(*args)`` for this phase.

        ``args`` contains the tensors of ``self.args``; ``writes`` says whether the function
        overwrites some of them. The checked call returns the output (or outputs) and, where there
        is a backward, the gradients after it.
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
            outputs = outputs_in(function(*args))
            return _alike(lambda: self._with_gradients(outputs, self.inputs, retain_graph=True))
        return _alike(lambda: self._with_gradients(outputs_in(function(*args)), self.inputs))

    def _with_gradients(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        upstream: Sequence[Tensor] | None = None,
        retain_graph: bool = False,
    ) -> tuple[Tensor | None, ...]:
        upstream = self.upstream if upstream is None else upstream
        assert upstream is not None
        pairs = zip(upstream, floating(outputs), strict=True)
        cast = [gradient.to(output.dtype) for gradient, output in pairs]
        gradients = pulled_back(outputs, inputs, cast, retain_graph=retain_graph)
        return *(output.detach() for output in outputs), *gradients

    def _reference_results(self, values: Sequence[Any]) -> list[Tensor | None]:
        """Return the reference's results: its outputs, and the gradients where there is a backward.

        ``values`` are the arguments and, where there is a backward, the tuple of upstream gradients
        after them.
        """
        if self.upstream is None:
            return list(outputs_in(self.op.reference(*values)))
        *args, upstream = values
        outputs = outputs_in(self.op.reference(*args))
        return list(self._with_gradients(outputs, at(args, self.places), upstream))

    def _expect(self) -> None:
        behind = [] if self.upstream is None else [self.upstream]
        self.bar = Bar(self._reference_results, [*self.args, *behind], [], SLACK)

    def renew(self) -> None:
        """Write new values into the same memory, and compute the reference's results for them.

        Does nothing for ``backward``, whose graph holds the old values, and leaves out tensors that
        overlap themselves.
        """
        if self.phase == "backward":
            return
        made = tensors_in(self._made(SEED + 1))
        for value, fresh in zip(tensors_in(self.args), made, strict=True):
            if not overlaps_itself(value):
                value.detach().copy_(fresh)
        self._expect()

    def problem(self, call: Call) -> str | None:
        """Return what is wrong with the results of a checked ``call``, in a few words; None if they
        are right."""
        poison([value for value in self.bar.eager if value is not None])
        returned: Any = call()
        results = [returned] if isinstance(returned, Tensor) else list(returned)
        for place, judgement in enumerate(self.bar.judge(results)):
            if judgement.problem is not None:
                return f"{self._name(place)} {judgement.problem}"
        return None

    def _name(self, place: int) -> str:
        count = len(self.bar.eager) - len(self.places)
        if place < count:
            return "output" if count == 1 else f"output {place}"
        return f"gradient {place - count}"


def _alike(call: Call) -> Calls:
    return Calls(call, call)

"""One phase of one case as callables, and whether their results are right.

A phase is ``forward``, ``backward`` (alone, through a graph that is kept) or ``forward+backward``.
Results are held against the reference before the timing and after it. Free memory is poisoned
first, so that an output left unwritten shows, and the second time the inputs have new values in the
same memory, so that a result kept from an earlier call shows. The bar is four times as wide as
``check``'s: a benchmark sorts out wrong results, ``check`` judges accuracy, and a peer may round
more often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.measure.memory import poison
from fuselab.measure.timer import Call
from fuselab.op import Case, FusedOp
from fuselab.prove.accuracy import ULPS, as_rows, error_of_rows, judge, ulp_of_rows, upcast

PHASES = ("forward", "backward", "forward+backward")
SLACK = 4.0
SEED = 0


class Work:
    """Arguments of one case on one device, ready for one phase."""

    def __init__(
        self, op: FusedOp, case: Case, device: torch.device, dtype: torch.dtype, phase: str
    ) -> None:
        self.op, self.case, self.device, self.dtype, self.phase = op, case, device, dtype, phase
        self.args = tuple(self._argument(value) for value in self._made(SEED))
        self.inputs = [
            value for value in self.args if isinstance(value, Tensor) and value.requires_grad
        ]
        self.upstream = None if phase == "forward" else self._make_upstream()
        self._expect()

    def _made(self, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(seed)
        return self.op.bind(self.case.make(self.device, self.dtype, generator))

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        differentiable = self.phase != "forward" and value.is_floating_point()
        return value.detach().requires_grad_(differentiable)

    def _make_upstream(self) -> Tensor:
        with torch.no_grad():
            output = self.op.reference(*self.args)
        generator = torch.Generator().manual_seed(SEED)
        return torch.randn(output.shape, generator=generator).to(output.device, output.dtype)

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> Call:
        """``function(*args)`` as this phase runs it; ``args`` hold the tensors of ``self.args``.

        The call returns the output and, where there is a backward, the gradients after it.
        """
        if self.phase == "forward":
            return lambda: function(*args)
        if self.phase == "backward":
            output = function(*args)
            return lambda: self._with_gradients(output, self.inputs, retain_graph=True)
        return lambda: self._with_gradients(function(*args), self.inputs)

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
            return [output]
        inputs = [value for value in args if isinstance(value, Tensor) and value.requires_grad]
        return list(self._with_gradients(output, inputs))

    def _expect(self) -> None:
        self._eager = self._reference_results(self.args)
        self._exact = self._reference_results([upcast(value) for value in self.args])

    def renew(self) -> None:
        """New values in the same memory, and what the reference makes of them. Left out for
        ``backward``, whose graph holds the old values, and for tensors that overlap themselves."""
        if self.phase == "backward":
            return
        for value, fresh in zip(self.args, self._made(SEED + 1), strict=True):
            if isinstance(value, Tensor) and not _overlaps(value):
                value.detach().copy_(fresh)
        self._expect()

    def problem(self, call: Call) -> str | None:
        """What is wrong with the results of ``call``, in a few words; None if they are right."""
        poison([value for value in self._eager if value is not None])
        returned: Any = call()
        results = [returned] if self.phase == "forward" else list(returned)
        for place, (ours, eager, exact) in enumerate(
            zip(results, self._eager, self._exact, strict=True)
        ):
            problem = _problem(ours, eager, exact)
            if problem is not None:
                return f"{f'gradient {place - 1}' if place else 'output'} {problem}"
        return None


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


def _overlaps(tensor: Tensor) -> bool:
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )

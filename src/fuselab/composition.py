"""A function that fused operators and PyTorch calls make up: what ``fuselab eject`` writes for a
function that is no single operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuselab.op import Case, Draw, FusedOp, Gradient, Inputs


@dataclass(frozen=True)
class Composition:
    """A function in which fused operators stand in the place of chains of PyTorch calls.

    ``function`` computes what ``reference``, plain PyTorch, defines; both take tensors in the same
    order, and autograd differentiates both. ``operators`` are those that ``function`` calls.
    ``cases`` and ``draw`` give inputs as they do in a ``FusedOp``; the arguments named in
    ``frozen`` get no gradient.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    operators: Sequence[FusedOp]
    cases: Sequence[Case]
    draw: Callable[[Draw], Inputs] | None = None
    frozen: Sequence[str] = ()
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

    def as_operator(self) -> FusedOp:
        """Return an operator without kernels, of which ``function`` is another spelling, so that
        ``bench`` times it beside eager and torch.compile."""

        def save(output: Any, *args: Any) -> tuple[Any, ...]:
            return args  # the least work of a backward reads them

        def no_kernel(*args: Any) -> Any:
            raise NotImplementedError("a composition has no kernel of its own")

        return FusedOp(
            name=self.name,
            reference=self.reference,
            implementations={},
            cases=self.cases,
            gradient=Gradient(save, no_kernel),
            peers={"fused": self.function},
            dtypes=self.dtypes,
        )

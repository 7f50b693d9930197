"""A function that fused operators and PyTorch calls make up: what ``fuselab eject`` writes for a
function that is no single operator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuselab.op import Case, Draw, FusedOp, Gradient, Inputs


@dataclass(frozen=True)
class Composition:
    """A function in which fused operators stand in the place of chains of PyTorch calls.

    ``function`` computes what ``reference``, plain PyTorch, defines; both take tensors in the same
    order, and autograd differentiates both. ``operators`` are those that ``function`` calls.
    ``cases`` and ``draw`` give inputs as they do in a ``FusedOp``; the arguments named in
    ``frozen`` get no gradient. ``outputs`` counts the tensors in what ``function`` returns.
    ``drawing`` is that of a ``FusedOp``. ``steps`` is the function by its operators alone, where
    ``function`` can be one kernel.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    operators: Sequence[FusedOp]
    cases: Sequence[Case]
    draw: Callable[[Draw], Inputs] | None = None
    frozen: Sequence[str] = ()
    outputs: int = 1
    drawing: Callable[..., Any] | None = None
    steps: Callable[..., Any] | None = None
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
            reference=self._flat(self.reference),
            implementations={},
            cases=self.cases,
            gradient=Gradient(save, no_kernel),
            draw=self.draw,
            peers={
                "fused": self._flat(self.function),
                **({} if self.steps is None else {"operators": self._flat(self.steps)}),
            },
            dtypes=self.dtypes,
            drawing=None if self.drawing is None else self._flat(self.drawing),
        )

    def _flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function such that it returns a tensor, or a flat tuple of tensors."""

        @functools.wraps(function)
        def flat(*args: Any) -> Any:
            found = [one for one in pytree.tree_leaves(function(*args)) if isinstance(one, Tensor)]
            return found[0] if self.outputs == 1 else tuple(found)

        returned: Any = Tensor if self.outputs == 1 else tuple[(Tensor,) * self.outputs]  # type: ignore[misc]
        signature = inspect.signature(function, eval_str=True)
        flat.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return flat

"""The choice between the two forms of an ejected function: one kernel of the whole, or operators.

Which is faster depends on the sizes and on the GPU, so both are timed at the first call of its
kind, and the process keeps to the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fuselab.runtime.grid import power_of_two

_ROUNDS = 5
_ROUND_S = 0.004  # of a form in a round, within these numbers of calls
_FEWEST_CALLS, _MOST_CALLS = 2, 20
_MOST_KEPT = 4096  # kinds of calls whose answer is kept


class Forms:
    """A function that calls the one kernel where it may and where that is faster, else operators.

    The one kernel may compute a call on a GPU that wants no gradient, outside of autocast,
    torch.compile, ``torch.use_deterministic_algorithms`` and transforms, with arguments that
    ``supports`` refuses by no reason. The first such call with its dtypes and, up to the next power
    of two, its sizes times both forms, up to a hundred calls of each; not while a CUDA graph is
    captured, in which operators are taken until the answer is known.
    """

    def __init__(
        self,
        whole: Callable[..., Any],
        operators: Callable[..., Any],
        supports: Callable[..., str | None],
    ) -> None:
        self._whole = whole
        self._operators = operators
        self._supports = supports
        self._takes_whole: dict[tuple[Any, ...], bool] = {}  # by all that supports depends on
        self._is_faster: dict[tuple[Any, ...], bool] = {}

    def __call__(self, *tensors: Tensor) -> Any:
        if may_be_whole(*tensors) and self._is_chosen(tensors):
            return self._whole(*tensors)
        return self._operators(*tensors)

    def _is_chosen(self, tensors: tuple[Tensor, ...]) -> bool:
        key = tuple((one.dtype, one.shape, one.stride(), one.device) for one in tensors)
        known = self._takes_whole.get(key)
        if known is None:
            alike = tuple((one.dtype, one.device, *map(power_of_two, one.shape)) for one in tensors)
            if self._supports(*tensors) is not None:
                known = False
            elif alike in self._is_faster:
                known = self._is_faster[alike]
            elif torch.cuda.is_current_stream_capturing():
                return False
            else:
                known = self._is_faster[alike] = self._times_faster(tensors)
            if len(self._takes_whole) >= _MOST_KEPT:
                self._takes_whole.clear()
            self._takes_whole[key] = known
        return known

    def _times_faster(self, tensors: tuple[Tensor, ...]) -> bool:
        """Return whether the one kernel takes no more time, or is all that fits into memory."""
        forms = (self._whole, self._operators)
        least = [float("inf"), float("inf")]
        calls = 1
        for number in range(_ROUNDS + 2):
            for place, form in enumerate(forms):
                try:
                    seconds = _seconds(form, tensors, calls)
                except torch.OutOfMemoryError:
                    return form is self._operators
                if number > 0:  # the first call compiles, or reads what was compiled
                    least[place] = min(least[place], seconds)
            if number == 1:
                calls = min(max(int(_ROUND_S / min(least)), _FEWEST_CALLS), _MOST_CALLS)
                least = [float("inf"), float("inf")]
        return least[0] <= least[1]


def may_be_whole(*tensors: Tensor) -> bool:
    """Return whether a call may be computed by one kernel, which has no gradient, casts nothing and
    sums in an order of its own."""
    if tensors[0].device.type != "cuda" or torch.compiler.is_compiling():
        return False
    if torch.is_autocast_enabled("cuda") or torch.are_deterministic_algorithms_enabled():
        return False
    if any(type(one) not in (Tensor, Parameter) for one in tensors):
        return False
    if torch._C._functorch.peek_interpreter_stack() or torch._C._len_torch_dispatch_stack():
        return False
    return not (torch.is_grad_enabled() and any(one.requires_grad for one in tensors))


def _seconds(function: Callable[..., Any], tensors: tuple[Tensor, ...], calls: int) -> float:
    """Return the seconds of one of ``calls`` calls."""
    torch.cuda.synchronize(tensors[0].device)
    begin = time.perf_counter()
    for _ in range(calls):
        function(*tensors)
    torch.cuda.synchronize(tensors[0].device)
    return (time.perf_counter() - begin) / calls

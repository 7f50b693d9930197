"""Procedures for either process: calls of the function under question, with and without
gradients.

``places`` are those of the tensors that need a gradient (``fuselab.prove.arguments``). ``values``
are the arguments of a call, followed by the tuple of upstream gradients.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuselab.op import tensors_in
from fuselab.prove.arguments import at, filled
from fuselab.prove.definitions import Composed
from fuselab.prove.held import Held, results
from fuselab.prove.outputs import floating, outputs_in, pulled_back, sum_over
from fuselab.prove.rounding import Rounded
from fuselab.runtime.launch_recording import ALLOCATIONS

Function = Callable[..., Any]
Results = list[Tensor | None]


def by_definitions(held: Function, procedure: Function, *args: Any) -> Any:
    """Run a procedure with normalisations computed by their definitions in simpler operators."""
    with Composed():
        return procedure(held, *args)


def by_rounding(
    held: Function,
    seed: int,
    unit: float,
    alike: bool,
    lost: float,
    procedure: Function,
    *args: Any,
) -> tuple[Any, bool]:
    """Run a procedure with every intermediate result moved by a rounding of ``unit``, equal
    elements ``alike`` or not, and numbers up to ``lost`` compared as 0; return with its result
    whether anything in it can jump."""
    with Rounded(seed, unit, alike, lost) as moved:
        found = procedure(held, *args)
    return found, moved.jumps


def each(held: Function, procedure: Function, several: Sequence[Sequence[Any]]) -> list[Any]:
    """Return what a procedure gives for each list of arguments."""
    return [procedure(held, *args) for args in several]


def as_leaves(args: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Return the arguments with fresh leaves (same memory, same strides) at ``places``."""
    leaves = [tensor.detach().requires_grad_() for tensor in at(args, places)]
    return filled(args, places, leaves)


def with_gradients(function: Function, places: Sequence[int], values: Sequence[Any]) -> Results:
    """Return the outputs and the gradients of the tensors at ``places``."""
    *args, upstream = values
    leaves = as_leaves(args, places)
    outputs = outputs_in(function(*leaves))
    grads = pulled_back(outputs, at(leaves, places), upstream)
    return [*(output.detach() for output in outputs), *grads]


def in_rows(function: Function, width: int, places: Sequence[int] | None, values: Any) -> Results:
    """Return the outputs, with the gradients of the tensors at ``places`` where there are some,
    joined to rows of ``width`` elements."""
    if places is None:
        return joined(results(function, *values), width)
    return joined(with_gradients(function, places, values), width)


def joined(found: Sequence[Tensor | None], width: int) -> Results:
    """Return large results as matrices with rows of ``width`` elements, the rest of the last row
    zeros."""
    return [
        one
        if one is None or one.numel() <= width
        else one.detach().reshape(-1, width)
        if one.numel() % width == 0
        else F.pad(one.detach().flatten(), (0, -one.numel() % width)).view(-1, width)
        for one in found
    ]


def second_derivatives(
    function: Function, places: Sequence[int], values: Sequence[Any]
) -> list[Tensor | None]:
    """Return the derivatives of the gradients by every input and by the upstream gradients.

    One weight per gradient stands behind the upstream gradients in ``values``.
    """
    weights = values[len(values) - len(places) :]
    *args, upstream = values[: len(values) - len(places)]
    leaves = as_leaves(args, places)
    inputs = at(leaves, places)
    upstream = [gradient.detach().requires_grad_() for gradient in upstream]
    grads = pulled_back(outputs_in(function(*leaves)), inputs, upstream, create_graph=True)
    weighted = [
        (grad * weight).sum()
        for grad, weight in zip(grads, weights, strict=True)
        if grad is not None and grad.requires_grad
    ]
    if not weighted:
        return [None] * (len(places) + len(upstream))
    return list(torch.autograd.grad(sum(weighted), [*inputs, *upstream], allow_unused=True))


def penalty_gradients(
    function: Function, places: Sequence[int], args: Sequence[Any]
) -> list[Tensor | None]:
    """Return the gradients of a loss that contains the squared norm of a gradient."""
    leaves = as_leaves(args, places)
    inputs = at(leaves, places)
    outputs = outputs_in(function(*leaves))
    squares = sum_over(outputs, lambda output: (output * output).sum())
    grads = torch.autograd.grad(squares, inputs, create_graph=True, allow_unused=True)
    loss = sum_over(outputs, torch.sum)
    loss = loss + sum((grad * grad).sum() for grad in grads if grad is not None)
    return list(torch.autograd.grad(loss, inputs, allow_unused=True))


def summed_gradients(
    function: Function, places: Sequence[int], args: Sequence[Any], numbers: Sequence[Tensor]
) -> Results:
    """Return the outputs, and the gradients of the sum of each output's sum times its number, as
    ``backward`` leaves them."""
    leaves = as_leaves(args, places)
    outputs = outputs_in(function(*leaves))
    weights = iter(numbers)
    sum_over(outputs, lambda output: output.sum() * next(weights)[0]).backward(
        inputs=at(leaves, places)
    )
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in at(leaves, places))]


def gradient_presence(
    function: Function, places: Sequence[int], args: Sequence[Any]
) -> dict[str, list[bool]]:
    """Return which outputs need a gradient, and which inputs then get one."""
    leaves = as_leaves(args, places)
    outputs = outputs_in(function(*leaves))
    ones = list(map(torch.ones_like, floating(outputs)))
    grads: Sequence[Tensor | None] = [None] * len(places)
    if any(output.requires_grad for output in outputs):
        grads = pulled_back(outputs, at(leaves, places), ones)
    return {
        "outputs": [output.requires_grad for output in outputs],
        "inputs": [grad is not None for grad in grads],
    }


def needs_gradient(function: Function, args: Sequence[Any]) -> bool:
    """Return whether any output of a call needs a gradient."""
    return any(output.requires_grad for output in outputs_in(function(*args)))


def under_autocast(
    function: Function, device: str, dtype: torch.dtype, enabled: bool, args: Sequence[Any]
) -> list[Tensor]:
    """Return the outputs of a call under ``torch.autocast``."""
    with torch.autocast(device, dtype, enabled=enabled):
        return results(function, *args)


def gradients_under_autocast(
    function: Function,
    device: str,
    dtype: torch.dtype,
    narrowed: bool,
    places: Sequence[int],
    values: Sequence[Any],
) -> Results:
    """Return the outputs and gradients of a call whose backward also runs within
    ``torch.autocast``; with ``narrowed`` those in float32, which autocast makes of narrower ones,
    in ``dtype``."""
    with torch.autocast(device, dtype):
        found = with_gradients(function, places, values)
    return [
        one.to(dtype) if narrowed and one is not None and one.dtype == torch.float32 else one
        for one in found
    ]


def under_determinism(
    function: Function, times: int, procedure: Function, *args: Any
) -> list[list[Tensor | None]]:
    """Return what each of several runs of a procedure gives under
    ``torch.use_deterministic_algorithms(True)``."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return [list(procedure(function, *args)) for _ in range(times)]
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


class PoisonedAllocations(TorchDispatchMode):
    """Fills the result of ``torch.empty`` and its variants, so that an unwritten element shows."""

    def __init__(self, poison: float) -> None:
        super().__init__()
        self.poison = poison

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            result.fill_(poison_of(result.dtype, self.poison))
        return result


def poison_of(dtype: torch.dtype, poison: float) -> float:
    """Return ``poison`` for a floating dtype, and a small integer otherwise, since a kernel may
    index with it."""
    return poison if dtype.is_floating_point else 1 if math.isnan(poison) else int(poison)


def in_poisoned_memory(held: Held, poison: float, args: Sequence[Any]) -> list[Tensor]:
    """Return the outputs of the implementation alone, whose allocations hold ``poison`` before."""
    with PoisonedAllocations(poison):
        return list(tensors_in((held.op.without_residuals(held.alone(*args)),)))


Block = tuple[Sequence[int], torch.dtype]  # the shape and dtype of a result


def in_used_memory(
    held: Function,
    poison: float,
    blocks: Sequence[Block],
    device: torch.device,
    procedure: Function,
    *args: Any,
) -> Results:
    """Run a procedure after freeing blocks of the results' sizes that hold ``poison``; the
    allocator reuses them next."""
    for shape, dtype in blocks:
        value = poison_of(dtype, poison)
        freed = [torch.full(tuple(shape), value, dtype=dtype, device=device) for _ in range(4)]
        del freed
    found: Results = procedure(held, *args)
    return found


def in_memory_that_torch_fills(held: Function, procedure: Function, *args: Any) -> Results:
    """Run a procedure while torch fills every empty tensor, by its deterministic mode."""
    with _filled_by_torch():
        found: Results = procedure(held, *args)
    return found


@contextlib.contextmanager
def _filled_by_torch() -> Iterator[None]:
    """Make torch fill every empty tensor, also those of C++ callers."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # this is a module whose attribute is a setting
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


def repeated(function: Function, times: int, args: Sequence[Any]) -> list[list[Tensor]]:
    """Return the outputs of several calls on the same arguments."""
    return [results(function, *args) for _ in range(times)]


def with_fresh_values(
    function: Function,
    steps: Sequence[Sequence[Tensor | None]],
    places: Sequence[int],
    values: Sequence[Any],
) -> list[Results]:
    """Return what a call gives, with its gradients where there are ``places``, then what it gives
    after each of ``steps``.

    A step writes new values into the memory of the tensors among the arguments, one by one (None
    leaves a tensor alone). They are written through ``.data``, which does not change the version
    counter.
    """
    args = list(values[:-1])
    found: list[Results] = []

    def outputs() -> Results:
        return [*results(function, *args)]

    def gradients() -> Results:
        return with_gradients(function, places, values) if places else []

    for number, step in enumerate((None, *steps)):
        for tensor, fresh in zip(tensors_in(args), step or (), strict=step is not None):
            if fresh is not None:
                tensor.data.copy_(fresh)
        # The order changes, so that two calls of either kind follow each other at once.
        if number % 2:
            behind = gradients()
            given = [*outputs(), *behind]
        else:
            given = [*outputs(), *gradients()]
        # The results must not change when the next step is written.
        found.append([None if one is None else one.detach().clone() for one in given])
    return found

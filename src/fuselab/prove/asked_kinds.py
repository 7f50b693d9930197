"""Procedures for a candidate's process: calls on equal numbers in tensors of another kind.

PyTorch tells a parameter, a view, the result of an operator, a tensor that was written to, and one
in the memory of another library from a fresh tensor. A kernel has no reason to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import tensors_in
from fuselab.prove.arguments import at, filled
from fuselab.prove.asked_calls import Function, Results
from fuselab.prove.outputs import outputs_in, pulled_back

_BEHIND = 67  # elements behind a view in its base


def in_kind(
    function: Function, kind: str, places: Sequence[int] | None, values: Sequence[Any]
) -> Results:
    """Return the results of a call on tensors of a kind, one of ``KINDS``, with the gradients of
    those at ``places`` unless that is None; upstream gradients are of that kind too."""
    of_kind = KINDS[kind]
    if places is None:
        with torch.no_grad():
            tensors = [of_kind(tensor) for tensor in tensors_in(values)]
            given = filled(values, range(len(tensors)), tensors)
            return [output.detach() for output in outputs_in(function(*given))]
    *args, upstream = values
    leaves = [tensor.detach() for tensor in tensors_in(args)]
    for place in places:
        leaves[place].requires_grad_()
    given = filled(args, range(len(leaves)), [of_kind(leaf) for leaf in leaves])
    inputs = [
        leaves[place] if one.grad_fn is not None else one
        for place, one in zip(places, at(given, places), strict=True)
    ]
    outputs = outputs_in(function(*given))
    grads = pulled_back(outputs, inputs, [of_kind(one.requires_grad_()) for one in upstream])
    return [*(output.detach() for output in outputs), *(_plain(grad) for grad in grads)]


def with_gradients_of_another_thread(
    function: Function, places: Sequence[int], values: Sequence[Any]
) -> Results:
    """Return the outputs of a call in this thread, and the gradients of a backward in another."""
    *args, upstream = values
    leaves = [tensor.detach().requires_grad_() for tensor in at(args, places)]
    outputs = outputs_in(function(*filled(args, places, leaves)))
    found: list[Tensor | None] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            found.extend(pulled_back(outputs, leaves, upstream))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return [*(output.detach() for output in outputs), *found]


def _plain(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach()


def _alike(tensor: Tensor, found: Tensor) -> Tensor:
    """Let a leaf need a gradient where ``tensor`` does."""
    return found.requires_grad_() if tensor.requires_grad else found


def _parameter(tensor: Tensor) -> Tensor:
    return torch.nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)


def _result_of_an_operator(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _view(tensor: Tensor) -> Tensor:
    """Return the first elements of a longer tensor."""
    return _alike(tensor, _within(tensor, 0))


def _within(tensor: Tensor, start: int) -> Tensor:
    count = tensor.numel()
    base = torch.zeros(start + count + _BEHIND, dtype=tensor.dtype, device=tensor.device)
    if tensor.is_floating_point():
        base.fill_(torch.nan)
    view = base.detach()[start : start + count].view(tensor.shape)
    return view.copy_(tensor.detach())


def _at_16_bytes(tensor: Tensor) -> Tensor:
    return _alike(tensor, _within(tensor, 16 // tensor.element_size()).detach())


def _at_32_bytes(tensor: Tensor) -> Tensor:
    return _alike(tensor, _within(tensor, 32 // tensor.element_size()).detach())


def _written_to(tensor: Tensor) -> Tensor:
    found = tensor.detach().clone()
    for _ in range(11):
        found.copy_(tensor.detach())
    return _alike(tensor, found)


def _of_another_library(tensor: Tensor) -> Tensor:
    """Return a copy in memory that PyTorch neither has allocated nor can enlarge."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return _alike(tensor, tensor.detach().clone())
    found = torch.frombuffer(bytearray(tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)
    return _alike(tensor, found.copy_(tensor.detach()))


def _negated(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds the numbers with the other sign, as the imaginary part of
    a conjugate does."""
    if not tensor.is_floating_point():
        return tensor
    return _alike(tensor, torch._neg_view(tensor.detach().neg()).detach())


def _with_gradient_and_hook(tensor: Tensor) -> Tensor:
    """Return a leaf as an optimizer finds it, with a gradient, a hook and an attribute."""
    found = _alike(tensor, tensor.detach().clone())
    if found.requires_grad:
        found.grad = torch.ones_like(found)
        found.register_hook(lambda grad: None)
    found.note = "of its user"  # type: ignore[attr-defined]
    return found


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "parameters": _parameter,
    "results of an operator": _result_of_an_operator,
    "views of longer tensors": _view,
    "tensors at an address that 16 divides and 32 does not": _at_16_bytes,
    "tensors at an address that 32 divides and 64 does not": _at_32_bytes,
    "tensors that were written to": _written_to,
    "tensors in another library's memory": _of_another_library,
    "tensors with PyTorch's negative bit": _negated,
    "tensors with a gradient, a hook and an attribute": _with_gradient_and_hook,
}

"""Procedures for a candidate's process: memory around what a call reads and writes."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuselab.errors import FuselabError
from fuselab.op import tensors_in
from fuselab.prove.arguments import filled, needed
from fuselab.prove.asked_calls import Results, poison_of, with_gradients
from fuselab.prove.asked_memory import storage_bytes
from fuselab.prove.held import Held, results
from fuselab.prove.outputs import as_declared, outputs_in
from fuselab.runtime import dispatch
from fuselab.runtime.launch_recording import ALLOCATIONS

_READ = 1  # PROT_READ of mprotect
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap has from 3.13 on
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_BACK = 1 << 31  # elements before a distant tensor
GUARD = 64  # elements before and behind a tensor, which keep its alignment
# The same around what an implementation allocates: a row too many ends further away than a vector.
_GUARD_OF_ALLOCATIONS = 4096


def guarded(tensor: Tensor, fill: float, width: int = GUARD) -> Tensor:
    """Return a copy with the same strides, with ``width`` elements of ``fill`` before and behind.

    The memory around integers holds one of them, because only those are known to be valid.
    """
    if tensor.numel() == 0:
        return tensor
    if not tensor.is_floating_point():
        fill = tensor.reshape(-1)[0].item()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps)
    buffer = torch.full((extent + 2 * width,), fill, dtype=tensor.dtype, device=tensor.device)
    torch.as_strided(buffer, (extent,), (1,), width).copy_(
        torch.as_strided(tensor.detach(), (extent,), (1,), tensor.storage_offset())
    )
    return torch.as_strided(buffer, tensor.shape, tensor.stride(), width)


def edges_of(tensor: Tensor, width: int = GUARD) -> tuple[Tensor, Tensor]:
    """Return a copy of the bytes before and behind a tensor with ``width`` guards on each side."""
    whole = storage_bytes(tensor)
    size = width * tensor.element_size()
    return whole[:size], whole[-size:]


def with_inputs(
    held: Held, places: Sequence[int] | None, values: Sequence[Any]
) -> dict[str, list[Any]]:
    """Return the results of a call, with the gradients of the tensors at ``places`` where there are
    some, and the tensors among ``values`` as the call leaves them."""
    found: Results = (
        [*results(held, *values)] if places is None else with_gradients(held, places, values)
    )
    return {"results": found, "tensors": list(tensors_in(values))}


def with_read_only_inputs(
    held: Held, places: Sequence[int] | None, values: Sequence[Any]
) -> list[Any]:
    """Return the results of a call on inputs that lie in memory of their own, which may only be
    read, and end where no memory follows. Anything else ends this process."""
    tensors = [read_only(tensor) for tensor in tensors_in(values)]
    given = filled(values, range(len(tensors)), tensors)
    if places is None:
        return [*results(held, *given)]
    return with_gradients(held, places, given)


def read_only(tensor: Tensor, at_end: bool = True) -> Tensor:
    """Return a copy of a CPU tensor with the same strides, in pages that may only be read; its
    last byte is that of a page, behind which comes one that may not even be read. Without
    ``at_end`` it begins where a page does, aligned as PyTorch's own memory is at least."""
    if tensor.numel() == 0:
        return tensor
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps)
    content = torch.as_strided(tensor.detach(), (extent,), (1,), tensor.storage_offset())
    count = extent * tensor.element_size()
    pages = -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    offset = pages - count if at_end else 0
    whole = torch.frombuffer(memory, dtype=tensor.dtype, offset=offset, count=extent)
    whole.copy_(content)
    begin = whole.data_ptr() - offset
    for start, length, rights in ((begin, pages, _READ), (begin + pages, mmap.PAGESIZE, 0)):
        if _mprotect(start, length, rights) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    return torch.as_strided(whole, tensor.shape, tensor.stride(), 0)


def at_a_distance(
    held: Held, start: int, reach: int, places: Sequence[int] | None, values: Sequence[Any]
) -> Results | None:
    """Return the results of a call, with the gradients of the tensors at ``places`` unless that is
    None, on tensors whose last elements lie more than ``reach`` elements behind their first; None
    where the implementation refuses such strides, or the machine such an address space.

    One dimension of each tensor has the large stride: that at the place ``start``, or behind it.
    """
    assert held.implementation is not None
    try:
        tensors = [_distant(tensor, start, reach) for tensor in tensors_in(values)]
    except (OSError, ValueError):
        return None
    given = filled(values, range(len(tensors)), tensors)
    args = given if places is None else given[:-1]
    if dispatch.why_not(held.op, held.implementation, args) is not None:
        return None
    try:
        held.op.validate(*args)
    except FuselabError:
        return None
    found: Results = (
        [*results(held, *given)] if places is None else with_gradients(held, places, given)
    )
    # A result may be one of the tensors, such as an upstream gradient; its memory must not cross.
    return [None if one is None else one.detach().clone() for one in found]


def _distant(tensor: Tensor, start: int, reach: int) -> Tensor:
    """Return a copy of a CPU tensor, one stride of which is as large as ``reach`` asks for; the
    tensor itself where it has one element in every dimension.

    Pages that nobody touches take no memory. As many elements lie before the first as an index of
    32 bits can go back.
    """
    dims = [dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1]
    if not dims or not tensor.numel():
        return tensor
    far = dims[start % len(dims)]
    strides = list(torch.empty_like(tensor, memory_format=torch.contiguous_format).stride())
    strides[far] = reach // (tensor.shape[far] - 1) + tensor.numel() + 1
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, (_BACK + extent) * tensor.element_size(), flags=flags)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    whole = torch.frombuffer(memory, dtype=tensor.dtype)
    return torch.as_strided(whole, tensor.shape, strides, _BACK).copy_(tensor.detach())


class GuardedAllocations(TorchDispatchMode):
    """Puts guards before and behind every tensor that ``torch.empty`` and its variants return."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[tuple[Tensor, tuple[Tensor, Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in ALLOCATIONS or not isinstance(result, Tensor) or result.is_meta:
            return result  # a tensor without memory stands for a shape
        if result.numel():
            poisoned = result.fill_(poison_of(result.dtype, math.nan))
            result = guarded(poisoned, 7.0, _GUARD_OF_ALLOCATIONS)
            self.watched.append((result, edges_of(result, _GUARD_OF_ALLOCATIONS)))
        return result

    def written(self) -> bool:
        """Return whether any guard was written to."""
        return any(
            not all(map(torch.equal, edges, edges_of(tensor, _GUARD_OF_ALLOCATIONS)))
            for tensor, edges in self.watched
        )


def written_beyond(
    held: Held, args: Sequence[Any], upstream: Sequence[Tensor] | None
) -> str | None:
    """Return which part of the implementation writes beyond a tensor that it allocates, or None.

    The backward runs where there is an ``upstream`` gradient.
    """
    op = held.op
    assert held.implementation is not None
    implementation = op.implementations[held.implementation]
    with GuardedAllocations() as forward:
        output = held.alone(*args)
    if forward.written():
        return "the forward writes beyond a tensor that it allocates"
    if op.gradient is None or implementation.backward is None or upstream is None:
        return None
    saved = op.gradient.save(output, *args)
    given = as_declared(op, outputs_in(op.without_residuals(output)), upstream)
    needs = needed(op, args)
    if implementation.supports_backward(needs, given, *saved) is not None:
        return None
    with torch.no_grad(), GuardedAllocations() as backward:
        implementation.backward(needs, given, *saved)
    return "the backward writes beyond a tensor that it allocates" if backward.written() else None

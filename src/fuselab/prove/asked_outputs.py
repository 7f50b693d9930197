"""Procedures for a candidate's process: what kind of tensors a call returns, and how long they
live. What they find is that process's own word."""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuselab.op import tensors_in
from fuselab.prove.arguments import differentiable, mapped, needed, tensor_names
from fuselab.prove.asked_calls import as_leaves, with_gradients
from fuselab.prove.held import Held, results
from fuselab.prove.outputs import as_declared, output_names, outputs_in
from fuselab.runtime import builds
from fuselab.runtime.dispatch.overlap import overlaps_itself

_LEAK_BYTES = 96  # per call; a kept tensor of one element takes 200 and more
# That a span of any number of calls may keep: Triton's interpreter left 930 after eight of them.
_NOISE_BYTES = 4096
# Per call over a long span, which has so many times the calls of a short one, where it takes less
# than so many seconds. The least block of C's allocator takes 32 bytes.
_BLOCK_BYTES, _LONG_SPAN, _LONG_SPAN_S = 24, 8, 4.0
_TRIES = 3
_BUILDS_S = 60.0  # that the builds of a process's first calls may take
_SLACK_BYTES = 1 << 16  # of a storage beyond the elements that a result needs
NO_COUNT = "this machine's C library does not tell how much memory is in use"


def undeclared(held: Held, args: Sequence[Any], upstream: Sequence[Tensor] | None) -> str | None:
    """Return the first fault in the type, the strides or the storage of an output or, where there
    is an ``upstream`` gradient, of a gradient; None if there is none."""
    op = held.op
    raw = getattr(torch.ops, op.namespace)
    forward = getattr(raw, op.short_name).default
    values = (*args, held.implementation)
    promised = _promised(forward, values)[: op.output_count]
    names = [f"the {name}" for name in output_names(op)]
    for how, call in (
        ("", lambda: op.without_residuals(forward(*values))),
        # The second call of the public function may run a launch plan.
        ("", lambda: held(*args)),
        (" of the second call", lambda: held(*args)),
    ):
        problem = _first_problem(names, outputs_in(call()), promised)
        if problem is not None:
            return problem + how
    if upstream is None:
        return None
    problem = _gradient_problem(held, args, upstream, raw)
    if problem is not None:
        return problem
    places, arguments = differentiable(op, args), tensor_names(op, args)
    found = with_gradients(held, places, [*args, tuple(upstream)])
    labels = [*names, *(f"the gradient of {arguments[place]}" for place in places)]
    # A gradient may be the upstream gradient itself, in the strides that the caller gave it.
    known = {one.untyped_storage().data_ptr() for one in upstream if one.numel()}
    own = [
        None if one is None or one.untyped_storage().data_ptr() in known else one for one in found
    ]
    return _first_problem(labels, own)


def _gradient_problem(
    held: Held, args: Sequence[Any], upstream: Sequence[Tensor], raw: Any
) -> str | None:
    """Return what is wrong with the gradients that the raw backward returns, or None."""
    op = held.op
    assert op.gradient is not None
    output = held(*args)
    gradients = as_declared(op, outputs_in(output), upstream)
    saved = op.gradient.save(op.with_residuals(output, args), *args)
    backward = getattr(raw, f"{op.short_name}_backward").default
    values = (needed(op, args), *tensors_in((gradients,)), *saved, held.implementation)
    given, promised = backward(*values), _promised(backward, values)
    count = len(outputs_in(given))
    return _first_problem(
        [f"gradient {place}" for place in range(count)], outputs_in(given), promised
    )


def _promised(overload: Any, values: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return what the fake implementation of a raw operator gives for these values."""
    with FakeTensorMode() as mode:
        faked = mapped(
            lambda value: mode.from_tensor(value) if isinstance(value, Tensor) else value, values
        )
        return outputs_in(overload(*faked))


def _first_problem(
    names: Sequence[str],
    results: Sequence[Tensor | None],
    promised: Sequence[Tensor] | None = None,
) -> str | None:
    """Return the first fault in type, storage or strides, or None."""
    for place, (name, result) in enumerate(zip(names, results, strict=True)):
        if result is None:
            continue
        if type(result) is not Tensor:
            return f"{name} is a {type(result).__name__}, which is no plain torch.Tensor"
        if overlaps_itself(result):
            return f"{name} has elements that share memory (strides {result.stride()})"
        if promised is None:
            continue
        problem = _unlike(result, promised[place])
        if problem is not None:
            return f"{name} {problem}"
        excess = result.untyped_storage().nbytes() - _extent(result) * result.element_size()
        if excess > _SLACK_BYTES + result.nbytes:
            return f"{name} of {result.nbytes} bytes keeps {excess} more bytes alive"
    return None


def _extent(tensor: Tensor) -> int:
    """Return how many elements of memory a tensor spans."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _unlike(result: Tensor, promised: Tensor) -> str | None:
    """Return how a result differs from what ``fake`` promises, or None."""
    if result.shape != promised.shape or result.dtype != promised.dtype:
        return (
            f"is {result.dtype} of shape {list(result.shape)}, where fake promises "
            f"{promised.dtype} of shape {list(promised.shape)}"
        )
    if result.numel() < 2:
        return None
    dims = [dim for dim, size in enumerate(result.shape) if size > 1]
    if [result.stride(dim) for dim in dims] != [promised.stride(dim) for dim in dims]:
        return (
            f"has strides {tuple(result.stride())}, where fake promises "
            f"{tuple(promised.stride())}: torch.compile relies on them. FusedOp.fake says which "
            "strides the implementations give (docs/contract.md)"
        )
    return None


def shared_by_calls(
    held: Held, args: Sequence[Any], upstream: Sequence[Tensor] | None, count: int
) -> str | None:
    """Return which of ``count`` calls return memory of an earlier call whose result is still alive,
    or None."""
    for make, calls, what in _calls(held, args, upstream, count):
        alive: list[Tensor] = []
        begins: dict[int, int] = {}
        for number in range(calls):
            for result in make():
                storage = result.untyped_storage()
                if storage.nbytes() == 0:
                    continue
                earlier = begins.setdefault(storage.data_ptr(), number)
                if earlier != number:
                    return (
                        f"call {number + 1} returns {what} in memory of call {earlier + 1}, whose "
                        "result is still alive"
                    )
                alive.append(result)
    return None


def leaked(
    held: Held,
    args: Sequence[Any],
    upstream: Sequence[Tensor] | None,
    count: int,
    thoroughly: bool,
) -> str | None:
    """Return how much memory calls keep after their results are gone, or None; ``NO_COUNT`` where
    nothing counts the memory in use.

    Memory that is taken once, as by a cache, does not count; the calls of two spans of ``count``
    must each take more, and so must those of two spans after them. The same is asked of Python's
    small objects, address space, open files and threads, and ``thoroughly`` of the items of its
    containers. Nothing but the calls grows with their number, so that a span of many shows small
    blocks too.
    """
    in_use = memory_in_use(tensors_in(args)[0].device)
    if in_use is None:
        return NO_COUNT
    kinds = list(_calls(held, args, upstream, count))
    for make, *_ in kinds:
        make()
    # A thread that compiles, as a process's first calls start, keeps objects of its own meanwhile.
    builds.wait_for_background(_BUILDS_S)
    counters = {"bytes": (in_use, float(_LEAK_BYTES), _NOISE_BYTES), **_OTHER_RESOURCES}
    if thoroughly:
        counters["items of Python's containers"] = (_items_of_containers(), 0.75, 40)
    gc.collect()
    gc.freeze()  # what is there before is not looked through again, which takes 50 ms each time
    try:
        for make, calls, what in kinds:
            problem = _kept_by(make, calls, what, counters)
            if problem is None and thoroughly:
                problem = _kept_by_many(make, calls * _LONG_SPAN, what, in_use)
            if problem is not None:
                return problem
    finally:
        gc.unfreeze()
    return None


Counters = dict[str, tuple[Callable[[], int], float, int]]


def _kept_by(make: Callable[[], Any], calls: int, what: str, counters: Counters) -> str | None:
    """Return what two spans of calls keep, and two more as well, or None."""
    found = _growths(make, calls, 2, [in_use_of for in_use_of, *_ in counters.values()])
    for (counted, (in_use_of, of_a_call, noise)), growths in zip(
        counters.items(), found, strict=True
    ):
        least = max(of_a_call * calls, noise)
        if max(growths) < least:
            continue
        # Once more, for what fills slowly.
        if counted in ("bytes", _OBJECTS):
            growth = _growth_without_cycles(make, calls, in_use_of, least)
        else:
            growth = min(_growths(make, calls, 2, [in_use_of])[0])
        if growth >= least:
            return _kept(calls, what, f"{growth} {counted}")
    return None


def _kept_by_many(
    make: Callable[[], Any], calls: int, what: str, in_use: Callable[[], int]
) -> str | None:
    """Return how much memory a long span of calls keeps, and longer ones as well, or None; None too
    where it would take long."""
    if calls * min(_seconds(make) for _ in range(5)) > _LONG_SPAN_S:
        return None
    before, least = in_use(), _BLOCK_BYTES * calls
    for _ in range(calls):
        make()
    growth = in_use() - before
    if growth >= least:
        growth = _growth_without_cycles(make, calls, in_use, least)
    return _kept(calls, what, f"{growth} bytes") if growth >= least else None


def _seconds(make: Callable[[], Any]) -> float:
    begin = time.monotonic()
    make()
    return time.monotonic() - begin


def _kept(calls: int, what: str, amount: str) -> str:
    return (
        f"{calls} calls that return {what} keep {amount} after their results are gone, and the "
        "next ones as many again"
    )


def _pages_mapped() -> int:
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[0])


def _items_of_containers() -> Callable[[], int]:
    """Return a function that counts the items of the containers that there are now. A list takes
    memory for an eighth more of them at a time, so that no other counter sees one that grows."""
    containers = [one for one in gc.get_objects() if type(one) in _CONTAINERS]
    return lambda: sum(map(len, containers))


_CONTAINERS = {list, set, dict, collections.deque}
_OBJECTS = "objects of Python"
# What a process can run out of beside memory: how to count it, what a call must keep to fail, and
# what all of them may keep. No allocator of C sees the small objects of Python, of which a span of
# any number of calls may keep about twenty.
_OTHER_RESOURCES: Counters = {
    _OBJECTS: (sys.getallocatedblocks, 0.75, 40),
    "pages of address space": (_pages_mapped, 1.0, 0),
    "open files": (lambda: len(os.listdir("/proc/self/fd")), 0.5, 0),
    "threads": (lambda: len(os.listdir("/proc/self/task")), 0.5, 0),
}


def _growth_without_cycles(
    make: Callable[[], Any], count: int, counter: Callable[[], int], least: float
) -> int:
    """Return by how much what ``counter`` counts grows over ``count`` calls, after which Python's
    cycles are collected.

    A try is four spans of calls, of which the least but one counts, because something else may be
    freed in one of them; where another two lie on either side of ``least``, as where a thread ends
    meanwhile, the try says nothing. The result is the least of three tries: what fills slowly, as a
    cache does, grows less in each.
    """
    grown: list[int] = []
    for _ in range(_TRIES + 2):
        _, growth, next_growth, _ = sorted(_growths(make, count, 4, [counter], collect=True)[0])
        if next_growth < least:
            return growth
        if growth >= least:
            grown.append(growth)
        if len(grown) == _TRIES:
            break
    return min(grown, default=growth)


def _growths(
    make: Callable[[], Any],
    count: int,
    spans: int,
    counters: Sequence[Callable[[], int]],
    collect: bool = False,
) -> list[list[int]]:
    """Return for each of ``counters`` by how much what it counts grows over each of ``spans`` spans
    of ``count`` calls, after a shorter one that fills caches. With ``collect``, Python's cycles are
    collected after each span, and else not at all: what a collection frees hides what is kept."""
    readings = []
    # Python keeps up to a hundred freed floats for the next ones, which it counts as in use. A
    # collection empties that list, from which what the first calls keep would come.
    gc.collect()
    collected_by_itself = gc.isenabled()
    gc.disable()
    try:
        for calls in (count // 4, *[count] * spans):
            for _ in range(calls):
                make()
            if collect:
                gc.collect()
            readings.append([counter() for counter in counters])
    finally:
        if collected_by_itself:
            gc.enable()
    return [
        [later - earlier for earlier, later in itertools.pairwise(one)]
        for one in zip(*readings, strict=True)
    ]


def _calls(
    held: Held, args: Sequence[Any], upstream: Sequence[Tensor] | None, count: int
) -> Iterator[tuple[Callable[[], list[Tensor]], int, str]]:
    """Yield functions that make a call and return its new tensors, each with how often to call it
    and what it returns."""
    yield lambda: results(held, *args), count, "a result"
    if upstream is not None:
        places = differentiable(held.op, args)
        # A gradient may be the upstream gradient itself, which lives in the caller.
        known = {one.untyped_storage().data_ptr() for one in upstream}

        def gradients() -> list[Tensor]:
            found = with_gradients(held, places, [*args, tuple(upstream)])
            return [
                result
                for result in found
                if result is not None and result.untyped_storage().data_ptr() not in known
            ]

        yield gradients, count // 2, "gradients"
        yield (
            lambda: results(held, *as_leaves(args, places)),
            count // 2,
            "a result that needs a gradient",
        )


class _MallocInfo(ctypes.Structure):
    """The struct mallinfo2 of the GNU C library, whose fields are sizes in bytes or counts."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@functools.cache
def _mallinfo() -> Callable[[], _MallocInfo] | None:
    """Return the C library's mallinfo2, or None where it has none (other than glibc 2.33)."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallocInfo
    return function


def memory_in_use(device: torch.device) -> Callable[[], int] | None:
    """Return a function that counts the bytes in use on ``device``, by PyTorch's caching allocator
    or the C library's; None where nothing counts them."""
    if device.type == "cuda":
        return lambda: torch.cuda.memory_allocated(device)
    mallinfo = _mallinfo()
    if mallinfo is None:
        return None

    def in_use() -> int:
        found = mallinfo()
        return int(found.uordblks) + int(found.hblkhd)

    return in_use

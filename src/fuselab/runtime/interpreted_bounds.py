"""Loads and stores outside of a kernel's tensors, refused by Triton's interpreter.

The interpreter follows any address. A read beyond a tensor gives whatever lies there, often
zeros, and the kernel seems right; on a GPU the same read can end the process. After ``install``
such a read, write or atomic update raises IndexError with the line, the tensor and the place.

A tensor's memory is its whole storage, so a read beyond a view of it, within the storage, passes.
A kernel that makes pointers of integers, as for a table of pointers, may reach any tensor; from
the first such pointer on nothing is checked in that launch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy


@dataclass
class _Launch:
    """The memory that the kernel of the present launch may touch, by the names of its arguments.

    ``begins`` and ``ends`` are addresses, sorted.
    """

    names: list[str] = field(default_factory=list)
    begins: Any = field(default_factory=lambda: numpy.zeros(0, numpy.uint64))
    ends: Any = field(default_factory=lambda: numpy.zeros(0, numpy.uint64))
    checks: bool = False


_present = _Launch()
_is_unchecked = False


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Let every access pass inside, as the recorder of ``fuselab debug`` wants, which notes it."""
    global _is_unchecked
    before, _is_unchecked = _is_unchecked, True
    try:
        yield
    finally:
        _is_unchecked = before


def install() -> None:
    """Let the interpreter raise IndexError for an access outside of the tensors of a launch."""
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    prepare = executor._init_args_hst

    def prepared(self: Any, args: Any, keywords: Any) -> Any:
        global _present
        on_host, keywords_on_host = prepare(self, args, keywords)
        named = {**dict(zip(self.arg_names, on_host, strict=False)), **keywords_on_host}
        _present = _launch(named)
        return on_host, keywords_on_host

    def pointer_of_integer(self: Any, *args: Any) -> Any:
        _present.checks = False
        return self.create_bitcast(*args)

    executor._init_args_hst = prepared
    builder.create_int_to_ptr = pointer_of_integer
    load, store = builder.create_masked_load, builder.create_masked_store
    update, exchange = builder.create_atomic_rmw, builder.create_atomic_cas

    # A tensor descriptor loads and stores by these methods too, with keywords.
    def loaded(self: Any, ptrs: Any, mask: Any, *rest: Any, **keywords: Any) -> Any:
        _check("reads", ptrs, mask)
        return load(self, ptrs, mask, *rest, **keywords)

    def stored(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **keywords: Any) -> Any:
        _check("writes", ptrs, mask)
        return store(self, ptrs, value, mask, *rest, **keywords)

    def updated(self: Any, operation: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check("updates", ptr, mask)
        return update(self, operation, ptr, value, mask, *rest)

    def exchanged(self: Any, ptr: Any, *rest: Any) -> Any:
        _check("updates", ptr, None)
        return exchange(self, ptr, *rest)

    builder.create_masked_load, builder.create_masked_store = loaded, stored
    builder.create_atomic_rmw, builder.create_atomic_cas = updated, exchanged


def _launch(named: dict[str, Any]) -> _Launch:
    """Return the memory of the arguments; a tensor of a tuple is named ``name[0]``."""
    found: dict[tuple[int, int], str] = {}

    def note(name: str, value: Any) -> None:
        if isinstance(value, tuple):
            for place, item in enumerate(value):
                note(f"{name}[{place}]", item)
        elif hasattr(value, "block_shape") and hasattr(value, "base"):  # a tensor descriptor
            note(name, value.base)
        elif hasattr(value, "data_ptr"):
            storage = getattr(value, "base", value).untyped_storage()  # a TensorWrapper has a base
            begin = storage.data_ptr()
            found.setdefault((begin, begin + storage.nbytes()), name)

    for name, value in named.items():
        note(name, value)
    names: list[str] = []
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted(found):
        if ranges and begin < ranges[-1][1]:  # both lie in one piece of memory
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((begin, end))
            names.append(found[begin, end])
    return _Launch(
        names,
        numpy.array([begin for begin, _ in ranges], numpy.uint64),
        numpy.array([end for _, end in ranges], numpy.uint64),
        checks=True,
    )


def _check(verb: str, ptrs: Any, mask: Any) -> None:
    """Raise IndexError if an address that the mask keeps is outside of every tensor."""
    if _is_unchecked or not _present.checks:
        return
    addresses = numpy.asarray(ptrs.data, numpy.uint64).reshape(-1)
    if mask is not None:
        addresses = addresses[numpy.broadcast_to(mask.data, ptrs.data.shape).reshape(-1)]
    if not addresses.size:
        return
    width = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    first, last = addresses.min(), addresses.max()
    place = int(numpy.searchsorted(_present.begins, first, side="right")) - 1
    if place >= 0 and int(last) + width <= int(_present.ends[place]):
        return  # all within one tensor
    places = numpy.searchsorted(_present.begins, addresses, side="right").astype(numpy.int64) - 1
    known = numpy.maximum(places, 0)
    if _present.names:
        inside = (places >= 0) & (addresses + numpy.uint64(width) <= _present.ends[known])
    else:
        inside = numpy.zeros(addresses.size, bool)
    if not inside.all():
        raise IndexError(_sentence(verb, addresses[~inside], addresses.size, width))


def _sentence(verb: str, outside: Any, count: int, width: int) -> str:
    """Say where the first access outside is, from the nearest tensor."""
    address = int(outside[0])
    places = []
    for name, begin, end in zip(_present.names, _present.begins, _present.ends, strict=True):
        before, after = int(begin) - address, address - int(end)
        if before > 0:
            places.append((before, f"{_elements(before // width)} before the first of '{name}'"))
        else:
            places.append((after, f"{_elements(after // width + 1)} after the last of '{name}'"))
    where = f"the first is {min(places)[1]}" if places else "the kernel has no tensor"
    return (
        f"{_line()}the kernel {verb} outside of its tensors: {outside.size} of {count} addresses; "
        f"{where}. A mask must leave them out."
    )


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count:,} elements"


def _line() -> str:
    """Return the kernel's file and line, from the stack; not those of functions that it calls in
    Triton or in this folder."""
    from triton.runtime import interpreter

    frame: FrameType | None = sys._getframe()
    others = interpreter.__file__.rpartition("/runtime/")[0], __file__.rpartition("/")[0]
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(others):
            return f"{file.rpartition('/')[2]}:{frame.f_lineno}: "
        frame = frame.f_back
    return ""

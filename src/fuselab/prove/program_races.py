"""Find programs of one Triton launch that use the same memory while nothing orders them.

Triton's interpreter runs the programs of a launch one after the other, so each finds what those
before it have stored, and every result is right. A GPU runs them at once and in any order. So the
loads and stores of every program are noted while the interpreter runs, and compared when the launch
has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy

_LOAD, _STORE, _ATOMIC = 0, 1, 2
_SAID = {_LOAD: "loads", _STORE: "stores to", _ATOMIC: "adds by an atomic to"}
_BITS = {1: numpy.uint8, 2: numpy.uint16, 4: numpy.uint32, 8: numpy.uint64}


@dataclass
class Launch:
    """The loads and stores of the programs of one launch."""

    kernel: str
    addresses: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    programs: list[tuple[int, int, int]] = field(default_factory=list)
    is_ordered: bool = False

    def note(
        self, kind: int, program: tuple[int, int, int], pointers: Any, mask: Any, value: Any
    ) -> None:
        """Note one access of a block of elements, with the bits that were loaded or stored."""
        chosen = numpy.broadcast_to(numpy.asarray(mask, dtype=bool), pointers.shape)
        bits = numpy.ascontiguousarray(numpy.broadcast_to(value, pointers.shape))
        bits = bits.view(_BITS[bits.dtype.itemsize]).reshape(pointers.shape)
        self.addresses.append(pointers[chosen].astype(numpy.uint64))
        self.values.append(bits[chosen].astype(numpy.uint64))
        self.kinds.append(kind)
        self.programs.append(program)

    def race(self) -> str | None:
        """Return how two programs depend on each other's order, or None.

        An element that one program stores may not be used by another one, unless all of them load
        and store the same bits there. A launch with atomics on integers is not judged: a counter or
        a lock can order its programs.
        """
        if self.is_ordered or not self.addresses:
            return None
        counts = [len(one) for one in self.addresses]
        number = numpy.repeat(numpy.arange(len(counts)), counts)  # of the access
        addresses, values = numpy.concatenate(self.addresses), numpy.concatenate(self.values)
        order = numpy.argsort(addresses, kind="stable")
        addresses, values, number = addresses[order], values[order], number[order]
        if not len(addresses):
            return None
        begins = numpy.flatnonzero(numpy.r_[True, addresses[1:] != addresses[:-1]])
        known = {program: place for place, program in enumerate(dict.fromkeys(self.programs))}
        program = numpy.array([known[one] for one in self.programs])[number]
        kind = numpy.array(self.kinds)[number]

        def differ(some: Any) -> Any:
            lowest, highest = numpy.minimum, numpy.maximum
            return lowest.reduceat(some, begins) != highest.reduceat(some, begins)

        stored = numpy.bitwise_or.reduceat(kind == _STORE, begins)
        added = numpy.bitwise_or.reduceat(kind == _ATOMIC, begins)
        raced = numpy.flatnonzero(stored & differ(program) & (differ(values) | added))
        if not len(raced):
            return None
        begin = begins[raced[0]]
        end = begins[raced[0] + 1] if raced[0] + 1 < len(begins) else len(addresses)
        return self._told(number[begin:end])

    def _told(self, accesses: Any) -> str:
        store = next(one for one in accesses if self.kinds[one] == _STORE)
        other = next(one for one in accesses if self.programs[one] != self.programs[store])
        return (
            f"program {self.programs[store]} of {self.kernel} stores to an element that program "
            f"{self.programs[other]} of the same launch {_SAID[self.kinds[other]]}, and nothing "
            "orders them: on a GPU either may come first"
        )


@contextlib.contextmanager
def watched_launches() -> Iterator[list[str]]:
    """Watch every launch under the interpreter, and yield the list that gets its races."""
    from triton.runtime import interpreter

    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    found: list[str] = []
    launches: list[Launch] = []
    call, load, store = executor.__call__, builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(Launch(self.fn.__name__))
        try:
            call(self, *args, **kwargs)
        finally:
            launch = launches.pop()
        found.extend(filter(None, [launch.race()]))

    def noted_load(ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(ptrs, mask, *args, **kwargs)
        launches[-1].note(_LOAD, builder.grid_idx, ptrs.data, mask.data, loaded.data)
        return loaded

    def noted_store(ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        launches[-1].note(_STORE, builder.grid_idx, ptrs.data, mask.data, value.data)
        return store(ptrs, value, mask, *args, **kwargs)

    def noted_rmw(operation: Any, ptr: Any, value: Any, mask: Any, *args: Any) -> Any:
        launches[-1].is_ordered |= value.data.dtype.kind in "iu" and value.dtype.scalar.is_int()
        launches[-1].note(_ATOMIC, builder.grid_idx, ptr.data, mask.data, value.data)
        return rmw(operation, ptr, value, mask, *args)

    def noted_cas(*args: Any) -> Any:
        launches[-1].is_ordered = True
        return cas(*args)

    changed: dict[str, Callable[..., Any]] = {
        "create_masked_load": noted_load,
        "create_masked_store": noted_store,
        "create_atomic_rmw": noted_rmw,
        "create_atomic_cas": noted_cas,
    }
    try:
        executor.__call__ = launched
        vars(builder).update(changed)
        yield found
    finally:
        executor.__call__ = call
        for name in changed:
            vars(builder).pop(name, None)


def races(held: Any, procedure: Callable[..., Any], *args: Any) -> str | None:
    """Run a procedure under the interpreter, and return the first race of a launch, or None."""
    with watched_launches() as found:
        procedure(held, *args)
    return found[0] if found else None

"""A record of the launches and memory accesses of interpreted kernels.

Inside of ``recording`` parts of Triton's interpreter are replaced, in the child process alone;
written for Triton 3.6 to 3.9.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import numpy
import torch

from fuselab.errors import UnsupportedError
from fuselab.runtime import interpreted_bounds


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's name, file and lines that run, its grid and tensors by name."""

    kernel: str
    file: str
    lines: tuple[int, ...]
    grid: tuple[int, ...]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Access:
    """One load or store of one program: offsets in elements of a tensor, those of active lanes and
    those that the mask cuts."""

    kernel: str
    program: tuple[int, int, int]
    line: int | None
    kind: str
    tensor: str
    offsets: tuple[int, ...]
    cut: tuple[int, ...]


@dataclass
class Record:
    """The launches and accesses of a run, in their order."""

    launches: list[Launch] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)


def program() -> tuple[int, int, int]:
    """Return the id of the program that runs."""
    from triton.runtime import interpreter

    found: tuple[int, int, int] = interpreter.interpreter_builder.grid_idx
    return found


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Record every launch and access inside. Raises UnsupportedError if Triton's interpreter is
    built otherwise."""
    from triton.runtime import interpreter

    record = Record()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    methods = (
        "create_masked_load",
        "create_masked_store",
        "create_atomic_rmw",
        "create_atomic_cas",
    )
    if not all(hasattr(builder, name) for name in methods):
        raise UnsupportedError("this version of Triton has another interpreter; 3.6 to 3.9 work.")
    call, load, store, atomic, exchange = (
        executor.__call__,
        *(getattr(builder, name) for name in methods),
    )

    def launched(self: Any, *args: Any, **keywords: Any) -> Any:
        record.launches.append(_launch(self, args, keywords))
        return call(self, *args, **keywords)

    # A tensor descriptor loads and stores by these methods too, with keywords.
    def loaded(self: Any, ptrs: Any, mask: Any, *rest: Any, **keywords: Any) -> Any:
        _note(record, "load", ptrs, mask)
        return load(self, ptrs, mask, *rest, **keywords)

    def stored(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **keywords: Any) -> Any:
        _note(record, "store", ptrs, mask)
        return store(self, ptrs, value, mask, *rest, **keywords)

    def updated(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        _note(record, "atomic", ptr, mask)
        return atomic(self, operation, ptr, val, mask, *rest)

    def exchanged(self: Any, ptr: Any, *rest: Any) -> Any:
        _note(record, "atomic", ptr, None)
        return exchange(self, ptr, *rest)

    with (
        interpreted_bounds.unchecked(),
        mock.patch.object(executor, "__call__", launched),
        mock.patch.object(builder, methods[0], loaded),
        mock.patch.object(builder, methods[1], stored),
        mock.patch.object(builder, methods[2], updated),
        mock.patch.object(builder, methods[3], exchanged),
    ):
        yield record


def _launch(executor: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Launch:
    from triton.tools.tensor_descriptor import TensorDescriptor

    names = inspect.getfullargspec(executor.fn).args
    given = dict(zip(names, args, strict=False)) | keywords
    described = {  # a descriptor made on the host stands for the tensor that it describes
        name: value.base if isinstance(value, TensorDescriptor) else value
        for name, value in given.items()
    }
    tensors = {name: value for name, value in described.items() if isinstance(value, torch.Tensor)}
    grid = executor.grid(given) if callable(executor.grid) else executor.grid
    code = executor.fn.__code__
    return Launch(
        executor.fn.__name__,
        code.co_filename,
        tuple(lines_of(code)),
        tuple(int(size) for size in grid),
        tensors,
    )


def lines_of(code: CodeType) -> list[int]:
    """Return the lines of a function that run, its ``def`` left out."""
    found = {line for _, _, line in code.co_lines() if line is not None}
    return sorted(found - {code.co_firstlineno})


def _note(record: Record, kind: str, pointers: Any, mask: Any) -> None:
    if not record.launches:
        return
    launch = record.launches[-1]
    addresses = numpy.asarray(pointers.data).astype(numpy.int64).ravel()
    lanes = True if mask is None else numpy.asarray(mask.data, bool).ravel()
    active = numpy.broadcast_to(lanes, addresses.shape)
    name, tensor = _tensor_at(launch, addresses, active)
    if tensor is None:
        return
    offsets = (addresses - tensor.data_ptr()) // tensor.element_size()
    record.accesses.append(
        Access(
            launch.kernel,
            program(),
            _line(sys._getframe(2), launch.file),
            kind,
            name,
            tuple(offsets[active].tolist()),
            tuple(offsets[~active].tolist()),
        )
    )


def _tensor_at(launch: Launch, addresses: Any, active: Any) -> tuple[str, torch.Tensor | None]:
    """Return the tensor in which most of the addresses lie, else the nearest below them."""
    wanted = addresses[active] if active.any() else addresses

    def inside(tensor: torch.Tensor) -> int:
        start = tensor.data_ptr()
        size = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        end = start + (size + 1) * tensor.element_size()
        return int(((wanted >= start) & (wanted < end)).sum())

    best = max(launch.tensors.items(), key=lambda item: inside(item[1]), default=("", None))
    if best[1] is not None and inside(best[1]):
        return best
    below = [item for item in launch.tensors.items() if item[1].data_ptr() <= wanted.min()]
    return max(below, key=lambda item: item[1].data_ptr(), default=("", None))


def _line(frame: FrameType | None, file: str) -> int | None:
    """Return the line of the kernel's file that runs, seen from inside the interpreter."""
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame.f_lineno if frame is not None else None


Wanted = Callable[[tuple[int, int, int]], bool]


def wanted_programs(programs: list[list[int]]) -> Wanted:
    """Return a test for the program ids that were asked for; all if there are none."""
    chosen = {tuple(each) + (0,) * (3 - len(each)) for each in programs}
    return lambda current: not chosen or current in chosen

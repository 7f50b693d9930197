"""Prediction of the C++ kernels that a call will launch, so that compilers run side by side.

An implementation names a kernel only when it launches it, and a backward only when autograd asks
for it: compiled in that order, the second kernel waits for the first. A rehearsal runs the
implementation on meta tensors (shapes, strides and dtypes without memory) in a separate thread,
where launches are noted instead of made. It happens only if a kernel of the call is not on disk, so
once per kernel and machine. It is only a hint: a kernel that it misses is compiled at its launch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fuselab.op import FusedOp, on_meta
from fuselab.runtime import builds

Rehearsal = Callable[[], None]


class Source(Protocol):
    """A file of kernels, such as a ``CppSource``."""

    def is_built(self, expression: str) -> bool:
        """Return whether the kernel is on disk or loaded."""

    def load(self, expression: str) -> None:
        """Load the kernel, after compiling it if needed. Raises BuildError."""


class _Thread(threading.local):
    call: Rehearsal | None = None  # rehearses the call that this thread makes
    expects_backward = False
    noted: list[tuple[Source, str]] | None = None  # the launches noted, if this thread rehearses


_thread = _Thread()


@contextlib.contextmanager
def expecting_backward() -> Iterator[None]:
    """Declare that, in this context and thread, a backward follows the forward."""
    outer, _thread.expects_backward = _thread.expects_backward, True
    try:
        yield
    finally:
        _thread.expects_backward = outer


class _Call:
    """A context in which an implementation runs; it can be rehearsed if a kernel is missing."""

    def __init__(self, op: FusedOp, implementation: str, args: Sequence[Any]) -> None:
        self._op, self._implementation, self._args = op, op.implementations[implementation], args

    def __enter__(self) -> None:
        self._outer, _thread.call = _thread.call, self.rehearse

    def __exit__(self, *_: object) -> None:
        _thread.call = self._outer

    def rehearse(self) -> None:
        """Run the implementation on meta tensors."""
        raise NotImplementedError


class Forward(_Call):
    """A context in which an implementation's forward runs with ``args``."""

    def __init__(self, op: FusedOp, implementation: str, args: Sequence[Any]) -> None:
        super().__init__(op, implementation, args)
        self._expects_backward = _thread.expects_backward

    def rehearse(self) -> None:
        """Run the forward on meta tensors, and the backward if one will follow."""
        op, args = self._op, on_meta(self._args)
        self._implementation.forward(*op.arranged(args))
        if not self._expects_backward or self._implementation.backward is None:
            return
        assert op.gradient is not None
        (output,) = op.arranged([(op.fake or op.reference)(*args)])
        needs = tuple(
            isinstance(value, Tensor) and value.requires_grad
            for parameter, given in zip(op.signature.parameters, self._args, strict=True)
            if parameter in op.tensor_parameters
            for value in (given if isinstance(given, (list, tuple)) else (given,))
        )
        saved = op.gradient.save(op.with_residuals(output, args), *args)
        upstream = tuple(map(torch.empty_like, op.outputs_of(output)))
        grad_output = upstream[0] if len(upstream) == 1 else upstream
        self._implementation.backward(needs, *op.arranged([grad_output, *saved]))


class Backward(_Call):
    """A context in which an implementation's backward runs with ``args``."""

    def rehearse(self) -> None:
        """Run the backward on meta tensors."""
        assert self._implementation.backward is not None
        self._implementation.backward(*self._op.arranged(on_meta(self._args)))


def is_noted(source: Source, expression: str) -> bool:
    """Note the launch and return True if the thread rehearses; then it must not be made."""
    if _thread.noted is None:
        return False
    _thread.noted.append((source, expression))
    return True


def build_the_others(source: Source, expression: str) -> None:
    """Compile, in the background, the other kernels that this thread's call will launch; the caller
    compiles ``expression`` of ``source`` itself."""
    call, _thread.call = _thread.call, None  # once per call
    if call is not None:
        builds.in_background(partial(_rehearse, call, source, expression))


def _rehearse(call: Rehearsal, source: Source, expression: str) -> None:
    _thread.noted = []
    # Any error may occur: an implementation may read values, which a meta tensor does not have.
    with contextlib.suppress(Exception):
        call()
    for other, kernel in dict.fromkeys(_thread.noted):
        if (other is not source or kernel != expression) and not other.is_built(kernel):
            builds.in_background(partial(other.load, kernel))

"""One implementation for a whole process, by the environment variable FUSELAB_IMPLEMENTATION."""

from __future__ import annotations

import functools
import os

from fuselab.errors import UnknownNameError
from fuselab.op import FusedOp
from fuselab.runtime.registered import registered

VARIABLE = "FUSELAB_IMPLEMENTATION"


def named(op: FusedOp) -> str | None:
    """Return the implementation that ``auto`` takes in this process, or None if it may choose.

    The result is ``"reference"`` or an implementation's name, which ``op`` need not have. The
    variable is read once per process, because launch plans are kept under ``"auto"``.

    Raises:
        UnknownNameError: no operator has an implementation of that name.
    """
    name = _value()
    if name is not None and name not in op.implementations:
        _check_known(name)
    return name


def checked() -> str | None:
    """Return the implementation that the variable names, or None if ``auto`` may choose.

    Raises:
        UnknownNameError: no operator of the library, and none registered, has it.
    """
    name = _value()
    if name is not None:
        _check_known(name)
    return name


@functools.cache
def _value() -> str | None:
    value = os.environ.get(VARIABLE, "auto")
    return None if value in ("", "auto") else value


@functools.cache
def _check_known(name: str) -> None:
    """Raise UnknownNameError unless some operator, of the library or registered, has ``name``.
    Importing the library's packages takes a moment; it happens once, and a call needs it only if
    its operator lacks the name."""
    if name == "reference":
        return
    from fuselab import ops

    every = [*map(ops.contract, ops.operators()), *registered().values()]
    known = {"auto", "reference"}.union(*(op.implementations for op in every))
    if name not in known:
        raise UnknownNameError(VARIABLE, name, known)

"""Every error a user can meet: one sentence that says what is wrong and what to do about it.

Each class derives from ``FuselabError``, which the command line turns into that one sentence and
exit status 2, and from the built-in exception that a PyTorch user would expect in its place.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class FuselabError(Exception):
    """Base of every error that fuselab raises on purpose."""


class ArgumentError(FuselabError, ValueError):
    """An argument has a value the operator or verb cannot take."""


class ShapeError(ArgumentError):
    """Tensor shapes do not fit the operator; names the argument and what was expected."""


class IndexRangeError(FuselabError, IndexError):
    """An index lies outside the tensor it points into; names the index and where it stands."""


class DtypeError(FuselabError, TypeError):
    """A tensor's dtype does not fit the operator; names the argument and what was expected."""


class DeviceError(FuselabError, RuntimeError):
    """Tensors lie on different devices, or the device a verb was asked for is not there."""


class UnknownNameError(FuselabError, LookupError):
    """A name (operator, activation, implementation, provider, case, model) that does not exist."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        close = difflib.get_close_matches(str(name), self.known, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        super().__init__(
            f"unknown {kind} '{name}'; known: {', '.join(self.known) or 'none'}.{hint}"
        )

    def __reduce__(self) -> tuple[Any, ...]:  # pickle would pass the finished sentence alone
        return type(self), (self.kind, self.name, self.known)


class UnsupportedError(FuselabError, RuntimeError):
    """The implementation that was asked for by name cannot run these inputs; says why."""


class DifferentiationError(FuselabError, RuntimeError):
    """A gradient was asked for where none is defined."""


class BuildError(FuselabError, RuntimeError):
    """A kernel did not compile or load; carries the compiler's own words in ``log``."""

    def __init__(self, message: str, log: str = "") -> None:
        self.log = log
        super().__init__(message)


class LaunchError(FuselabError, RuntimeError):
    """A kernel that was built did not launch; names the CUDA error, the grid and the block."""


class ContractError(FuselabError, TypeError):
    """A ``FusedOp`` does not meet the contract; names the field."""


class TargetError(FuselabError):
    """A TARGET cannot be loaded, has no inputs, or raised while it ran."""


class DataError(FuselabError, ValueError):
    """A data file is malformed; names file, line, column and what was expected."""


class CheckpointError(FuselabError, ValueError):
    """A checkpoint is truncated, or of another model or version; names the file."""


class DivergenceError(FuselabError, ArithmeticError):
    """A training loss is NaN or infinite; names the step, which ``step`` has too."""

    def __init__(self, message: str, step: int) -> None:
        self.step = step
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.step)


class ExportError(FuselabError, RuntimeError):
    """An exported model computes something else than the model; nothing was written."""


class OutputError(FuselabError, OSError):
    """A result could not be written (full disk, no permission); nothing half-written is left."""


class MissingDependencyError(FuselabError, ImportError):
    """An optional package or tool is not installed; says how to get it."""

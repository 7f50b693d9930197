"""Every error a user can meet: one sentence that says what is wrong and what to do about it.

Each class derives from ``FuselabError``, which the command line turns into that one sentence and
exit status 2, and from the built-in exception that eager PyTorch raises for the same mistake, so
that code which catches that one keeps working. Where eager raises several for what one class
covers, the class derives from each of them. docs/contract.md has the table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class FuselabError(Exception):
    """Base of every error that fuselab raises on purpose."""


class ArgumentError(FuselabError, ValueError):
    """An argument has a value the operator or verb cannot take."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of the wrong type, missing, unexpected or one too many."""


class NumberRangeError(ArgumentError, OverflowError):
    """A Python number is larger than the kernel's type holds."""


class DimensionError(ArgumentError, IndexError):
    """A ``dim`` lies outside the tensor's dimensions; names the range."""


class OperandError(ArgumentError, RuntimeError):
    """What the operator would compute with has no result; eager's kernels raise RuntimeError."""


class ShapeError(OperandError):
    """Tensor shapes do not fit the operator; names the argument and what was expected."""


class OverlapError(OperandError):
    """An operator would write over memory that another element or argument lies in."""


class LayoutError(OperandError, NotImplementedError):
    """A tensor is sparse, nested or quantized, which the operator has no kernel for."""


class IndexRangeError(FuselabError, IndexError):
    """An index lies outside the tensor it points into; names the index and where it stands."""


class DtypeError(FuselabError, TypeError, RuntimeError):
    """A tensor's dtype does not fit the operator; names the argument and what was expected."""


class UnsupportedDtypeError(DtypeError, NotImplementedError):
    """The operator has no kernel for a tensor's dtype; names those that it has."""


class DeviceError(FuselabError, RuntimeError):
    """Tensors lie on different devices, or the device a verb was asked for is not there."""


class UnknownNameError(FuselabError, ValueError, LookupError):
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


class TargetError(FuselabError, RuntimeError):
    """A TARGET cannot be loaded, has no inputs, or raised while it ran."""


class MissingTargetError(TargetError, FileNotFoundError):
    """The file of a TARGET does not exist."""


class DataError(FuselabError, ValueError):
    """A data file is malformed; names file, line, column and what was expected."""


class MissingDataError(DataError, FileNotFoundError):
    """A data file does not exist; names the path."""


class CheckpointError(FuselabError, ValueError):
    """A checkpoint is truncated, or of another model or version; names the file."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A checkpoint does not exist; names the path."""


class DivergenceError(FuselabError, ArithmeticError):
    """A training loss, weight or logit is NaN or infinite; names the step, as ``step`` does."""

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

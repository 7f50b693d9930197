"""Every error that fuselab raises; its message says what is wrong and what to do about it.

Each class derives from ``FuselabError``, which the command line turns into that message and exit
status 2, and from the built-in exception that eager PyTorch raises for the same mistake, so that
code which catches the built-in exception keeps working. Where eager PyTorch raises several
exceptions for the mistakes that one class covers, the class derives from each of them.
docs/contract.md has the table.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any


class FuselabError(Exception):
    """The base class of every error that fuselab raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # tblib, which Dask imports, otherwise makes an exception by __new__ of its first base,
        # which a class with several bases refuses.
        return type(self), self.args, vars(self)


class ArgumentError(FuselabError, ValueError):
    """An argument has a value that the operator or verb cannot take."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has the wrong type, is missing, is unexpected, or is one too many."""


class NumberRangeError(ArgumentError, OverflowError):
    """A Python number does not fit into the kernel's number type."""


class DimensionError(ArgumentError, IndexError):
    """A ``dim`` lies outside the tensor's dimensions; the message names the allowed range."""


class OperandError(ArgumentError, RuntimeError):
    """The operator cannot compute with this operand; eager's kernels raise RuntimeError for it."""


class ShapeError(OperandError):
    """A tensor's shape does not fit; the message names the argument and the expected shape."""


class OverlapError(OperandError):
    """An operator would overwrite memory that it shares with another element or argument."""


class LayoutError(OperandError, NotImplementedError):
    """A tensor is sparse, nested or quantized, and the operator has no kernel for that layout."""


class IndexRangeError(FuselabError, IndexError):
    """An index points outside its tensor; the message names the index and its position."""


class DtypeError(FuselabError, TypeError, RuntimeError):
    """A tensor's dtype does not fit; the message names the argument and the expected dtype."""


class UnsupportedDtypeError(DtypeError, NotImplementedError):
    """The operator has no kernel for a tensor's dtype; the message names the dtypes it supports."""


class DeviceError(FuselabError, RuntimeError):
    """Tensors are on different devices, or the device that a verb was asked for does not exist."""


def _by_number(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts sm_90 before sm_100."""
    parts = re.findall(r"(\d+)|(\D+)", name)
    return [(0, int(digits), "") if digits else (1, 0, text) for digits, text in parts]


class UnknownNameError(FuselabError, ValueError, LookupError):
    """No operator, activation, implementation, provider, case or model has the given name."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known, key=_by_number)
        close = difflib.get_close_matches(str(name), self.known, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        super().__init__(
            f"unknown {kind} '{name}'; known: {', '.join(self.known) or 'none'}.{hint}"
        )

    # Exception's own pickling would call __init__ with the finished message only.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.name, self.known)


class UnsupportedError(FuselabError, RuntimeError):
    """The implementation asked for by name cannot run these inputs; the message says why."""


class DifferentiationError(FuselabError, RuntimeError):
    """A gradient was asked for where none is defined."""


class BuildError(FuselabError, RuntimeError):
    """A kernel did not compile or load; ``log`` holds the compiler's output."""

    def __init__(self, message: str, log: str = "") -> None:
        self.log = log
        super().__init__(message)


class LaunchError(FuselabError, RuntimeError):
    """A built kernel did not launch; the message names the CUDA error, the grid and the block."""


class ContractError(FuselabError, TypeError):
    """A ``FusedOp`` does not meet the contract; the message names the field."""


class TargetError(FuselabError, RuntimeError):
    """A TARGET cannot be loaded, has no inputs, or raised while it ran."""


class MissingTargetError(TargetError, FileNotFoundError):
    """The file of a TARGET does not exist."""


class EjectError(FuselabError, RuntimeError):
    """A function cannot become a kernel package; the message names the operation and the line."""


class DataError(FuselabError, ValueError):
    """A data file is malformed; the message names file, line, column and what was expected."""


class MissingDataError(DataError, FileNotFoundError):
    """A data file does not exist; the message names the path."""


class CheckpointError(FuselabError, ValueError):
    """A checkpoint is truncated, or belongs to another model or version; the message names it."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A checkpoint does not exist; the message names the path."""


class DivergenceError(FuselabError, ArithmeticError):
    """A training loss, weight or logit is NaN or infinite; ``step`` is the step at which it was."""

    def __init__(self, message: str, step: int) -> None:
        self.step = step
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.step)


class ExportError(FuselabError, RuntimeError):
    """An exported model computes something other than the model; nothing was written."""


class OutputError(FuselabError, OSError):
    """A result could not be written (full disk, no permission); no partial file is left behind."""


class MissingDependencyError(FuselabError, ImportError):
    """An optional package or tool is not installed; says how to get it."""

    @classmethod
    def of_extra(cls, use: str, package: str, extra: str) -> MissingDependencyError:
        """Return the error for a missing ``package``, which fuselab's ``extra`` installs.

        ``use`` names what needs the package, its verb included: ``"plots need"``.
        """
        return cls(f"{use} {package}, which is not installed; pip install 'fuselab[{extra}]'.")


def summary(error: BaseException, most: int | None = None) -> str:
    """Return an error's class and the first line of its message, of at most ``most`` characters."""
    lines, kind = str(error).strip().splitlines(), type(error).__name__
    return f"{kind}: {lines[0][:most]}" if lines else kind

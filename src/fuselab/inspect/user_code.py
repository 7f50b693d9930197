"""The user's code seen from outside: which lines are the user's, and their text made printable."""

from __future__ import annotations

import functools
import inspect
import linecache
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

import fuselab
from fuselab.errors import FuselabError, TargetError

_FUSELAB = str(Path(fuselab.__file__).resolve().parent)
# Built-in models are treated like a user's model, so findings inside them show their lines.
_SHOWN_FUSELAB = (f"{_FUSELAB}/models/", f"{_FUSELAB}/nn/")
_FOREIGN = tuple(
    f"{path}/"
    for path in {
        str(Path(torch.__file__).resolve().parent),
        str(Path(torch.__file__).parent),
        _FUSELAB,
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)


@dataclass(frozen=True, order=True)
class SourceLine:
    """One line of the user's source."""

    file: str
    line: int

    def __str__(self) -> str:
        """Return file name and line number, short enough for a table: ``model.py:12``."""
        return f"{Path(self.file).name}:{self.line}"

    @property
    def text(self) -> str:
        """The line as it stands in the file, stripped; empty if the file cannot be read."""
        return plain(linecache.getline(self.file, self.line))


def short_names(lines: Iterable[SourceLine]) -> dict[SourceLine, str]:
    """Return a short name for each line: ``model.py:12``, and with as many folders before it as
    tell files of one name apart."""
    found = dict.fromkeys(lines)
    names = {}
    paths = {line.file: Path(line.file).parts for line in found}
    for line in found:
        mine = paths[line.file]
        kept = 1
        others = [parts for file, parts in paths.items() if file != line.file]
        while kept < len(mine) and any(parts[-kept:] == mine[-kept:] for parts in others):
            kept += 1
        names[line] = plain(f"{'/'.join(mine[-kept:])}:{line.line}")
    return names


# The code that runs a TARGET; callers above this file on the stack are not the user's.
_RUNS_TARGETS = f"{_FUSELAB}/inspect/profile.py"

_claimed: set[str] = set()


def claim_file(path: str) -> None:
    """Treat a TARGET's file as the user's wherever it lies, for example in an installed package."""
    _claimed.add(path)
    is_user_file.cache_clear()


@functools.cache
def is_user_file(path: str) -> bool:
    """Return whether a source file is the user's.

    Files of the standard library, installed packages and torch are not; of fuselab only the models
    and modules are.
    """
    if not path or path.startswith("<"):
        return False
    shown = path.startswith(_SHOWN_FUSELAB) or path in _claimed
    return shown or not path.startswith(_FOREIGN)


def user_line(frame: FrameType | None) -> SourceLine | None:
    """Return the innermost line of the user's code on the stack that ends in ``frame``."""
    while frame is not None and frame.f_code.co_filename != _RUNS_TARGETS:
        if is_user_file(frame.f_code.co_filename):
            return SourceLine(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def raising_line(error: BaseException) -> SourceLine | None:
    """Return the innermost line of the user's code that ``error`` passed through."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return SourceLine(error.filename, error.lineno)
    found = None
    tracebacks: TracebackType | None = error.__traceback__
    for frame, line in traceback.walk_tb(tracebacks):
        if is_user_file(frame.f_code.co_filename):
            found = SourceLine(frame.f_code.co_filename, line)
    return found


def plain(text: object, width: int = 200) -> str:
    """Return the user's text as one printable line of at most ``width`` characters.

    A control character (a newline, a terminal escape) becomes a space, and runs of spaces one
    space.
    """
    printable = "".join(c if c.isprintable() else " " for c in str(text))
    line = " ".join(printable.split())
    return line if len(line) <= width else line[: width - 1] + "…"


@contextmanager
def raising_target_error(sentence: str) -> Iterator[None]:
    """Turn what the user's code raises into a TargetError that says ``sentence`` and the error.

    Errors of fuselab pass.
    """
    try:
        yield
    except FuselabError:
        raise
    except Exception as error:
        raise TargetError(f"{sentence} {describe_error(error)}.") from error


def describe_error(error: BaseException) -> str:
    """Describe an error on one line: ``ValueError: the message (model.py:12)``."""
    line = raising_line(error)
    words = plain(error.msg if isinstance(error, SyntaxError) else error).rstrip(".")
    where = f" ({line})" if line else ""
    return f"{type(error).__name__}{': ' if words else ''}{words}{where}"


def check_arguments(
    function: Callable[..., Any],
    name: str,
    offer: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Refuse arguments that do not fit the signature, before they raise deep inside.

    ``offer`` says where the arguments come from, and ``name`` which callable takes them. Raises
    TargetError.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # the callable has no signature, for example a builtin
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        fits = plain(f"{name}{signature}")
        raise TargetError(f"{offer} does not fit {fits}: {plain(error)}.") from error

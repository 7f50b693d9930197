"""Stops and prints on lines of interpreted kernels: pdb, or values without stopping."""

from __future__ import annotations

import bdb
import contextlib
import linecache
import pdb
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any

from fuselab.inspect.debugger.offsets import program_name
from fuselab.inspect.debugger.recorder import Wanted, program

_MISSING = object()


class _Debugger(pdb.Pdb):
    """pdb with a stop on one line, in the programs that were asked for."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(nosigint=True, skip=["triton.*", "numpy.*", "torch.*"])
        self.prompt = "(debug) "
        self._wanted = wanted

    def break_here(self, frame: FrameType) -> bool:
        return bool(super().break_here(frame)) and self._wanted(program())

    def user_line(self, frame: FrameType) -> None:
        self.message(
            f"program {program_name(program())}, {frame.f_code.co_name}, line {frame.f_lineno}"
        )
        super().user_line(frame)


def stopping(file: str, line: int, wanted: Wanted, function: Callable[[], Any]) -> bool:
    """Call ``function`` and stop in pdb whenever a wanted program comes to that line.

    Returns whether it ran to its end; the user may quit.
    """
    debugger = _Debugger(wanted)
    debugger.reset()
    debugger.set_break(file, line)
    # Nothing before the line is stopped at: as if the user had said "continue" here.
    debugger.botframe = sys._getframe()
    debugger.set_continue()
    sys.settrace(debugger.trace_dispatch)
    try:
        function()
    except bdb.BdbQuit:
        return False
    except Exception as error:
        if isinstance(error.__cause__ or error.__context__, bdb.BdbQuit):
            return False  # the interpreter wraps what a kernel raises
        raise
    finally:
        sys.settrace(None)
    return True


def _is_interpreted(frame: FrameType | None) -> bool:
    """Return whether a function runs in a kernel: below Triton's interpreter."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "triton.runtime.interpreter":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def printing(
    files: Collection[str],
    names: Sequence[str],
    line: int | None,
    wanted: Wanted,
    say: Callable[[str], None],
) -> Iterator[list[dict[str, Any]]]:
    """Print the named variables of kernels inside, without stopping.

    With ``line`` they are printed before that line runs, else whenever one has a new value. Yields
    what was printed.
    """
    printed: list[dict[str, Any]] = []
    before: dict[tuple[int, str], Any] = {}

    def show(frame: FrameType, name: str, value: Any, where: int) -> None:
        ids = program()
        text = str(value).replace("\n", "\n    ")
        source = linecache.getline(frame.f_code.co_filename, where).strip()
        printed.append({"program": list(ids), "line": where, "name": name, "value": str(value)})
        head = f"program {program_name(ids)}, line {where}: {source}"
        say(f"{textwrap.shorten(head, 80, placeholder=' …')}\n    {name} = {text}")

    last: dict[int, int] = {}

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "call" and not _is_interpreted(frame):
            return None  # the function that launches the kernel
        if event not in ("line", "return", "call") or not wanted(program()):
            return watch
        if event == "line" and line is not None and frame.f_lineno == line:
            for name in names:
                if name in frame.f_locals:
                    show(frame, name, frame.f_locals[name], line)
        if line is None:
            for name in names:
                value = frame.f_locals.get(name, _MISSING)
                key = id(frame), name
                if value is not _MISSING and before.get(key, _MISSING) is not value:
                    before[key] = value
                    show(frame, name, value, last.get(id(frame), frame.f_lineno))
        last[id(frame)] = frame.f_lineno
        if event == "return":
            last.pop(id(frame), None)
            for name in names:
                before.pop((id(frame), name), None)
        return watch

    sys.settrace(watch)
    try:
        yield printed
    finally:
        sys.settrace(None)

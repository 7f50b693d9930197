"""End the named ranges that are still open when a profiler stops.

torch's profiler keeps a pointer to the event of every open range and writes the time of its end
there, also if that profiler has stopped and another one runs by then (torch 2.13,
``torch/csrc/autograd/profiler_kineto.cpp``, ``onFunctionExit``). The event's memory is free then,
so that the write corrupts the heap: a script whose optimizer's range was open ended by SIGSEGV.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch.profiler import record_function


class OpenRanges:
    """The ``record_function`` ranges that this thread has opened within the ``with`` block and not
    closed yet. At its end they are closed, innermost first; the code that opened them then closes
    them in vain."""

    def __enter__(self) -> OpenRanges:
        self._open: list[record_function] = []
        self._thread = threading.get_ident()
        self._enter, self._exit = record_function.__enter__, record_function.__exit__
        enter, leave = self._enter, self._exit

        @functools.wraps(enter)
        def enter_noted(range_: record_function) -> Any:
            entered = enter(range_)
            if threading.get_ident() == self._thread:
                self._open.append(range_)
            return entered

        @functools.wraps(leave)
        def leave_noted(range_: record_function, *error: Any) -> Any:
            if range_ in self._open:
                self._open.remove(range_)
            return leave(range_, *error)

        record_function.__enter__ = enter_noted  # type: ignore[method-assign]
        record_function.__exit__ = leave_noted  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        record_function.__enter__ = self._enter  # type: ignore[method-assign]
        record_function.__exit__ = self._exit  # type: ignore[method-assign]
        for range_ in reversed(self._open):
            range_.__exit__(None, None, None)
            range_.run_callbacks_on_exit = False
        self._open.clear()

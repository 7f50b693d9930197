"""The protocol of timers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Call = Callable[[], object]


class Timer(Protocol):
    """A timer of one warmed callable on one device.

    ``sample()`` returns microseconds per call, the mean over ``calls`` calls. ``method`` describes
    how, and is complete once a sample was taken. ``page_faults_per_call`` is the mean so far, or
    None where page faults are not counted.
    """

    calls: int

    def sample(self) -> float: ...

    @property
    def method(self) -> str: ...

    @property
    def page_faults_per_call(self) -> float | None: ...

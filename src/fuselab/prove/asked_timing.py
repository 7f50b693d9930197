"""Procedures for either process: calls that the judge times from outside.

A process keeps one set of arguments. Every call finds another number in them, so that no result of
an earlier call is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass
class Kept:
    """The function that this process calls, its arguments, and the outputs of the last call."""

    function: Callable[..., Any] | None = None
    args: list[Any] = field(default_factory=list)
    output: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Change:
    """Two numbers that calls take turns to write into element ``index`` of the argument at
    ``place``; -1 as the place changes nothing."""

    place: int = -1
    index: int = 0
    numbers: tuple[float, float] = (0.0, 0.0)

    def write(self, args: Sequence[Any], turn: int) -> None:
        """Write the number of this turn."""
        if self.place >= 0:
            args[self.place].view(-1)[self.index] = self.numbers[turn % 2]

    @property
    def plain(self) -> tuple[int, int, tuple[float, float]]:
        """The change as a message holds it."""
        return self.place, self.index, self.numbers


_kept = Kept()


def prepare(held: Callable[..., Any], args: Sequence[Any], compiled: bool) -> None:
    """Keep the arguments of the calls that will be timed, and make the first call."""
    _kept.function = torch.compile(held.model) if compiled else held  # type: ignore[attr-defined]
    _kept.args = list(args)
    _call()


def _call() -> None:
    assert _kept.function is not None
    with torch.no_grad():
        returned = _kept.function(*_kept.args)
    _kept.output, _ = pytree.tree_flatten(returned)


def calls(held: Any, count: int, change: tuple[int, int, tuple[float, float]]) -> None:
    """Call ``count`` times, with another number in the arguments each time."""
    numbers = Change(*change)
    for turn in range(count):
        numbers.write(_kept.args, turn)
        _call()


def no_calls(held: Any, count: int, change: tuple[int, int, tuple[float, float]]) -> None:
    """Do what ``calls`` does without calling."""
    numbers = Change(*change)
    for turn in range(count):
        numbers.write(_kept.args, turn)


def last_output(held: Any) -> list[Any]:
    """Return the outputs of the last call."""
    return [one.detach() if type(one) is Tensor else one for one in _kept.output]

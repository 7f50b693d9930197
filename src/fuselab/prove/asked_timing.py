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

PlainChange = tuple[int, tuple[int, ...], tuple[float, float]]  # as a message holds a change


@dataclass
class Kept:
    """The function that this process calls, its arguments, and the outputs of the last call."""

    function: Callable[..., Any] | None = None
    args: list[Any] = field(default_factory=list)
    output: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Change:
    """Two numbers that calls write by turns into the argument at ``place``: into its element at
    ``indices``, or where these are two, into both, the second getting the other number. -1 as the
    place changes nothing."""

    place: int = -1
    indices: tuple[int, ...] = ()
    numbers: tuple[float, float] = (0.0, 0.0)

    def write(self, args: Sequence[Any], turn: int) -> None:
        """Write the numbers of this turn."""
        for step, index in enumerate(self.indices):
            args[self.place].view(-1)[index] = self.numbers[(turn + step + 1) % 2]

    @property
    def plain(self) -> PlainChange:
        """The change as a message holds it."""
        return self.place, self.indices, self.numbers


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


def calls(held: Any, count: int, change: PlainChange) -> None:
    """Call ``count`` times, with another number in the arguments each time."""
    numbers = Change(*change)
    for turn in range(count):
        numbers.write(_kept.args, turn)
        _call()


def no_calls(held: Any, count: int, change: PlainChange) -> None:
    """Do what ``calls`` does without calling."""
    numbers = Change(*change)
    for turn in range(count):
        numbers.write(_kept.args, turn)


def last_output(held: Any) -> list[Any]:
    """Return the outputs of the last call."""
    return [one.detach() if type(one) is Tensor else one for one in _kept.output]

"""Procedures for either process: calls that the judge times from outside.

A process keeps one set of arguments. Every call finds another number in them, so that no result of
an earlier call is right, whichever of them it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuselab.runtime.dispatch.overlap import overlaps_itself

PlainChange = tuple[int, tuple[int, ...], tuple[float, ...], bool]  # as a message holds a change
_GOLDEN_RATIO = (math.sqrt(5.0) - 1.0) / 2.0  # its multiples modulo 1 do not come back


@dataclass
class Kept:
    """The function that this process calls, its arguments, and the outputs of the last call."""

    function: Callable[..., Any] | None = None
    args: list[Any] = field(default_factory=list)
    output: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Change:
    """A change of the argument at ``place`` (-1: none) before every call, so that no call finds
    what an earlier one has found.

    A call writes a number between the two of ``numbers`` into an element of ``indices``, which take
    turns. Where it ``swaps``, the elements at a pair of ``indices``, which hold ``numbers`` at
    first, change places or change back; of n pairs all 2^n combinations come up before one returns.
    The same turns from 0 on leave the same elements, however often they are made.
    """

    place: int = -1
    indices: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()
    swaps: bool = False

    @torch.no_grad()
    def write(self, args: Sequence[Any], turn: int) -> None:
        """Make the change of this turn."""
        if not self.indices:
            return
        elements = args[self.place].view(-1)
        if not self.swaps:
            elements[self.indices[turn % len(self.indices)]] = self._number(turn)
            return
        pairs, state = len(self.indices) // 2, (turn + 1) ^ ((turn + 1) >> 1)  # a Gray code's
        changed = min(((turn + 1) & -(turn + 1)).bit_length(), pairs) - 1  # the bit that changed
        for pair in range(pairs) if turn == 0 else (changed,):
            first, second = self.indices[2 * pair : 2 * pair + 2]
            numbers = self.numbers[2 * pair : 2 * pair + 2]
            elements[first], elements[second] = numbers[:: -1 if state >> pair & 1 else 1]

    def _number(self, turn: int) -> float:
        low, high = self.numbers
        share = (turn + 1) * _GOLDEN_RATIO % 1.0
        between = low + share * (high - low)
        return between if math.isfinite(between) else self.numbers[turn % 2]

    @property
    def plain(self) -> PlainChange:
        """The change as a message holds it."""
        return self.place, self.indices, self.numbers, self.swaps


_kept = Kept()


def prepare(held: Callable[..., Any], args: Sequence[Any], compiled: bool) -> None:
    """Keep the arguments of the calls that will be timed, and make the first call."""
    _kept.function = torch.compile(held.model) if compiled else held  # type: ignore[attr-defined]
    _kept.args = list(args)
    _call()


@torch.no_grad()
def renew(held: Any, args: Sequence[Any]) -> None:
    """Keep other arguments for the calls that follow, in the memory of those before where they fit:
    a result that is kept for a tensor, and not for its values, shows."""
    for place, (before, now) in enumerate(zip(_kept.args, args, strict=True)):
        if (
            isinstance(before, Tensor)
            and (before.shape, before.stride()) == (now.shape, now.stride())
            and not overlaps_itself(before)
        ):
            before.copy_(now)
        else:
            _kept.args[place] = now


def _call() -> None:
    assert _kept.function is not None
    with torch.no_grad():
        returned = _kept.function(*_kept.args)
    _kept.output, _ = pytree.tree_flatten(returned)


def calls(held: Any, count: int, change: PlainChange) -> None:
    """Call ``count`` times, with numbers in the arguments that no earlier call has found."""
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

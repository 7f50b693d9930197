"""Procedures for either process: calls that the judge times from outside.

A process keeps one set of arguments, or many that are mixed of two. Every call finds another number
in them, so that no result of an earlier call is right, whichever of them it is. Of mixed ones it
finds others in every row.
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
MIXTURES = 1 << 16  # places at which a mask may begin
_GOLDEN_RATIO = (math.sqrt(5.0) - 1.0) / 2.0  # its multiples modulo 1 do not come back


class Mixture:
    """Arguments of which every floating element is one of two, by chance: as many sets of inputs as
    there are places in the ``mask`` to begin at.

    No element has a number that neither of the two sets has there, and no row stays as it was.
    """

    def __init__(self, args: Sequence[Any], others: Sequence[Any], seed: int) -> None:
        pairs = zip(args, others, strict=True)
        self.args, self.others = list(args), list(others)
        self.places = [place for place, pair in enumerate(pairs) if _mixes(*pair)]
        self.numel = max((args[place].numel() for place in self.places), default=0)
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(0, 2, (self.numel + MIXTURES,), dtype=torch.uint8, generator=generator)
        self.mask = bits.bool()

    def nbytes(self) -> int:
        """Return the bytes of what is mixed in one set of inputs."""
        return sum(int(self.args[place].nbytes) for place in self.places)

    def inputs(self, start: int) -> list[Any]:
        """Return the inputs that are mixed by the mask from ``start`` on."""
        found = list(self.args)
        for place in self.places:
            one, other = self.args[place], self.others[place]
            mask = self.mask[start : start + one.numel()].view(one.shape).to(one.device)
            found[place] = torch.where(mask, one, other)
        return found


def _mixes(one: Any, other: Any) -> bool:
    return (
        isinstance(one, Tensor)
        and one.is_floating_point()
        and one.numel() > 0
        and one.is_contiguous()
        and other.is_contiguous()
        and one.shape == other.shape
        and not torch.equal(one, other)
    )


@dataclass
class Kept:
    """The function that this process calls, its arguments, what is mixed into sets of them, and the
    outputs of the last call."""

    function: Callable[..., Any] | None = None
    args: list[Any] = field(default_factory=list)
    mixture: Mixture | None = None
    sets: list[list[Any]] = field(default_factory=list)
    output: list[Any] = field(default_factory=list)

    def at(self, turn: int) -> list[Any]:
        """Return the arguments of this turn."""
        return self.sets[turn % len(self.sets)] if self.sets else self.args


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
    _kept.args, _kept.mixture, _kept.sets = list(args), None, []
    _call(_kept.args)


def keep_mixture(held: Any, others: Sequence[Any], seed: int) -> None:
    """Keep a mixture of the arguments with others."""
    _kept.mixture = Mixture(_kept.args, others, seed)


def mix(held: Any, starts: Sequence[int]) -> None:
    """Keep sets of arguments for the calls that follow, which take turns."""
    assert _kept.mixture is not None
    _kept.sets = [_kept.mixture.inputs(start) for start in starts]


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


def _call(args: Sequence[Any]) -> None:
    assert _kept.function is not None
    with torch.no_grad():
        returned = _kept.function(*args)
    _kept.output, _ = pytree.tree_flatten(returned)


def calls(held: Any, count: int, change: PlainChange, seed: int | None = None) -> None:
    """Call ``count`` times, with numbers in the arguments that no earlier call has found, and after
    a seed of PyTorch's generator, unless that is None."""
    numbers = Change(*change)
    for turn in range(count):
        args = _kept.at(turn)
        numbers.write(args, turn)
        _sow(seed)
        _call(args)


def no_calls(held: Any, count: int, change: PlainChange, seed: int | None = None) -> None:
    """Do what ``calls`` does without calling."""
    numbers = Change(*change)
    for turn in range(count):
        numbers.write(_kept.at(turn), turn)
        _sow(seed)


def _sow(seed: int | None) -> None:
    if seed is not None:
        torch.manual_seed(seed)


def last_output(held: Any) -> list[Any]:
    """Return the outputs of the last call."""
    return [one.detach() if type(one) is Tensor else one for one in _kept.output]

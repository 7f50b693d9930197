"""The judge's clock: calls in another process, timed from outside of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fuselab.prove import asked_timing
from fuselab.prove.arguments import Storages, copy_of_storage, mapped
from fuselab.prove.asked_timing import Change
from fuselab.prove.held import RemoteError
from fuselab.prove.processes import Process
from fuselab.runtime.dispatch.overlap import overlaps_itself

# What taking outputs may cost more in the timed process than in the one beside it.
_DEARER = 1.25
# Elements that calls change by turns, or pairs of them: 16 of them hold 2^16 combinations and more.
_CHANGED = 16
_NEAR = 2  # elements in which inputs differ from others that are near
_DEARER_S = 1e-4
_SWAPS = 64  # pairs of elements that are tried


@dataclass
class Clock:
    """The times of one process's calls, and what taking its outputs costs.

    A question without a call is timed beside every one with calls, and subtracted. The process
    ``beside`` answers it, which holds the reference and the same arguments, because a candidate
    that delays its own answer would get the delay as a present. While another process is timed,
    the timed one stands still, so that no thread of it goes on working or takes the other's cores.
    """

    process: Process
    beside: Process
    call_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)  # how much longer the first taking takes
    renewal_s: list[float] = field(default_factory=list)  # how much longer new arguments take

    def ask(self, change: Change, count: int = 1, seed: int | None = None) -> float:
        """Return the seconds that ``count`` calls, after a ``seed`` if there is one, take more than
        a question without a call; the process stands still before and, until its outputs are
        taken, after."""
        self._pause()
        asked = (count, change.plain, seed)
        empty, _ = timed(lambda: self.beside.ask(asked_timing.no_calls, *asked))
        self.process.resume()
        whole, _ = timed(lambda: self.process.ask(asked_timing.calls, *asked))
        return whole - empty

    def renew(self, args: Sequence[Any], usual_s: float) -> None:
        """Give the process other arguments, and keep by how much it takes them later than the
        process beside, which took ``usual_s``: it could compute meanwhile."""
        self._take(usual_s, asked_timing.renew, list(args))

    def mix(self, starts: Sequence[int]) -> None:
        """Let both processes mix new sets of arguments, and keep by how much the one takes longer
        than the one beside."""
        usual_s, _ = timed(lambda: self.beside.ask(asked_timing.mix, list(starts)))
        self._take(usual_s, asked_timing.mix, list(starts))

    def _take(self, usual_s: float, procedure: Callable[..., Any], *args: Any) -> None:
        self.process.resume()
        taken_s, _ = timed(lambda: self.process.ask(procedure, *args))
        self._pause()
        self.renewal_s.append(taken_s - (usual_s * _DEARER + _DEARER_S))

    def call(self, change: Change, seed: int | None = None) -> None:
        """Time one call."""
        self.call_s.append(max(self.ask(change, seed=seed), 1e-7))

    def taken(self) -> list[Any]:
        """Take the outputs of the last call, twice, and keep by how much the first time is
        longer: than the second, or than outputs of the same size from the process beside, where
        the second is much longer than those."""
        first, found = timed(lambda: self.process.ask(asked_timing.last_output))
        usual, _ = timed(lambda: self.process.ask(asked_timing.last_output))
        if self.beside is not self.process:
            self._pause()
            other, _ = timed(lambda: self.beside.ask(asked_timing.last_output))
            usual = min(usual, other * _DEARER + _DEARER_S)
        self.late_s.append(first - usual)
        results: list[Any] = found
        return results

    def rest(self) -> None:
        """Let the process stand still until it is timed again."""
        self._pause()

    def _pause(self) -> None:
        if self.beside is not self.process:
            self.process.pause()

    @property
    def late(self) -> float:
        """The seconds by which outputs come later than the call said, and new arguments are taken
        later than beside, in the median of each."""
        return sum(max(0.0, median(some)) for some in (self.late_s, self.renewal_s) if some)

    @property
    def times_us(self) -> list[float]:
        return [(one + self.late) * 1e6 for one in self.call_s]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that ``work`` takes, and what it returns."""
    begin = time.perf_counter()
    found = work()
    return time.perf_counter() - begin, found


def own_copies(args: Sequence[Any]) -> list[Any]:
    """Return the arguments with tensors copied, so that the judge can change them too."""
    known: Storages = {}
    return mapped(
        lambda one: copy_of_storage(one, known) if isinstance(one, Tensor) else one, list(args)
    )


def near_inputs(
    args: Sequence[Any], others: Sequence[Any], chance: random.Random
) -> list[Any] | None:
    """Return ``args`` with a few elements of one floating argument taken from the same places of
    ``others``, so that zeros which both have stay; None where no element may differ.

    A symmetric matrix stays as it is, because one with a single other element is none.
    """
    near = own_copies(args)
    for place in _changeable(args, others, chance):
        differing = (args[place] != others[place]).nonzero().tolist()
        for where in chance.sample(differing, min(_NEAR, len(differing))):
            near[place][tuple(where)] = others[place][tuple(where)]
        if differing:
            return near
    return None


def _changeable(args: Sequence[Any], others: Sequence[Any], chance: random.Random) -> list[int]:
    """Return the places of floating arguments of the others' shapes, in an order by chance."""
    changeable = [
        place
        for place, (one, other) in enumerate(zip(args, others, strict=True))
        if isinstance(one, Tensor)
        and one.is_floating_point()
        and one.shape == other.shape
        and not (one.ndim > 1 and one.shape[-1] == one.shape[-2] and torch.equal(one, one.mT))
    ]
    chance.shuffle(changeable)
    return changeable


def swapped_inputs(args: Sequence[Any], chance: random.Random) -> list[Any] | None:
    """Return ``args`` with two elements of a row of one floating argument in each other's place:
    equal sums, and other results. None where no row has two that differ; a zero stays where it is.

    Of several such pairs one is taken whose exchange leaves every bit of PyTorch's sum.
    """
    swapped = own_copies(args)
    for place in _changeable(args, args, chance):
        tensor = swapped[place]
        if not tensor.numel() or not tensor.ndim or overlaps_itself(tensor):
            continue
        total, pair = tensor.sum(), None
        for _ in range(_SWAPS):
            row = tensor[tuple(chance.randrange(size) for size in tensor.shape[:-1])]
            first, second = (chance.randrange(len(row)) for _ in range(2))
            if not row[first] or not row[second] or row[first] == row[second]:
                continue
            pair = row, [first, second]
            _swap(*pair)
            if torch.equal(tensor.sum(), total):
                return swapped
            _swap(*pair)
        if pair is not None:
            _swap(*pair)
            return swapped
    return None


def _swap(row: Tensor, places: list[int]) -> None:
    row[places] = row[places[::-1]]


def drawn_change(
    args: Sequence[Any], chance: random.Random, runs: Callable[[Sequence[Any]], bool]
) -> Change:
    """Return a change of one argument that leaves it valid, or none where there is no such one.

    Elements of a floating argument get numbers between two of its own. Where no argument is
    floating, pairs of elements of an integer one change places, unless the reference no longer
    ``runs`` on the arguments when all have (offsets have an order).
    """
    changeable = [
        (place, one)
        for place, one in enumerate(args)
        if isinstance(one, Tensor)
        and one.dtype not in (torch.bool, torch.complex64, torch.complex128)
        and one.is_contiguous()
        and one.numel() > 1
    ]
    floating = [(place, one) for place, one in changeable if one.is_floating_point()]
    if not changeable:
        return Change()
    place, tensor = chance.choice(floating or changeable)
    flat = tensor.detach().view(-1)
    if floating:
        numbers = [flat[chance.randrange(flat.numel())].item() for _ in range(2)]
        indices = [chance.randrange(flat.numel()) for _ in range(_CHANGED)]
        return Change(place, tuple(indices), tuple(numbers))
    indices = chance.sample(range(flat.numel()), 2 * min(_CHANGED, flat.numel() // 2))
    change = Change(place, tuple(indices), tuple(flat[indices].tolist()), swaps=True)
    changed = own_copies(args)
    swapped = [index for pair in zip(indices[1::2], indices[::2], strict=True) for index in pair]
    changed[place].view(-1)[indices] = flat[swapped]
    return change if runs(changed) else Change()


def runs_at(process: Process, procedure: Callable[..., Any], *args: Any) -> bool:
    """Return whether a procedure raises nothing in a process that holds the reference."""
    try:
        process.ask(procedure, *args)
    except RemoteError:
        return False
    return True

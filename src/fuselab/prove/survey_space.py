"""The points of a survey: calls of realistic sizes and layouts, each determined by a seed and a
number.

A point has a target, the bytes that its call moves at least. The targets of consecutive numbers
spread evenly over the logarithm of the range, whatever their count. The operator's ``space``, or
else its ``draw``, is called with a ``SurveyDraw``, whose sizes grow with a scale while all other
decisions stay; the largest scale that keeps within the target is found on meta tensors.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fuselab.errors import FuselabError
from fuselab.op import Case, FusedOp, Inputs, dtype_name, tensors_in
from fuselab.prove.arguments import mapped
from fuselab.prove.draw import lay_out
from fuselab.runtime.dispatch.overlap import overlaps_itself

Element = TypeVar("Element")

LEAST_BYTES = 1_000
MOST_BYTES = {"cuda": 1_000_000_000, "cpu": 64_000_000}
# About 10 ms of matrix products: in 16 bits on an H200, in float32 on two cores of a server.
MOST_FLOPS = {"cuda": 4e12, "cpu": 1e9}
# Calls on a CPU that move less than this are judged by host time, warm: a cold one is mostly misses
# of the code that leads to the kernel.
TINY_BYTES = {"cuda": 0, "cpu": 64_000}
# A point needs about twenty times its bytes where a backward is verified, and a survey may share
# the device.
_MEMORY_SHARE = 25
# The memory of the arguments may be larger than the bytes that a call moves, since a lookup reads
# few rows of its tables: up to this many times as large, or up to this share of the largest call.
_MOST_STORAGE, _STORAGE_SHARE = 4, 0.25

STRIDED = ("odd offset", "padded rows", "transposed", "swapped", "every other row", "every other")
_STRIDED_SHARE = 0.3  # of the points; in such a point every tensor is strided with even chance
_KINDS = ("power of two", "multiple of 8", "any", "odd")
_KIND_WEIGHTS = (3, 3, 2, 2)
_LEAST_WEIGHT = 0.25  # of the scale that one size takes; the largest weight is 1
_MOST_SCALE = 48
_STEPS = 12  # halvings of the last step of the scale
_ATTEMPTS = 8
_NEAR_TARGET = 3.0
_GOLDEN = (5**0.5 - 1) / 2
META = torch.device("meta")


class SurveyDraw:
    """The implementation of ``fuselab.op.Draw`` that draws realistic calls.

    A size is ``2 ** (scale * weight)`` with a weight between 0.25 and 1, rounded to a power of two,
    a multiple of 8, any number or an odd one; it is never 0. Values are normal, or uniform
    integers. ``source`` decides everything but the values, with as many numbers at every scale;
    ``values`` seeds the values, and on the meta device there are none.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        source: random.Random,
        scale: float,
        values: torch.Generator | None = None,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.sizes = 0
        self._source, self._scale, self._values = source, scale, values
        self._is_strided = source.random() < _STRIDED_SHARE

    def size(self, *interesting: int) -> int:
        """Draw a dimension that grows with the scale; one of ``interesting`` where it is near."""
        self.sizes += 1
        weight = self._source.uniform(_LEAST_WEIGHT, 1)
        kind = self._source.choices(_KINDS, _KIND_WEIGHTS)[0]
        is_snapped = self._source.random() < 0.25
        size = 2 ** (self._scale * weight)
        near = [one for one in interesting if one and 0.5 <= one / size <= 2]
        if is_snapped and near:
            return min(near, key=lambda one: abs(math.log(one / size)))
        if kind == "power of two":
            return 1 << round(math.log2(size))
        if kind == "multiple of 8" and size >= 8:
            return round(size / 8) * 8
        return max(1, round(size)) | (kind == "odd")

    def shape(self, *interesting: int) -> tuple[int, ...]:
        """Draw a shape of one to three dimensions, the last of them by ``size(*interesting)``."""
        lead = [self.size() for _ in range(self.choice((1, 0, 2)))]
        return (*lead, self.size(*interesting))

    def choice(self, options: Sequence[Element]) -> Element:
        """Draw one of ``options``, each with the same chance."""
        return options[self._source.randrange(len(options))]

    def uniform(self, low: float, high: float) -> float:
        """Draw a float in [low, high]."""
        return self._source.uniform(low, high)

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw a tensor of normal values, contiguous or in one of ``STRIDED``."""
        dtype, seed = dtype or self.dtype, self._seed()
        if seed is None:
            values = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            generator = torch.Generator(self.device).manual_seed(seed)
            drawn = torch.float64 if dtype == torch.float64 else torch.float32
            values = torch.randn(shape, generator=generator, dtype=drawn, device=self.device)
        return lay_out(values.to(dtype), self._layout(), self.device)

    def integers(
        self, *shape: int, low: int, high: int, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Draw a tensor of uniform integers in [low, high), contiguous or in one of ``STRIDED``."""
        seed = self._seed()
        if seed is None:
            values = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            generator = torch.Generator(self.device).manual_seed(seed)
            values = torch.randint(low, high, shape, generator=generator, device=self.device)
        return lay_out(values.to(dtype), self._layout(), self.device, around=low)

    def _layout(self) -> str:
        layout, is_strided = self._source.choice(STRIDED), self._source.random() < 0.5
        return layout if self._is_strided and is_strided else "contiguous"

    def _seed(self) -> int | None:
        if self._values is None:
            return None
        return int(torch.randint(1 << 31, (), generator=self._values))


Draws = Callable[[SurveyDraw], Inputs]


@dataclass(frozen=True)
class Space:
    """The calls that a survey draws from: dtypes, and the most bytes and operations of a call."""

    dtypes: Sequence[torch.dtype]
    most_bytes: float
    most_flops: float
    tiny_bytes: int = 0

    def tags(self, moved: int) -> frozenset[str]:
        """Return the tags of a call that moves so many bytes: ``tiny`` below ``tiny_bytes``, where
        verdicts are by host time."""
        return frozenset({"tiny"} if moved < self.tiny_bytes else ())

    @classmethod
    def of(
        cls, op: FusedOp, device: torch.device, dtypes: Sequence[torch.dtype] | None = None
    ) -> Space:
        """Return the space of an operator on a device.

        Without ``dtypes`` it has the operator's, float64 only if there is no other. The memory of
        the device bounds the bytes.
        """
        narrow = [dtype for dtype in op.dtypes if dtype != torch.float64]
        most = min(MOST_BYTES[device.type], _memory_bytes(device) / _MEMORY_SHARE)
        kinds = tuple(dtypes or narrow or op.dtypes)
        return cls(kinds, most, MOST_FLOPS[device.type], TINY_BYTES[device.type])

    def target_bytes(self, seed: int, index: int) -> float:
        """Return the bytes that a point's call should move: a low-discrepancy sequence, so that any
        number of points covers the range evenly."""
        share = (random.Random(f"{seed}|target").random() + index * _GOLDEN) % 1
        return float(LEAST_BYTES * (self.most_bytes / LEAST_BYTES) ** share)


@dataclass(frozen=True)
class SurveyPoint:
    """One call of a survey. ``case`` makes its arguments, the values from the generator;
    ``moved_bytes`` is the least that the call reads and writes."""

    index: int
    dtype: torch.dtype
    case: Case
    moved_bytes: int

    @property
    def title(self) -> str:
        return f"{dtype_name(self.dtype)} {self.case.name}"


def point_of(op: FusedOp, space: Space, seed: int, index: int) -> SurveyPoint:
    """Return the point of a number; equal arguments give equal points, however many there are."""
    target = space.target_bytes(seed, index)
    start = random.Random(f"{seed}|dtype").randrange(len(space.dtypes))
    dtype = space.dtypes[(start + index) % len(space.dtypes)]
    best: tuple[float, _Sized] | None = None
    for attempt in range(_ATTEMPTS):
        sized = _sized(op, space, dtype, f"{seed}|{op.name}|{index}|{attempt}", target)
        if sized is None:
            continue
        share = max(sized.moved / target, sized.flops / space.most_flops)
        if best is None or share > best[0]:
            best = share, sized
        if share * _NEAR_TARGET >= 1:
            break
    if best is None:
        return _declared_case(op, dtype, index)
    sized = best[1]

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        draw = SurveyDraw(device, dtype, random.Random(sized.source), sized.scale, generator)
        return sized.draws(draw)

    return SurveyPoint(index, dtype, Case(sized.title, make, space.tags(sized.moved)), sized.moved)


@dataclass(frozen=True)
class _Sized:
    """A drawn call: the random source and the scale that repeat it, and its work."""

    draws: Draws
    source: str
    scale: float
    moved: int
    flops: int
    storage: int
    sizes: int
    title: str


def _sized(
    op: FusedOp, space: Space, dtype: torch.dtype, source: str, target: float
) -> _Sized | None:
    """Return the largest call of ``source`` that keeps within the target; None if none does."""
    draws = op.space or op.draw or _varied(op, random.Random(source))
    if draws is None:
        return None

    def at(scale: float) -> _Sized | None:
        found = _measured(op, draws, dtype, source, scale)
        within = found is not None and (
            found.moved <= target
            and found.flops <= space.most_flops
            and found.storage <= max(_MOST_STORAGE * target, _STORAGE_SHARE * space.most_bytes)
        )
        return found if within else None

    best, low = None, 0.0
    for step in range(_MOST_SCALE):
        found = at(float(step))
        if found is None and best is not None:
            break
        if found is not None:
            best, low = found, float(step)
            if not found.sizes:
                return best
    width = 1.0
    for _ in range(_STEPS if best is not None else 0):
        width /= 2
        found = at(low + width)
        if found is not None:
            best, low = found, low + width
    return best


def _measured(
    op: FusedOp, draws: Draws, dtype: torch.dtype, source: str, scale: float
) -> _Sized | None:
    """Return the call at a scale, drawn on the meta device; None where the operator refuses it."""
    draw = SurveyDraw(META, dtype, random.Random(source), scale)
    try:
        args = op.bind(draws(draw))
        _refuse(op, args)
    except (FuselabError, TypeError, ValueError, IndexError):
        return None
    # a rule that reads values cannot be asked without them
    except (RuntimeError, NotImplementedError):
        pass
    storage = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(args))
    moved, flops = storage, 0
    try:
        cost = op.cost(*args)
        moved, flops = cost.bytes_moved, max(cost.flops, _products(op, args))
    except FuselabError:
        return None
    except (RuntimeError, NotImplementedError):
        pass
    return _Sized(draws, source, scale, moved, flops, storage, draw.sizes, title_of(op, args))


def _products(op: FusedOp, args: Sequence[Any]) -> int:
    """Return the operations of the reference's matrix products and convolutions where the operator
    declares no cost: the default counts one for each element of the output."""
    if getattr(op.cost, "__func__", None) is not FusedOp._least_cost:
        return 0
    with FlopCounterMode(display=False) as counter:
        op.reference(*args)
    return int(counter.get_total_flops())


def _refuse(op: FusedOp, args: Sequence[Any]) -> None:
    """Raise what the operator or its reference raises for arguments that it does not take."""
    if any(map(overlaps_itself, op.mutated(args))):
        raise ValueError("an argument to be written over overlaps itself")
    op.validate(*args)


def _varied(op: FusedOp, source: random.Random) -> Draws | None:
    """Return a draw of one of the operator's cases with other sizes, for an operator without
    ``draw``; equal sizes stay equal. None if no case consists of floating tensors."""
    cases = []
    for case in op.cases:
        made = case.make(META, op.dtypes[0], torch.Generator().manual_seed(0))
        tensors = tensors_in((*made.args, *made.kwargs.values()))
        if tensors and all(one.is_floating_point() and one.numel() for one in tensors):
            cases.append(case)
    if not cases:
        return None
    chosen = cases[source.randrange(len(cases))]

    def draws(draw: SurveyDraw) -> Inputs:
        made = chosen.make(META, draw.dtype, torch.Generator().manual_seed(0))
        sizes: dict[int, int] = {1: 1}

        def again(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            shape = [sizes[size] if size in sizes else _new(size) for size in value.shape]
            return draw.tensor(*shape, dtype=value.dtype)

        def _new(size: int) -> int:
            sizes[size] = draw.size()
            return sizes[size]

        args = tuple(mapped(again, made.args))
        kwargs = dict(zip(made.kwargs, mapped(again, list(made.kwargs.values())), strict=True))
        if draw.device == META:
            op.reference(*op.bind(Inputs(args, kwargs)))
        return Inputs(args, kwargs)

    return draws


def _declared_case(op: FusedOp, dtype: torch.dtype, index: int) -> SurveyPoint:
    """Return one of the operator's own cases, in turn, where nothing can be drawn."""
    cases = [case for case in op.cases if "huge" not in case.tags] or list(op.cases)
    case = cases[index % len(cases)]
    args = op.bind(case.make(torch.device("cpu"), dtype, torch.Generator().manual_seed(0)))
    return SurveyPoint(index, dtype, case, op.cost(*args).bytes_moved)


def title_of(op: FusedOp, args: Sequence[Any]) -> str:
    """Return the arguments in short: shapes, a ``*`` behind those of tensors that are strided or do
    not begin their memory, and every value that is not the default."""
    words: list[str] = []
    for parameter, value in zip(op.signature.parameters.values(), args, strict=True):
        tensors = tensors_in((value,))
        if isinstance(value, Tensor):
            words.append(_shape(value))
        elif tensors:
            words.append(_sequence(tensors))
        elif value != parameter.default:
            text = f"{value:.3g}" if isinstance(value, float) else str(value)
            is_plain = isinstance(value, str)
            words.append(text if is_plain else f"{parameter.name}={text.removeprefix('torch.')}")
    return ", ".join(words)


def _sequence(tensors: Sequence[Tensor]) -> str:
    """Return the shapes of a sequence: all of up to three, else their number and the largest."""
    if len(tensors) > 3:
        largest = max(tensors, key=Tensor.numel)
        return f"[{len(tensors)} up to {_shape(largest)}]"
    return f"[{', '.join(map(_shape, tensors))}]"


def _shape(tensor: Tensor) -> str:
    text = "x".join(map(str, tensor.shape)) or "0d"
    return text if tensor.is_contiguous() and not tensor.storage_offset() else f"{text}*"


def _memory_bytes(device: torch.device) -> float:
    """Return all of the device's memory, whoever uses it now, so that points repeat."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

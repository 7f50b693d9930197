"""Generated inputs: drawn from a seed, replayed from a list of integers, shrunk when they fail.

Every decision (a size, a layout, a kind of values, the seed of the values) is one integer below a
bound. The list of those integers identifies the case: replaying it gives the same tensors, and
lowering its numbers gives simpler ones, since 0 is the simplest answer everywhere.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fuselab.errors import ArgumentError
from fuselab.op import dtype_name
from fuselab.prove.value_patterns import FINITE_PATTERNS, PATTERNS, patterned

Element = TypeVar("Element")

# Simplest first. 0 comes after the smallest sizes, because an empty tensor hides other faults.
_SIZES: tuple[int, ...] = (
    *(1, 2, 3, 5, 0, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257),
    *(511, 512, 513, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 8193, 16385),
)

# Numbers of elements above which faults have been found: indices in 12, 16 and 17 bits, grids that
# end at 65535, and sums that are split. Each is exceeded by the sizes drawn for it.
LARGE = (1 << 12, 1 << 16, 1 << 17, 1 << 20)
LARGEST_TURN = len(LARGE) - 1  # the first turn of a large draw that takes the last of them
_SMALL = (1, 2, 3, 5, 7)
# log2 of a number of elements up to which float32 counts one by one, and how many sixths of it the
# first drawn size has, the second one having the rest: what a kernel does above two sizes shows
# where both are exceeded at once.
VERY_LARGE_BITS = 24
_SIXTHS = (3, 6, 0, 4, 2)
_BOTH = 3  # the place that stands for the first two sizes, which are then both large
# The places behind it stand for the first two sizes too, one of them longer: how many of the 20
# bits of a million elements the first one has.
_LOPSIDED = (13, 7, 16, 4)
_TILE = 128
_UNITS = (64, 256, 1024, 4096)  # of which large sizes are multiples, if not by chance
# Sizes for which kernels have a path of their own: all small ones, which --quick takes too, those
# around powers of two and around multiples of 1000.
SMALL_SWEPT = 300
SWEPT = tuple(
    sorted(
        {*range(1, SMALL_SWEPT + 1)}
        | {(1 << bits) + step for bits in range(7, 14) for step in range(-4, 5)}
        | {1000 * number + step for number in range(1, 11) for step in (-1, 0, 1)}
    )
)

LAYOUTS = (
    "contiguous",
    "odd offset",
    "transposed",
    "padded rows",
    "padded outer",
    "swapped",
    "rotated",
    "every other",
    "every other row",
    "expanded",
    "expanded rows",
    "expanded middle",
    "one element",
    "gaps",
    "transposed gaps",
)
# Rows that begin one element behind each other, as ``Tensor.unfold``'s; never of what is written.
WINDOWS = "windows"
# Elements before the first one: a kernel's vectors may need addresses of 4 to 64 bytes.
_OFFSETS = (0, 1, 2, 3, 4, 8, 16)
# Strides beyond 16 bits, of few elements: not among LAYOUTS, because each takes megabytes.
FAR_LAYOUTS = ("contiguous", "far rows", "far elements")
FAR_STRIDE = (1 << 16) + 5
_MOST_FAR = 32  # rows or elements that lie so far from each other
SPECIAL_VALUES = (
    "zeros",
    "equal",
    "wide",
    "large negative",
    "subnormal",
    "one max",
    "infinities",
    "masked",
    "NaN",
)
VALUES = ("normal", *SPECIAL_VALUES)
_FINITE_VALUES = ("normal", "zeros", "equal", "wide", "subnormal", *FINITE_PATTERNS)

KEPT_NAMES = 2

# log2 of the largest magnitude of "wide" values: fp16 ends at 2^16, and products must not overflow.
_WIDE_EXPONENT = {torch.float16: 5, torch.bfloat16: 20, torch.float32: 20, torch.float64: 40}

# log2 of the factor by which a loss may be scaled, up or down.
_SCALE_EXPONENT = {torch.float16: 6, torch.bfloat16: 12, torch.float32: 12, torch.float64: 12}

# The largest number of "one max". Where the square of a float64 overflows on the way to a result
# that is finite, no wider dtype shows what is right; this one's square does not.
_LARGEST_FLOAT64 = 2.0**500


# The most elements of a drawn tensor. The sizes' product is bounded, but an operator may use one
# size for two dimensions.
MOST_ELEMENTS = 1 << 24
# The most normal numbers that are drawn for a tensor; a larger one repeats them. A prime, so that
# no row, block or power of two has the same numbers as another one.
_MOST_RANDOM = 4_194_301


class TooLargeError(ArgumentError):
    """A tensor that was drawn is too large for a trial."""


@dataclass
class RecordedDraw:
    """A replayable implementation of ``fuselab.op.Draw``.

    ``replay`` is a recorded list of choices (missing ones are 0); ``source`` draws the choices when
    ``replay`` is None. At most one tensor of a case holds a largest number, because the order of
    additions decides where two of them overflow or cancel, and any order is right. ``max_numel``
    bounds the product of the drawn sizes. ``turn`` chooses layouts and values in turn instead of by
    chance: each one except the first is given to the first tensor only, then to the second, to the
    third, and to all of them, so that a few dozen turns cover every one; an upstream gradient has
    in every turn the layout whose turn it is. ``names``, a separate
    generator, keeps only ``KEPT_NAMES`` options of a choice between strings (such as an
    activation's name), because each compiles its own kernels and a quick run has time for few.
    Where ``large`` inputs have values in turn, their sizes and layouts are left to chance.
    ``large`` makes one drawn size exceed a number of ``LARGE`` (of the last one, the product of
    the sizes does), or the product of the first two, and the others small; of the first ``large``
    numbers one is taken, and no size exceeds ``largest_size``. With ``small``, all sizes are below
    10. With ``swept``, one size is of ``SWEPT``, the others are small, and choices, except between
    names, are mostly the simplest. With ``very_large``, the product of the first two sizes exceeds
    2 to that power, and the others are 1 or 2.
    """

    device: torch.device
    dtype: torch.dtype
    source: random.Random | None = None
    replay: Sequence[int] | None = None
    layouts: Sequence[str] = LAYOUTS
    values: Sequence[str] = VALUES
    max_numel: int = 1 << 14
    turn: int | None = None
    names: random.Random | None = None
    small: bool = False
    large: int = 0
    largest_size: int = 1 << 30
    swept: bool = False
    very_large: int = 0
    choices: list[int] = field(default_factory=list)
    # indices into ``choices`` of the numbers that seed values
    seeds: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _product: int = 1
    _max_taken: bool = False
    _tensors: int = 0
    _sizes: int = 0
    target: int = 0
    _large_place: int = 0
    _swept_size: int = 0
    _in_tiles: int = 0

    def __post_init__(self) -> None:
        if self.very_large:
            place = self.below(len(_SIXTHS))
            if self.turn is not None and self.replay is None:
                place = self.choices[-1] = self.turn % len(_SIXTHS)
            self.target, self._large_place = 1 << self.very_large, place
        elif self.large:
            number, place = self.below(self.large), self.below(_BOTH + 1 + len(_LOPSIDED))
            if self.turn is not None and self.replay is None and len(self.values) == 1:
                number, place = self._large_turn(self.turn)
                self.choices[-2:] = [number, place]
            self.target, self._large_place = LARGE[number], place
        if self.swept:
            number, place = self.below(len(SWEPT)), self.below(3)
            if self.turn is not None and self.replay is None:
                number, place = self.turn % len(SWEPT), self.turn // len(SWEPT) % 3
                self.choices[-2:] = [number, place]
            self._swept_size, self._large_place = SWEPT[number], place

    def _large_turn(self, turn: int) -> tuple[int, int]:
        """Return the number of ``LARGE`` and the place of the large size whose turn it is: five
        times of nine both of the first two sizes, above 2^16 elements at first."""
        cycle, turn = divmod(turn, 9)
        if turn == 4:
            return min(1 + cycle % 3, self.large - 1), _BOTH
        if turn > 4:
            return self.large - 1, _BOTH + turn - 4
        turn += 4 * cycle
        return turn % self.large, (turn + turn // self.large) % 3

    @property
    def reaches_its_size(self) -> bool:
        """Whether so many sizes were drawn that the swept one is among them, or none is swept."""
        return not self._swept_size or self._sizes > self._large_place

    def state(self) -> dict[str, Any]:
        """Return what was drawn so far, as plain values for ``resumed``."""
        return {
            "choices": list(self.choices),
            "seeds": list(self.seeds),
            "notes": list(self.notes),
            "_product": self._product,
            "_max_taken": self._max_taken,
            "_tensors": self._tensors,
            "_sizes": self._sizes,
            "target": self.target,
            "_large_place": self._large_place,
            "_swept_size": self._swept_size,
            "_in_tiles": self._in_tiles,
        }

    def resumed(self, state: Mapping[str, Any]) -> RecordedDraw:
        """Return this draw as another process left it, ready to draw on."""
        drawn = {"large": 0, "very_large": 0, "swept": False}  # their places were
        return replace(self, **{**state, **drawn})

    def twin(self) -> RecordedDraw:
        """Return a copy that draws on as this draw would, and leaves it as it is."""
        other = copy.copy(self)
        other.choices, other.seeds, other.notes = [*self.choices], [*self.seeds], [*self.notes]
        if self.source is not None:
            other.source = random.Random()
            other.source.setstate(self.source.getstate())
        return other

    def below(self, bound: int) -> int:
        """Draw an integer in [0, bound) and record it; 0 is the simplest."""
        if bound <= 0:
            raise ValueError("nothing to choose from")
        if self.replay is not None:
            place = len(self.choices)
            value = self.replay[place] if place < len(self.replay) else 0
            value = min(value, bound - 1)
        else:
            assert self.source is not None
            value = self.source.randrange(bound)
        self.choices.append(value)
        return value

    def size(self, *interesting: int) -> int:
        """Draw a dimension: of the list of small ones, of ``interesting``, or any number in the
        range that is left; the product of all sizes stays within ``max_numel``."""
        if self.very_large:
            return self._very_large_size()
        if self.target:
            return self._large_size()
        if self._swept_size:
            return self._next_to_a_swept_size()
        room = self.max_numel // max(self._product, 1)
        if self.small:
            room = min(room, 9)
        small = [size for size in _SIZES if size <= room]
        special = [size for size in interesting if size <= room and size not in small]
        near = [size + step for size in interesting for step in (-1, 1) if 0 <= size + step <= room]
        options = small + special + [size for size in near if size not in small]
        place = self.below(len(options) * 2) if options else 0
        remainder = self._remainder(room)
        if remainder is not None:
            place = self.choices[-1] = len(options)
        is_listed = place < len(options)
        size = options[place] if is_listed else self._any_size(room, remainder)
        self._product *= max(size, 1)
        return size

    def _remainder(self, room: int) -> int | None:
        """Return what a size must leave when it is divided by 8, where neither layouts nor values
        are taken in turn; None where it may leave anything."""
        varied = len(self.layouts) > 1 or len(self.values) > 1
        if self.turn is None or self.replay is not None or varied or room < 16:
            return None
        return self.turn % 8 if self.turn // 8 % 2 == 0 else None

    def _any_size(self, room: int, remainder: int | None) -> int:
        """Draw a number up to ``room``, small ones as often as large ones, so that remainders come
        up that a list of sizes leaves out."""
        bits = self.below(max(1, max(room, 1).bit_length()))
        if remainder is not None:
            bits = self.choices[-1] = min(max(bits, 3), room.bit_length() - 2)
        beyond = self.below(1 << bits)
        if remainder is not None:
            beyond = self.choices[-1] = beyond // 8 * 8 + remainder
        return min((1 << bits) + beyond, room)

    def _large_size(self) -> int:
        """Draw a small dimension, or at its place the one that makes the whole exceed the
        target."""
        small = _SMALL if self._large_place == 0 else _SMALL[:3]
        size = small[self.below(len(small))]
        others = max(self._product, 1)
        if self._large_place == _BOTH and self._sizes < 2:
            size = self._beyond(
                math.isqrt(self.target) if not self._sizes else self.target // others
            )
        elif self._large_place > _BOTH and self._sizes < 2:
            size = self._lopsided_size()
        elif self._sizes == self._large_place:
            # As many rows as elements, except of a million, which are elements.
            size = self._beyond(self.target // (1 if self.target < LARGE[-1] else others))
        if self.largest_size < 1 << 30:  # few elements too, for each may be a program's
            size = max(1, min(size, self.largest_size, 2 * self.target // max(self._product, 1)))
        self._sizes += 1
        self._product *= max(size, 1)
        return size

    def _lopsided_size(self) -> int:
        """Draw one of the first two sizes, which have unequal shares of the elements. Every other
        time both are multiples of a tile, for which kernels have a path without masks."""
        share = _LOPSIDED[self._large_place - _BOTH - 1]
        share = 20 - share if self._sizes else share
        bits = round((self.target.bit_length() - 1) * share / 20)
        if not self._sizes:
            self._in_tiles = self.below(2)
            if self.turn is not None and self.replay is None:
                self._in_tiles = self.choices[-1] = (self.turn + self.turn // 9) % 2
        if self._in_tiles:
            return (1 << bits) + min(1 << bits, _TILE)
        return (1 << bits) + 1 + self.below(min(64, 1 << max(bits - 2, 0)))

    def _very_large_size(self) -> int:
        """Draw a dimension of 1 or 2, or of the first two one above its share of the elements."""
        sixths = _SIXTHS[self._large_place]
        share = (sixths, 6 - sixths)[self._sizes] if self._sizes < 2 else 0
        size = 1 + self.below(2)
        if share:  # the next ones, or a multiple of 64
            size = (1 << round(self.very_large * share / 6)) + (1 + self.below(63), 64)[size - 1]
        size = min(size, self.largest_size)
        self._sizes += 1
        self._product *= size
        return size

    def _beyond(self, number: int) -> int:
        """Draw a number above another one: the next ones, or multiples of a power of two, for which
        kernels have a path of their own."""
        step = self.below(128)
        if step < 64:
            return number + 1 + step
        unit = _UNITS[step % len(_UNITS)]
        unit = unit if unit <= number else _UNITS[0]
        return (number // unit + 1) * unit

    def _next_to_a_swept_size(self) -> int:
        """Draw a small dimension, or at its place return the one that is swept."""
        size = _SMALL[:3][self.below(3)]
        if self._sizes == self._large_place:
            size = min(self._swept_size, self.largest_size, self.max_numel)
        self._sizes += 1
        self._product *= max(size, 1)
        return size

    def shape(self, *interesting: int) -> tuple[int, ...]:
        """Draw a shape of one to three dimensions, the last of them by ``size(*interesting)``."""
        lead = [self.size() for _ in range(self.choice((1, 0, 2)))]
        return (*lead, self.size(*interesting))

    def choice(self, options: Sequence[Element]) -> Element:
        """Draw one of ``options``; the first is the simplest."""
        named = all(isinstance(option, str) for option in options)
        if self.names is not None and named and len(options) > KEPT_NAMES:
            kept = sorted(self.names.sample(range(len(options)), KEPT_NAMES))
            options = [options[place] for place in kept]
        place = self.below(len(options))
        if self._swept_size and self.source is not None and self.replay is None and not named:
            # The first is the simplest, such as a matrix, of whose rows any number is to be tried.
            place = self.choices[-1] = 0 if self.source.randrange(3) else place
        return options[place]

    def uniform(self, low: float, high: float) -> float:
        """Draw a float in [low, high], in steps of a 256th of the interval."""
        return low + (high - low) * self.below(257) / 256

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw a floating tensor of ``shape`` with random values and a random layout."""
        return self._tensor(shape, dtype or self.dtype, any_value=True)

    def gradient(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Draw an upstream gradient of any layout, with finite values, among them those of a scaled
        loss and of a mean over many.

        An infinite one may turn into NaN depending on how a derivative's terms are bracketed, and
        every bracketing is right.
        """
        return self._tensor(shape, dtype, any_value=False)

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype, any_value: bool) -> Tensor:
        self._refuse_too_large(shape)
        is_large = self.target > 0  # few trials are, and their layouts are left to chance
        in_turn = self._in_turn(self.layouts, always=not any_value) if not is_large else None
        layout = in_turn or self._by_chance(self.layouts)
        kind = self._in_turn(self.values)
        seed = self._seed()
        if kind == "one max" and self._max_taken:
            kind = "normal"
        if not any_value and kind not in _FINITE_VALUES:
            kind = "normal"
        self._max_taken |= kind == "one max"
        values = make_values(kind, shape, dtype, seed)
        if not any_value and kind == "normal":
            power = (0, 0, 1, -1)[self.below(4)] * _SCALE_EXPONENT[dtype]
            values *= 2.0**power
            kind = f"{kind} * 2^{power}" if power else kind
        tensor = lay_out(values, layout, self.device)
        self.notes.append(f"{describe(tensor)} {kind}")
        return tensor

    def integers(
        self, *shape: int, low: int, high: int, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Draw an integer tensor of ``shape`` with values in [low, high) and a random layout.

        The values are arbitrary, all equal (the ids of one hot row), only the least and the
        largest, ascending along the last dimension, or counted from ``low``. The memory around the
        elements holds ``low``, a valid value, so that reading it shows and does not crash.
        """
        if low >= high:
            raise ValueError(f"no integer lies in [{low}, {high})")
        self._refuse_too_large(shape)
        layout = self._in_turn(self.layouts)
        kind = ("any", "equal", "ends", "ascending", "counted")[self.below(5)]
        generator = torch.Generator().manual_seed(self._seed())
        values = torch.randint(low, high, shape, generator=generator)
        if kind == "equal" and values.numel():
            values = values.reshape(-1)[:1].expand(values.numel()).reshape(shape).contiguous()
        elif kind == "ends":
            values = torch.where(values % 2 == 0, low, high - 1)
        elif kind == "ascending" and values.ndim:
            values = values.sort(-1).values
        elif kind == "counted":
            values = (low + torch.arange(values.numel()) % (high - low)).reshape(shape)
        tensor = lay_out(values.to(dtype), layout, self.device, around=low)
        self.notes.append(f"{describe(tensor)} {kind} in [{low}, {high})")
        return tensor

    def _refuse_too_large(self, shape: tuple[int, ...]) -> None:
        if math.prod(shape) > max(MOST_ELEMENTS, 5 * self.target // 2):
            raise TooLargeError(
                f"a tensor of {'x'.join(map(str, shape))} elements is too large for a trial; let "
                "'draw' give fewer dimensions the same size."
            )

    def _seed(self) -> int:
        """Draw the seed of the next tensor's values."""
        self._tensors += 1
        self.seeds.append(len(self.choices))
        return self.below(1 << 16)

    def _by_chance(self, options: Sequence[str]) -> str:
        # not by choice(), because these names compile no kernels
        return options[self.below(len(options))]

    def _in_turn(self, options: Sequence[str], always: bool = False) -> str:
        """Draw one of the options, or take the one whose turn it is: for the tensor whose turn it
        is, or ``always``."""
        others = len(options) - 1
        if self.turn is None or self.replay is not None or others == 0:
            return self._by_chance(options)
        turn_of = self.turn // others % 4
        mine = always or turn_of in (self._tensors, 3)
        place = 1 + self.turn % others if mine else 0
        self.choices.append(place)
        return options[place]


def make_values(kind: str, shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return a contiguous CPU tensor of ``shape`` with values of ``kind`` (one of ``VALUES`` or
    ``PATTERNS``); equal seeds give equal values."""
    generator = torch.Generator().manual_seed(seed)
    numel = math.prod(shape)
    if kind == "normal" and numel > _MOST_RANDOM:
        numbers = torch.randn(_MOST_RANDOM, generator=generator, dtype=torch.float64).to(dtype)
        return numbers.repeat(-(-numel // _MOST_RANDOM))[:numel].view(tuple(shape))
    normal = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    if kind in PATTERNS:
        return patterned(kind, normal, dtype)
    limits = torch.finfo(dtype)
    if kind == "normal":
        return normal.to(dtype)
    if kind == "wide":
        reach = _WIDE_EXPONENT[dtype]
        exponent = (
            torch.rand(normal.shape, generator=generator, dtype=torch.float64) * 2 - 1
        ) * reach
        return (normal.sign() * torch.exp2(exponent)).to(dtype)
    if kind == "zeros":
        return torch.where(normal > 1, -0.0, 0.0).to(dtype)
    if kind == "equal":
        rows = normal[..., :1] if normal.ndim and normal.numel() else normal
        return rows.expand_as(normal).contiguous().to(dtype)
    if kind == "large negative":
        return (normal - 200).to(dtype)
    if kind == "subnormal":
        return (normal * (limits.tiny / 8)).to(dtype)
    values = normal.to(dtype)
    if kind == "masked":  # as by a causal mask: whole blocks of a long row hold nothing else
        if shape:
            values[..., : shape[-1] // 2] = -math.inf
        return values
    flat = values.view(-1)
    if flat.numel() == 0:
        return values
    places = torch.randperm(flat.numel(), generator=generator)
    if kind == "one max":
        largest = _LARGEST_FLOAT64 if dtype == torch.float64 else limits.max
        largest **= (1.0, 1.0, 0.49, 0.25)[seed // 2 % 4]  # squares that overflow, and that do not
        flat[places[0]] = largest if seed % 2 else -largest
    elif kind == "infinities":
        # One sign in the tensor's first half and the other in its second, so rows have one or both.
        for place in places[: max(1, flat.numel() // 16)].tolist():
            flat[place] = math.inf if (place * 2 < flat.numel()) == bool(seed % 2) else -math.inf
    elif kind == "NaN":
        nans = torch.full((max(1, flat.numel() // 16),), math.nan, dtype=dtype)
        nans[seed % 2 :: 2].neg_()  # x86 gives a NaN with a sign, and math.nan has none
        flat[places[: len(nans)]] = nans
    else:
        raise ValueError(f"no such kind of values: {kind}")
    return values


def lay_out(values: Tensor, layout: str, device: torch.device, around: float = math.nan) -> Tensor:
    """Return ``values`` (contiguous, on the CPU) in one of ``LAYOUTS``, or as
    windows, on ``device``.

    Memory between and around the elements holds ``around``, so that reading a neighbour shows. The
    expanded layouts repeat the first slice or element, and those of windows all but one of a row,
    so they change the values. If ``shape``
    cannot have the layout, the result is contiguous.
    """
    shape = values.shape
    least_dims = 2 if layout == "expanded middle" else 0
    repeated = {"expanded": values.ndim - 1, "expanded rows": 0, "expanded middle": 1}.get(layout)
    if repeated is not None and values.numel() and values.ndim > least_dims:
        kept = values.narrow(repeated, 0, 1).contiguous()
        at_odd = ("contiguous", "odd offset")[sum(shape) % 2]
        return lay_out(kept, at_odd, device, around).expand(shape)
    if layout == WINDOWS and values.numel() and values.ndim > 1:
        rows = torch.cat([values[..., 0, :], values[..., 1:, -1]], -1)
        laid = lay_out(rows, "padded rows", device, around)
        return laid.unfold(-1, shape[-1], 1)
    if layout == "one element" and values.numel():
        return values.reshape(-1)[:1].to(device).reshape([1] * values.ndim).expand(shape)
    strides, offset, room = _strides(shape, layout)
    buffer = torch.full((room,), around, dtype=values.dtype, device=device)
    view = torch.as_strided(buffer, tuple(shape), strides, offset)
    view.copy_(values)
    return view


def _strides(shape: Sequence[int], layout: str) -> tuple[list[int], int, int]:
    """Return strides, storage offset and storage size, in elements, of ``shape`` in ``layout``."""
    dims = len(shape)
    order = list(range(dims))  # from the outermost dimension to the innermost
    # A kernel may follow the strides, and forget where the elements begin or how they are aligned.
    step, offset = 1, 0 if layout == "contiguous" else _OFFSETS[sum(shape) % len(_OFFSETS)]
    padding = [0] * dims  # elements left out behind all of a dimension
    if layout == "odd offset":
        offset = 4099
    elif layout == "transposed":
        order.reverse()
    elif layout == "padded rows" and dims:
        padding[-1] = 3
    elif layout == "padded outer" and dims > 1:  # as x[:, :k] of three dimensions
        padding[1] = math.prod(shape[2:]) * 2
    elif layout == "swapped" and dims > 1:
        order[0], order[1] = order[1], order[0]
    elif layout == "rotated" and dims > 1:  # as channels last
        order = [order[0], *order[2:], order[1]]
        offset = 5
    elif layout == "every other":
        step, offset = 2 + math.prod(shape) % 4, 1  # a kernel may know a step of 2 alone
    elif layout == "every other row" and dims > 1:
        padding[-1] = shape[-1]
        offset = 1
    elif layout in ("gaps", "transposed gaps"):  # as x[:, :k, ::2]: no two dimensions are one
        step = 2
        padding = [2 + place for place in range(dims)]
        if layout == "transposed gaps":
            order.reverse()
    elif layout == "far rows" and dims > 1 and math.prod(shape[:-1]) <= _MOST_FAR:
        padding[-1] = FAR_STRIDE
    elif layout == "far elements" and math.prod(shape) <= _MOST_FAR:
        step = FAR_STRIDE
    strides = [0] * dims
    extent = step
    for place in reversed(order):
        strides[place] = extent
        extent = extent * max(shape[place], 1) + padding[place]
    room = offset + extent + (8 if layout != "contiguous" else 0)
    return strides, offset, room


def describe(tensor: Tensor) -> str:
    """Describe a tensor's dtype, shape, strides and offset, as one word per fact."""
    text = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
    if not tensor.is_contiguous():
        text += f" strides={tuple(tensor.stride())}"
    if tensor.storage_offset():
        text += f" offset={tensor.storage_offset()}"
    return text

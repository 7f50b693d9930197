"""Loops over named axes, for kernels that sweep over rows and columns.

A launcher names the axes of its kernel and the dimensions of each tensor in these names::

    swept = Sweep(
        rows={"batch": batch, "length": length},
        columns={"width": width},
        read=[(x, "batch length width"), (weight, "width")],
        written=[(output, "batch length width")],
    )

``(group channel)`` is a dimension made of two axes, outermost first, ``1`` a dimension of size 1,
and ``?`` one along which the kernel computes the position itself: it takes the stride. Neighbouring
axes that every tensor walks with one step become one loop, so a contiguous tensor needs one loop
for its rows and one for its columns, whatever its rank.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from fuselab.errors import ContractError

ROW_LOOPS, COLUMN_LOOPS = 4, 3  # the most loops that a kernel has
MOST_SHARING = 16  # neighbouring rows that share an element, as three coordinates do
CHOSEN = "?"  # a dimension along which the kernel computes the position
_INT32_MAX = 2**31 - 1
# A launch is planned for all tensors of its alignment, of which this is the unit.
_PAIRS_ALIGNMENT = 16


def _is_one_step(sizes: Sequence[int], strides: Sequence[int], step: int) -> bool:
    """Return whether loops walk a tensor with one ``step``; those of size 1 walk nowhere."""
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def arithmetic_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic: float64 if a tensor has it, else float32."""
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if is_double else torch.float32


def empty_in_order(like: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of ``sizes`` on the device of ``like``, which has as many dimensions
    and whose elements the same kernel walks over: they lie in memory in the same order, unless
    those of ``like`` are repeated."""
    pairs = zip(like.shape, like.stride(), strict=True)
    if like.is_contiguous() or any(step == 0 and size > 1 for size, step in pairs):
        return torch.empty(sizes, dtype=dtype, device=like.device)
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda dim: -strides[dim])
    return torch.empty_permuted(sizes, order, dtype=dtype, device=like.device)


def quotient(number: float, by: float) -> float:
    """Return ``number / by`` as C++ does: by zero it is infinite or NaN, where Python raises."""
    if by != 0:
        return number / by
    is_infinite = number != 0 and not math.isnan(number)
    return math.copysign(math.inf, number) if is_infinite else math.nan


def largest(input: Tensor, dims: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    """Return the largest element over ``dims``, all by default, as ``torch.amax`` does; of no real
    numbers, which that refuses, -infinity, as a kernel's loop that is left at once does."""
    dims = dims or range(input.dim())
    if not input.is_floating_point() or all(input.shape[dim] for dim in dims):
        return torch.amax(input, tuple(dims), keepdim)
    shape = [*input.shape]
    for dim in dims:
        shape[dim] = 1
    empty = input.new_full(shape, -math.inf)
    return empty if keepdim else empty.amax(tuple(dims))


@dataclass(frozen=True)
class Loops:
    """Loop sizes, outermost first, and for each operand its strides in elements."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def halved(self, operands: Collection[int]) -> Loops:
        """Return the loops with half the strides of some operands."""
        return Loops(
            self.sizes,
            tuple(
                tuple(stride // 2 for stride in strides) if place in operands else strides
                for place, strides in enumerate(self.strides)
            ),
        )

    def padded(self, count: int) -> Loops:
        """Return ``count`` loops, those added outermost and of size 1."""
        missing = count - len(self.sizes)
        return Loops(
            (1,) * missing + self.sizes,
            tuple((0,) * missing + strides for strides in self.strides),
        )


class Sweeps(Protocol):
    """The sweeping kernels of a package in one language."""

    def run(
        self, name: str, swept: Sweep, compute: torch.dtype, numbers: Sequence[int] = ()
    ) -> None:
        """Launch the kernel ``name`` over the loops of ``swept``, with arithmetic in ``compute``;
        ``numbers`` are sizes that the kernel computes with."""

    def run_each(self, name: str, sweeps: Sequence[Sweep], compute: torch.dtype) -> None:
        """Launch a kernel for the tensors of lists, which have a sweep each."""


class Sweep:
    """The loops of a kernel over ``rows`` and ``columns``, and the strides of its operands.

    Args:
        rows, columns: the sizes of the axes by name, outermost first. A kernel without reductions
            names rows only; their innermost loop becomes the columns.
        read: each tensor with its dimensions in the names of the axes. None in place of a tensor
            stands for the position along these axes. Where the layouts need more loops than a
            kernel has, contiguous copies take the tensors' places; where these need too many as
            well, copies that have an element for every place of the loops, of which those that a
            position counts stand together. At last, tensors in which a kernel computes places get
            copies with the same other axes, where none of these has more elements than a tensor
            that is read.
        written: the results, likewise; they are dense. Where nothing else helps, contiguous tensors
            take their places, which ``copy_back`` copies.
        in_order: whether the kernel goes over the columns in the order of the axes, as a running
            sum does; else the loop with the smallest steps is the innermost.
        for_results: tensors of the dtypes of all floating results that are computed from what is
            written, where only later kernels read it. If all of them have 16 bits, it need not be
            exact to the last of 32 bits.
        apart: whether results with one element for each row lie where the kernel reads the old
            ones, so that where several threads share a row, they are written elsewhere first.

    Attributes:
        tensors: all operands, None for positions.
        on_rows, on_columns: whether each operand has an axis of the rows, or of the columns.
        read: the number of operands that are read.
        steps: the strides of the dimensions that are ``?``, operand by operand.
        chosen: the number of operands with such dimensions.
        window: the number of columns that each element of the rows walks over itself, 0 if none.

    Raises:
        ContractError: a pattern does not fit its tensor, or too many loops remain.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        columns: Mapping[str, int],
        read: Sequence[tuple[Tensor | None, str]],
        written: Sequence[tuple[Tensor, str]],
        in_order: bool = False,
        for_results: Sequence[Tensor] = (),
        apart: bool = False,
    ) -> None:
        self.read = len(read)
        self.window = 0
        self.apart = apart
        read = [(_readable(tensor, pattern), pattern) for tensor, pattern in read]
        self.in_order = in_order
        self.for_results = tuple(for_results)
        self._copied_back: tuple[tuple[Tensor, Tensor], ...] = ()
        axes = rows, columns
        self._lay_out(rows, columns, [*read, *written])
        if self._is_too_deep():
            copied = [
                (tensor if tensor is None else tensor.contiguous(), to) for tensor, to in read
            ]
            self._lay_out(rows, columns, [*copied, *written])
        if self._is_too_deep():
            rows = _positions_together(rows, read)
            columns = columns if in_order else _positions_together(columns, read)
            repeated = [_repeated(tensor, to, (rows, columns)) for tensor, to in read]
            self._lay_out(rows, columns, [*repeated, *written])
        if self._is_too_deep():
            alike = _alike_around_positions(rows, repeated)
            self._lay_out(rows, columns, [*alike, *written])
        if self._is_too_deep():
            self._copied_back = tuple(
                (tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device))
                for tensor, _ in written
            )
            pairs = zip(self._copied_back, written, strict=True)
            own = [(new, to) for (_, new), (_, to) in pairs]
            self._lay_out(*axes, [*copied, *own])
            if self._is_too_deep():
                self._lay_out(rows, columns, [*alike, *own])
        if self._is_too_deep():
            raise ContractError(
                f"the operands' layouts need {len(self.rows.sizes)} loops over rows and "
                f"{len(self.columns.sizes)} over columns; a kernel has {ROW_LOOPS} and "
                f"{COLUMN_LOOPS}."
            )

    def _lay_out(
        self,
        rows: Mapping[str, int],
        columns: Mapping[str, int],
        operands: Sequence[tuple[Tensor | None, str]],
    ) -> None:
        sizes = {**rows, **columns}
        steps = [_steps(tensor, pattern, sizes) for tensor, pattern in operands]
        chosen = [_chosen(tensor, pattern) for tensor, pattern in operands if tensor is not None]
        self.steps = tuple(stride for own in chosen for stride, _ in own)
        self.chosen = sum(map(bool, chosen))
        self._furthest_chosen = max(
            (sum(stride * (size - 1) for stride, size in own) for own in chosen), default=0
        )
        self.tensors = tuple(tensor for tensor, _ in operands)
        self.on_rows = tuple(any(axis in rows for axis in own) for own in steps)
        self.on_columns = tuple(any(axis in columns for axis in own) for own in steps)
        self.rows = _collapsed(list(rows), sizes, steps)
        self.columns = _collapsed(list(columns), sizes, steps, self.in_order)
        self._has_columns = bool(columns)
        if not columns:
            self.rows, self.columns = _innermost_apart(self.rows)

    def _is_too_deep(self) -> bool:
        return len(self.rows.sizes) > ROW_LOOPS or len(self.columns.sizes) > COLUMN_LOOPS

    def copy_back(self) -> None:
        """Copy the results that were written elsewhere, after the launch."""
        for result, own in self._copied_back:
            result.copy_(own)

    def with_rows_apart(self) -> Sweep:
        """Return the sweep with tensors of their own in the place of results that have one element
        for each row, if the kernel reads the old ones there; ``copy_back`` copies them."""
        if not self.apart:
            return self
        found = copy.copy(self)
        tensors = list(self.tensors)
        own: list[tuple[Tensor, Tensor]] = []
        for place in range(self.read, len(tensors)):
            tensor = tensors[place]
            if tensor is not None and not self.on_columns[place]:
                tensors[place] = new = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
                own.append((tensor, new))
        found.tensors = tuple(tensors)
        found._copied_back = (*own, *self._copied_back)
        return found

    def over_elements(self) -> Sweep:
        """Return the sweep of a kernel in which each element of the rows walks over the columns
        itself: one over the rows alone, without the operands that are positions along columns."""
        places = [place for place, is_on in enumerate(self.on_columns) if not is_on]
        found = self._with(
            *_innermost_apart(
                Loops(self.rows.sizes, tuple(self.rows.strides[place] for place in places))
            )
        )
        found.tensors = tuple(self.tensors[place] for place in places)
        found.on_rows = tuple(self.on_rows[place] for place in places)
        found.on_columns = (False,) * len(places)
        found.read = self.read - (len(self.tensors) - len(places))
        found._has_columns = False
        found.window = self.columns.numel
        return found

    def in_rows_and_columns(self) -> Sweep:
        """Return the sweep of a kernel with reductions as one loop over rows and one over columns,
        in which operands have neighbours one after the other, in this order. Where they lie
        otherwise, contiguous tensors take their places; ``copy_back`` copies those of the
        results."""
        rows, columns = self.rows.numel, self.columns.numel
        places = range(len(self.tensors))
        # With one element along a loop, the steps along it are those of no element.
        row_steps = [
            (columns if self.on_columns[place] else 1) if self.on_rows[place] and rows > 1 else 0
            for place in places
        ]
        column_steps = [int(self.on_columns[place] and columns > 1) for place in places]
        wanted = (
            Loops((rows,), tuple((step,) for step in row_steps)),
            Loops((columns,), tuple((step,) for step in column_steps)),
        )
        tensors = list(self.tensors)
        own: list[tuple[Tensor, Tensor]] = []
        for place, tensor in enumerate(self.tensors):
            if tensor is None or self._lies(place, *wanted):
                continue
            if place < self.read:
                tensors[place] = tensor.contiguous()
                continue
            tensors[place] = new = torch.empty(
                tensor.shape, dtype=tensor.dtype, device=tensor.device
            )
            own.append((tensor, new))
        found = self._with(*wanted)
        found.tensors = tuple(tensors)
        found._copied_back = (*own, *self._copied_back)
        return found

    def _lies(self, place: int, rows: Loops, columns: Loops) -> bool:
        """Return whether an operand has the steps of one loop over rows and one over columns."""
        pairs = ((self.rows, rows), (self.columns, columns))
        return all(
            not own.numel or _is_one_step(own.sizes, own.strides[place], wanted.strides[place][0])
            for own, wanted in pairs
        )

    def in_one_line(self) -> Sweep:
        """Return the sweep of a kernel without reductions as one loop, in which operands with an
        element for each turn have neighbours one after the other. Where they lie otherwise,
        contiguous tensors take their places; ``copy_back`` copies those of the results."""
        has_place = list(map(any, zip(self.on_rows, self.on_columns, strict=True)))
        numel = self.rows.numel * self.columns.numel
        steps = [self.strides(place) for place in range(len(self.tensors))]
        if numel <= 1 or all(one == (1,) for one, has in zip(steps, has_place, strict=True) if has):
            return self
        found = self._with(
            Loops((), ((),) * len(self.tensors)),
            Loops((numel,), tuple((int(has),) for has in has_place)),
        )
        tensors = list(self.tensors)
        own: list[tuple[Tensor, Tensor]] = []
        for place, tensor in enumerate(self.tensors):
            if tensor is None or not has_place[place]:
                continue
            if place < self.read:
                tensors[place] = tensor.contiguous()
            else:
                new = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                own.append((tensor, new))
                tensors[place] = new
        found.tensors = tuple(tensors)
        found._copied_back = (*own, *self._copied_back)
        return found

    def order_rows_by_result(self) -> None:
        """Order the loops over rows as the first result with an element for each column lies in
        memory: a CPU writes neighbours one after the other sooner than it reads them so."""
        results = range(self.read, len(self.tensors))
        place = next((one for one in results if any(self.columns.strides[one])), None)
        if place is None:
            return
        steps = self.rows.strides[place]
        self._order_rows(sorted(range(len(steps)), key=lambda loop: -steps[loop]))

    def put_longest_rows_innermost(self) -> None:
        """Make the longest loop over rows the innermost one."""
        longest = max(range(len(self.rows.sizes)), key=self.rows.sizes.__getitem__)
        others = [loop for loop in range(len(self.rows.sizes)) if loop != longest]
        self._order_rows([*others, longest])

    def _order_rows(self, order: Sequence[int]) -> None:
        self.rows = Loops(
            tuple(self.rows.sizes[loop] for loop in order),
            tuple(tuple(strides[loop] for loop in order) for strides in self.rows.strides),
        )

    def with_long_columns(self, short: int, share: int) -> Sweep:
        """Return the sweep of a kernel without reductions with the innermost rows among its
        columns, where a run of these has fewer than ``short`` elements and both lie in one line in
        all results.

        Operands that repeat an element along the columns, as the gradient of a mean does, get a
        copy with its repetitions. The sweep is returned as it is where a copy would have more than
        a ``share``-th of the elements of a result, or where an operand lies otherwise.
        """
        if self._has_columns or len(self.columns.sizes) != 1:
            return self
        if not 1 < self.columns.sizes[0] < short or self.rows.numel == 0:
            return self
        run, rows = self.columns.sizes[0], self.rows.sizes[-1]
        tensors = list(self.tensors)
        outer = list(zip(*self.rows.strides, strict=True))[:-1]
        strides = [list(own) for own in zip(*outer, strict=True)] or [[] for _ in tensors]
        joined = []
        for place, tensor in enumerate(tensors):
            row, column = self.rows.strides[place][-1], self.columns.strides[place][-1]
            if row == column * run:
                joined.append(column)
                continue
            if tensor is None or column != 0 or place >= self.read:
                return self
            sizes = [
                size if step else 1
                for size, step in zip(self.rows.sizes[:-1], strides[place], strict=True)
            ]
            if math.prod(sizes) * rows * run * share > self.rows.numel * run:
                return self
            whole = tensor.as_strided(
                (*sizes, rows, run), (*strides[place], row, 0), tensor.storage_offset()
            )
            tensors[place] = copy_of = whole.contiguous()
            strides[place] = [
                new if old else 0
                for new, old in zip(copy_of.stride(), strides[place], strict=False)
            ]
            joined.append(1)
        if all(old is new for old, new in zip(tensors, self.tensors, strict=True)):
            return self
        loops = _merged(
            [*self.rows.sizes[:-1], rows * run],
            [*zip(*strides, strict=True), tuple(joined)],
            len(tensors),
        )
        found = self._with(*_innermost_apart(loops))
        found.tensors = tuple(tensors)
        return found

    def by_result(self) -> Sweep:
        """Return the sweep of a kernel without reductions with its loops in the order in which the
        first result lies in memory: a GPU's caches merge reads that lie apart, but not writes."""
        sizes, places = self.sizes, range(len(self.tensors))
        steps = list(zip(*map(self.strides, places), strict=True))
        order = sorted(range(len(sizes)), key=lambda loop: -steps[loop][self.read])
        if order == list(range(len(sizes))) or 0 in sizes:
            return self
        loops = _merged([sizes[one] for one in order], [steps[one] for one in order], len(places))
        return self._with(*_innermost_apart(loops))

    def _with(self, rows: Loops, columns: Loops) -> Sweep:
        """Return the sweep over other loops."""
        found = copy.copy(self)
        found.rows, found.columns = rows, columns
        for name in ("sizes", "is_wide", "rows_are_contiguous", "sharing_rows", "_widest"):
            found.__dict__.pop(name, None)
        return found

    def in_pairs(self, pairs: Sequence[tuple[int, int]]) -> Sweep | None:
        """Return the sweep with strides of these operands that count pairs of elements, or None
        unless all of them are interleaved: the second operand of each has the element behind each
        of the first one's, and such pairs of 32 or 64 bits lie at multiples of their size."""
        if not all(self._is_interleaved(*pair) for pair in pairs):
            return None
        halved = {place for pair in pairs for place in pair}
        return self._with(self.rows.halved(halved), self.columns.halved(halved))

    def _is_interleaved(self, first: int, second: int) -> bool:
        one, other = self.tensors[first], self.tensors[second]
        if one is None or other is None:
            return False
        strides = self.rows.strides[first] + self.columns.strides[first]
        return (
            one.dtype == other.dtype
            and one.element_size() in (2, 4)
            and other.data_ptr() - one.data_ptr() == one.element_size()
            and one.data_ptr() % _PAIRS_ALIGNMENT == 0
            and strides == self.rows.strides[second] + self.columns.strides[second]
            and 2 in strides
            and all(stride % 2 == 0 for stride in strides)
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all loops, those of the rows outermost; a single row is none."""
        if self.rows.numel == 1:
            return self.columns.sizes
        return self.rows.sizes + self.columns.sizes

    def strides(self, place: int) -> tuple[int, ...]:
        """Return the strides of an operand in these loops."""
        outer = () if self.rows.numel == 1 else self.rows.strides[place]
        return outer + self.columns.strides[place]

    def is_even(self, place: int, loops: int) -> bool:
        """Return whether an operand walks the last ``loops`` loops with one step."""
        sizes, strides = self.sizes[-loops:], self.strides(place)[-loops:]
        return all(
            outer == inner * size
            for outer, inner, size in zip(strides, strides[1:], sizes[1:], strict=False)
        )

    @cached_property
    def is_wide(self) -> bool:
        """Whether an offset or a loop counter exceeds 2^31 - 1."""
        sizes = self.rows.sizes + self.columns.sizes
        pairs = zip(self.rows.strides, self.columns.strides, strict=True)
        furthest = max(
            sum((size - 1) * stride for size, stride in zip(sizes, outer + inner, strict=True))
            for outer, inner in pairs
        )
        furthest += self._furthest_chosen
        return max(furthest, self.rows.numel + 65536, self.columns.numel + 65536) > _INT32_MAX

    @cached_property
    def rows_are_contiguous(self) -> bool:
        """Whether neighbouring rows, and not neighbouring columns, are neighbours in memory for
        the operand that has most elements. A few rows may share each of its elements."""
        rows, columns = self._widest
        step = next(filter(None, reversed(rows)), 0)
        return step == 1 and columns[-1] != 1 and self.sharing_rows <= MOST_SHARING

    @cached_property
    def sharing_rows(self) -> int:
        """How many neighbouring rows share the elements of the operand that has most."""
        loops = zip(reversed(self.rows.sizes), reversed(self._widest[0]), strict=True)
        return math.prod(size for size, _ in takewhile(lambda loop: not loop[1], loops))

    @cached_property
    def _widest(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The strides, in rows and in columns, of the operand that has most elements."""
        steps = zip(self.rows.strides, self.columns.strides, strict=True)
        return max(steps, key=lambda step: sum(map(bool, (*step[0], *step[1]))))

    def numbers(self) -> list[int]:
        """Return what a kernel takes: the number of rows and the sizes of their inner loops, the
        number of columns and the sizes of their inner loops, then three row strides and three
        column strides for each operand."""
        rows, columns = self.rows.padded(ROW_LOOPS), self.columns.padded(COLUMN_LOOPS)
        strides = zip(rows.strides, columns.strides, strict=True)
        return [
            rows.numel,
            *rows.sizes[1:],
            columns.numel,
            *columns.sizes[1:],
            *(step for pair in strides for part in pair for step in part),
        ]


def _dims(pattern: str) -> list[str]:
    return [group or word for group, word in re.findall(r"\(([^)]*)\)|(\S+)", pattern)]


def axes_of_dims(pattern: str) -> list[list[str]]:
    """Return the axes of each dimension of a pattern, outermost first."""
    return [[axis for axis in dim.split() if axis != "1"] for dim in _dims(pattern)]


def _chosen(tensor: Tensor, pattern: str) -> list[tuple[int, int]]:
    """Return stride and size of each dimension along which the kernel computes the position."""
    dims = enumerate(_dims(pattern))
    return [(tensor.stride(dim), tensor.shape[dim]) for dim, text in dims if text == CHOSEN]


def _readable(tensor: Tensor | None, pattern: str) -> Tensor | None:
    """Return a tensor, or a zero in its place and shape where a dimension along which the kernel
    computes the position is empty: a kernel that chooses between the tensor's elements and a value
    reads the first one for the others, and an empty tensor has no address."""
    if tensor is None or tensor.numel() or CHOSEN not in _dims(pattern):
        return tensor
    places = enumerate(_dims(pattern))
    shape = [
        max(tensor.shape[place], 1) if text == CHOSEN else tensor.shape[place]
        for place, text in places
    ]
    return tensor.new_zeros(()).expand(shape)


def _positions_together(
    axes: Mapping[str, int], read: Sequence[tuple[Tensor | None, str]]
) -> dict[str, int]:
    """Return the axes in an order in which those of each position are neighbours, as far as no axis
    belongs to two: there is no copy of a position that could have other loops."""
    counted = [
        [axis for own in axes_of_dims(pattern) for axis in own if axis in axes]
        for tensor, pattern in read
        if tensor is None
    ]
    order: dict[str, int] = {}
    for axis, size in axes.items():
        together = next((own for own in counted if axis in own), [])
        if axis not in order:
            order |= {one: axes[one] for one in together if one not in order} or {axis: size}
    return order


def _repeated(
    tensor: Tensor | None, pattern: str, loops: Sequence[Mapping[str, int]]
) -> tuple[Tensor | None, str]:
    """Return a copy of a tensor that has all axes of those loops, over rows or over columns, of
    which it has one, and its pattern. It is read in the same order as every other copy, so that
    its loops join theirs."""
    sizes = {axis: size for own in loops for axis, size in own.items()}
    dims = axes_of_dims(pattern)
    own_axes = [axis for axes in dims for axis in axes]
    if tensor is None or CHOSEN in own_axes:
        return tensor, pattern
    axes = [axis for own in loops if not set(own).isdisjoint(own_axes) for axis in own]
    split = tensor.reshape([sizes[axis] for axis in own_axes])
    ordered = split.permute([own_axes.index(axis) for axis in axes if axis in own_axes])
    shape = [sizes[axis] if axis in own_axes else 1 for axis in axes]
    whole = ordered.reshape(shape).expand([sizes[axis] for axis in axes])
    return whole.contiguous(), " ".join(axes)


def _alike_around_positions(
    rows: Mapping[str, int], read: Sequence[tuple[Tensor | None, str]]
) -> list[tuple[Tensor | None, str]]:
    """Return the operands, those with dimensions that are ``?`` as copies that have all axes of the
    rows of which one of them has one, so that these axes are one loop; as they are, where a copy
    would be larger than each of the operands."""
    dims = {place: axes_of_dims(to) for place, (_, to) in enumerate(read) if CHOSEN in _dims(to)}
    own = {axis for axes in dims.values() for dim in axes for axis in dim} - {CHOSEN}
    axes = [axis for axis in rows if axis in own]
    largest = max((one.numel() for one, _ in read if one is not None), default=0)
    found = list(read)
    for place, own_dims in dims.items():
        tensor = read[place][0]
        flat = [axis for dim in own_dims for axis in dim]
        if tensor is None or not {*flat} <= {*axes, CHOSEN}:
            return list(read)
        chosen = [size for size, dim in zip(tensor.shape, own_dims, strict=True) if dim == [CHOSEN]]
        if math.prod([rows[axis] for axis in axes]) * math.prod(chosen) > largest:
            return list(read)
        left = iter(chosen)
        split = tensor.reshape([next(left) if axis == CHOSEN else rows[axis] for axis in flat])
        last = [number for number, axis in enumerate(flat) if axis == CHOSEN]
        ordered = split.permute([flat.index(axis) for axis in axes if axis in flat] + last)
        shape = [rows[axis] if axis in flat else 1 for axis in axes] + chosen
        whole = ordered.reshape(shape).expand([rows[axis] for axis in axes] + chosen)
        found[place] = whole.contiguous(), " ".join([*axes, *[CHOSEN] * len(chosen)])
    return found


def _steps(tensor: Tensor | None, pattern: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the stride of each axis that the tensor has."""
    named = axes_of_dims(pattern)
    steps: dict[str, int] = {}
    if tensor is None:
        step = 1
        for axis in reversed([axis for axes in named for axis in axes]):
            steps[axis] = step
            step *= sizes[axis]
        return steps
    if len(named) != tensor.dim():
        raise ContractError(f"'{pattern}' has {len(named)} dimensions, the tensor {tensor.dim()}.")
    for dim, axes in enumerate(named):
        if axes == [CHOSEN]:
            continue
        expected = math.prod(sizes[axis] for axis in axes)
        if tensor.shape[dim] != expected:
            raise ContractError(
                f"dimension {dim} of a tensor of shape {tuple(tensor.shape)} has to have the size "
                f"{expected} to be '{' '.join(axes) or 1}'."
            )
        step = tensor.stride(dim)
        for axis in reversed(axes):
            steps[axis] = steps.get(axis, 0) + step
            step *= sizes[axis]
    return steps


def _collapsed(
    axes: Sequence[str],
    sizes: Mapping[str, int],
    operands: Sequence[Mapping[str, int]],
    in_order: bool = False,
) -> Loops:
    """Return the fewest loops over ``axes``, the smallest steps innermost unless ``in_order``."""
    if any(sizes[axis] == 0 for axis in axes):  # nothing is at any place, so that no step counts
        return Loops((0,), ((0,),) * len(operands))
    guide = max(operands, key=lambda steps: sum(axis in steps for axis in axes), default={})
    order = [axis for axis in axes if sizes[axis] != 1]
    if not in_order:
        order.sort(key=lambda axis: (guide.get(axis, 0), -axes.index(axis)), reverse=True)
    steps_of = [tuple(steps.get(axis, 0) for steps in operands) for axis in order]
    return _merged([sizes[axis] for axis in order], steps_of, len(operands))


def _merged(sizes: Sequence[int], steps: Sequence[tuple[int, ...]], operands: int) -> Loops:
    """Return loops of some sizes, neighbours that every operand walks with one step as one;
    ``steps`` has the operands' strides for each loop."""
    loops: list[int] = []
    strides: list[tuple[int, ...]] = []
    for size, step in zip(sizes, steps, strict=True):
        if strides and all(
            outer == inner * size for outer, inner in zip(strides[-1], step, strict=True)
        ):
            loops[-1] *= size
            strides[-1] = step
        else:
            loops.append(size)
            strides.append(step)
    if not loops:
        loops, strides = [1], [(0,) * operands]
    return Loops(tuple(loops), tuple(zip(*strides, strict=True)))


def _innermost_apart(loops: Loops) -> tuple[Loops, Loops]:
    """Return all loops but the innermost, and the innermost; several of these where the others
    would be more than a kernel has over rows."""
    apart = min(max(1, len(loops.sizes) - ROW_LOOPS), COLUMN_LOOPS)
    outer = Loops(
        loops.sizes[:-apart] or (1,), tuple(one[:-apart] or (0,) for one in loops.strides)
    )
    return outer, Loops(loops.sizes[-apart:], tuple(one[-apart:] for one in loops.strides))

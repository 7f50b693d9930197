"""The loops of sweeping kernels: the fewest that every operand's layout allows."""

from __future__ import annotations

import math

import pytest
import torch

from fuselab.errors import ContractError
from fuselab.runtime.sweep import Sweep, empty_in_order, quotient


def element(swept: Sweep, operand: int, row: int, column: int) -> float:
    """Return what a kernel reads of an operand at a row and a column."""
    offset = 0
    for loops, place in ((swept.rows, row), (swept.columns, column)):
        for size, stride in zip(
            reversed(loops.sizes), reversed(loops.strides[operand]), strict=True
        ):
            offset += place % size * stride
            place //= size
    tensor = swept.tensors[operand]
    assert tensor is not None
    return float(tensor.as_strided((1,), (1,), tensor.storage_offset() + offset))


def test_contiguous_tensors_need_one_loop_over_rows_and_one_over_columns() -> None:
    x, weight = torch.ones(2, 3, 5), torch.ones(5)
    sizes = {"batch": 2, "length": 3}
    swept = Sweep(sizes, {"width": 5}, [(x, "batch length width"), (weight, "width")], [])
    assert (swept.rows.sizes, swept.columns.sizes) == ((6,), (5,))


def test_axes_that_a_position_counts_stand_together_where_loops_are_too_many() -> None:
    """The gradient of a factor in windows of a rolled image: the kernel computes both positions in
    the image, and the windows' axes were five loops over columns."""
    sizes = {"batch": 2, "rows_of": 2, "columns_of": 3, "row": 2, "column": 2}
    windows = torch.arange(2 * 2 * 3 * 4 * 5.0).reshape(12, 4, 5)
    image = torch.zeros(2, 4, 6, 5)
    swept = Sweep(
        {"width": 5},
        sizes,
        [
            (windows, "(batch rows_of columns_of) (row column) width"),
            (None, "(rows_of row)"),
            (None, "(columns_of column)"),
            (image, "batch ? ? width"),
        ],
        [(torch.empty(5), "width")],
    )
    assert swept.columns.sizes == (2, 4, 6)
    assert swept.columns.strides[1:3] == ((0, 1, 0), (0, 0, 1))
    for batch, y, x in ((0, 0, 0), (1, 2, 5), (1, 3, 4), (0, 1, 3)):
        expected = windows.reshape(2, 2, 3, 2, 2, 5)[batch, y // 2, x // 2, y % 2, x % 2, 3]
        assert element(swept, 0, 3, (batch * 4 + y) * 6 + x) == float(expected)


def test_operands_of_too_many_loops_are_repeated() -> None:
    """The gradient of a channel's factor behind a group norm of a transposed map: what belongs to
    a group, to a channel of it, and to a place keep the loops over columns apart."""
    sizes = {"batch": 2, "group": 4, "channel": 3, "width": 5}
    groups = torch.arange(8.0).reshape(2, 4, 1)
    weight = torch.arange(12.0)
    place = torch.arange(5.0).reshape(1, 5)
    x = torch.arange(2 * 6 * 12 * 5.0).reshape(2, 6, 12, 5)
    swept = Sweep(
        {"length": 6},
        sizes,
        [
            (groups, "batch group 1"),
            (weight, "(group channel)"),
            (place, "1 width"),
            (x, "batch length (group channel) width"),
        ],
        [(torch.empty(6, 1), "length 1")],
    )
    assert swept.rows.sizes == (6,) and len(swept.columns.sizes) <= 3
    for column in (0, 1, 5, 59, 61, 119):
        batch, group, channel, width = (int(one) for one in torch.unravel_index(
            torch.tensor(column), tuple(sizes.values())
        ))  # fmt: skip
        expected = [
            float(groups[batch, group, 0]),
            float(weight[3 * group + channel]),
            float(width),
            float(x[batch, 4, 3 * group + channel, width]),
        ]
        assert [element(swept, operand, 4, column) for operand in range(4)] == expected
    assert swept.on_rows == (False, False, False, True, True)
    assert swept.on_columns == (True, True, True, True, False)


def test_tensors_in_which_places_are_computed_get_the_same_other_axes() -> None:
    """A pooling in three dimensions of a softmax over channels: what the softmax holds for all
    channels keeps the loops over batch and channels apart, and the places of a window have three
    loops of their own."""
    sizes = {"batch": 2, "channels": 3, "depth": 2, "height": 3, "width": 2}
    group = {"group": 2, "group_2": 2, "group_3": 2}
    places = zip(("depth", "height", "width"), group, strict=True)
    read = [
        *((None, f"{position}_") for one in places for position in one),
        (torch.arange(2 * 3 * 4 * 6 * 4.0).reshape(2, 3, 4, 6, 4), "batch channels ? ? ?"),
        (torch.arange(2 * 4 * 6 * 4.0).reshape(2, 1, 4, 6, 4), "batch 1 ? ? ?"),
    ]
    read = [(one, pattern.rstrip("_")) for one, pattern in read]
    written = [(torch.empty(2, 3, 2, 3, 2), "batch channels depth height width")]
    swept = Sweep(sizes, group, read, written)
    assert len(swept.rows.sizes) == 4 and swept.rows.numel == 72
    of_batch = [swept.tensors[6], swept.tensors[7]]
    assert [tuple(one.shape) for one in of_batch] == [(2, 3, 4, 6, 4)] * 2
    for channel in range(3):
        assert torch.equal(of_batch[1][:, channel], read[7][0][:, 0])
    assert swept.steps == (24, 4, 1) * 2

    read[7] = torch.arange(4 * 6 * 40.0).reshape(1, 1, 4, 6, 40), "1 1 ? ? ?"
    wider = Sweep(sizes, group, read, written)  # batch and channels are one loop as it is
    assert tuple(wider.tensors[7].shape) == (1, 1, 4, 6, 40)
    read[7] = torch.arange(2 * 4 * 6 * 40.0).reshape(2, 1, 4, 6, 40), "batch 1 ? ? ?"
    with pytest.raises(ContractError, match="need 5 loops over rows"):  # too large a copy
        Sweep(sizes, group, read, written)


def test_nothing_is_at_any_place_of_an_empty_tensor() -> None:
    empty = torch.ones(5, 0, 3, 2).transpose(0, 2)
    names = ("a", "b", "c", "d")
    sizes = dict(zip(names, empty.shape, strict=True))
    swept = Sweep({}, sizes, [(empty, "a b c d"), (torch.ones(3, 1, 1, 2), "a 1 1 d")], [])
    assert (swept.rows.sizes, swept.columns.sizes) == ((1,), (0,))


def test_positions_that_keep_too_many_loops_apart_are_refused() -> None:
    sizes = {"a": 2, "b": 3, "c": 5, "d": 7}
    read = [(None, "a"), (None, "c"), (None, "d"), (torch.ones(2, 3, 5, 7), "a b c d")]
    with pytest.raises(ContractError, match="4 over columns; a kernel has 4 and 3"):
        Sweep({}, sizes, read, [])


def test_a_quotient_is_that_of_c() -> None:
    assert quotient(3.0, 2) == 1.5
    assert quotient(2.0, 0) == math.inf
    assert quotient(-2.0, 0.0) == -math.inf
    assert math.isnan(quotient(0.0, 0)) and math.isnan(quotient(math.nan, 0))


def test_short_columns_join_the_loop_around_them() -> None:
    """The gradient of a mean over blocks of 4 x 4: each of its elements is read 4 times in a row of
    x, and the copy that has them so often has a fourth of x's elements."""
    sizes = {"batch": 2, "group": 3, "row": 4, "group_2": 5, "column": 4}
    grad = torch.arange(2 * 3 * 5.0).reshape(2, 3, 5)
    x = torch.arange(2 * 12 * 20.0).reshape(2, 12, 20)
    read = [(grad, "batch group group_2"), (x, "batch (group row) (group_2 column)")]
    written = [(torch.empty_like(x), "batch (group row) (group_2 column)")]
    swept = Sweep(sizes, {}, read, written)
    assert swept.columns.sizes == (4,)
    long = swept.with_long_columns(16, 4)
    assert long.columns.sizes == (20,) and long.rows.numel == 24
    for row in range(24):
        group = row // 4
        for column in range(20):
            assert element(long, 0, row, column) == float(grad[group // 3, group % 3, column // 4])
            assert element(long, 1, row, column) == float(x.reshape(24, 20)[row, column])
    assert long.tensors[2] is written[0][0]
    assert swept.with_long_columns(16, 5) is swept
    assert swept.with_long_columns(4, 4) is swept


def test_columns_that_are_reduced_stay_short() -> None:
    x, mean = torch.ones(6, 12, 20), torch.ones(6, 12, 5)
    read = [(mean, "batch row group"), (x, "batch row (group column)")]
    axes = {"batch": 6, "row": 12, "group": 5}
    swept = Sweep(axes, {"column": 4}, read, [(torch.empty(6, 12, 5), "batch row group")])
    assert swept.with_long_columns(16, 1) is swept


def test_elements_that_walk_over_their_windows_are_rows_alone() -> None:
    x, output = torch.ones(6, 12, 20), torch.empty(6, 11, 18)
    read = [(None, "row"), (None, "group"), (x, "batch ? ?"), (None, "column"), (None, "group_2")]
    axes = {"batch": 6, "row": 11, "column": 18}
    written = [(output, "batch row column")]
    swept = Sweep(axes, {"group": 2, "group_2": 3}, read, written).over_elements()
    assert swept.tensors == (None, x, None, output) and swept.read == 3
    assert swept.rows.sizes == (6, 11) and swept.columns.sizes == (18,)
    assert swept.rows.strides == ((0, 1), (240, 0), (0, 0), (198, 18))
    assert swept.columns.strides == ((0,), (0,), (1,), (1,))
    assert swept.steps == (20, 1)


def test_results_follow_the_order_of_an_operand() -> None:
    x = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    made = empty_in_order(x, (2, 3, 2, 2), torch.int32)
    assert made.is_contiguous(memory_format=torch.channels_last) and made.dtype == torch.int32
    turned = empty_in_order(x.permute(3, 1, 0, 2), (7, 3, 2, 4), torch.float32)
    assert turned.permute(2, 3, 0, 1).is_contiguous()
    for one in (torch.empty(2, 3, 4, 5), x[:, :, :1].expand(2, 3, 4, 5)):
        assert empty_in_order(one, (2, 3, 4, 5), torch.float32).is_contiguous()

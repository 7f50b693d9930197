"""The loops and tiles that Triton kernels without reductions get, and how they divide."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import MockTensor

from fuselab.inspect.assembly.architectures import architecture
from fuselab.inspect.assembly.triton_compile import compiled_launch
from fuselab.runtime import gpu_limits
from fuselab.runtime.sweep import Sweep
from fuselab.runtime.triton_blocks import (
    MOST_PARTIALS,
    TILE,
    Block,
    Reducing,
    block_of_columns,
    block_of_rows,
    has_nested_columns,
    is_read_once,
    tile,
)
from fuselab.runtime.triton_loops import load, offset
from fuselab.runtime.triton_loops import tile as tile_of
from fuselab.runtime.triton_sweep import _factored, _loops, _with_factor, divisor, launches_of


def swept(sizes: dict[str, int], x: tuple[Tensor, str], output: tuple[Tensor, str]) -> Sweep:
    return Sweep(sizes, {}, [x], [output])


def image(sizes: tuple[int, ...]) -> Sweep:
    """Return the sweep of a function of an image and a number for each channel."""
    names = "batch channels height width"
    x, bias = torch.empty(sizes, device="meta"), torch.empty(sizes[1], device="meta")
    pattern = dict(zip(names.split(), sizes, strict=True))
    return Sweep(pattern, {}, [(x, names), (bias, "channels")], [(x, names)])


def test_a_product_takes_the_place_of_a_division() -> None:
    generator = random.Random(20261124)
    sizes = [2, 3, 5, 7, 15, 17, 2**16 - 1, 2**16 + 1, 2**30 + 1, 2**31 - 1]
    sizes += [generator.randrange(2, 2**31) for _ in range(300)]
    for size in sizes:
        number = divisor(size)
        assert number % 2 == 1 and 2**31 <= number < 2**63
        factor, shift = number >> 8, (number & 255) >> 1
        assert factor < 2**32 and shift < 32
        multiples = (generator.randrange(2**31 // size + 1) * size for _ in range(20))
        near = {one + step for one in multiples for step in (-1, 0, 1)}
        for index in {0, 1, size - 1, size, 2**31 - 1, *near}:
            if 0 <= index < 2**31:
                assert (index * factor >> 32) >> shift == index // size


def test_rows_that_begin_at_multiples_of_a_pack_are_rows_of_tiles() -> None:
    block = tile(image((4, 8, 16, 16)), 2, 0)
    assert (block.rows, block.columns, block.column_loops) == (4, 256, 1)


def test_tiles_of_odd_images_lie_in_several_loops() -> None:
    loops = image((32, 64, 7, 7))
    assert loops.sizes == (32, 64, 49)
    block = tile(loops, 2, 0)
    assert block.column_loops == 2 and block.columns <= TILE
    assert loops.is_even(loops.read, 2) and not loops.is_even(1, 2)


def test_a_transposed_operand_gets_square_tiles() -> None:
    sizes = {"rows": 100, "columns": 60}
    x, output = torch.empty(60, 100, device="meta"), torch.empty(100, 60, device="meta")
    block = tile(swept(sizes, (x, "columns rows"), (output, "rows columns")).by_result(), 2, 0)
    assert (block.rows, block.columns, block.column_loops, block.warps) == (32, 64, 1, 4)
    assert tile(swept(sizes, (x, "columns rows"), (output, "rows columns")), 4, 0).warps == 8


@pytest.mark.parametrize(("width", "columns"), [(58, 64), (112, 128), (16, 16), (1000, 1024)])
def test_rows_whose_places_are_computed_are_rows_of_small_tiles(width: int, columns: int) -> None:
    """If the columns were several loops, each element would take two divisions."""
    x, output = torch.empty(9, width, device="meta"), torch.empty(6, 7, width, device="meta")
    sizes = {"batch": 6, "height": 7, "width": width}
    reading = [(None, "height"), (x, "? width")]
    block = tile(Sweep(sizes, {}, reading, [(output, "batch height width")]), 2, 0)
    assert (block.columns, block.column_loops) == (columns, 1)
    assert block.rows * block.columns == (512 if columns < 512 else 1024)


def test_strided_rows_are_rows_of_small_tiles() -> None:
    x, output = torch.empty(640, 97, device="meta")[:, :96:3], torch.empty(640, 32, device="meta")
    block = tile(swept({"a": 640, "b": 32}, (x, "a b"), (output, "a b")), 2, 0)
    assert (block.rows, block.columns, block.warps) == (16, 32, 1)


def test_loops_follow_the_result() -> None:
    """A pixel shuffle reads along the height and the width of each channel, and writes a channel's
    pixels between those of the next."""
    x, output = torch.empty(2, 3, 2, 2, 4, 5), torch.empty(2, 3, 4, 2, 5, 2)
    sizes: dict[str, Any] = {"batch": 2, "channel": 3, "down": 2, "right": 2, "height": 4}
    loops = swept(
        {**sizes, "width": 5},
        (x, "batch channel down right height width"),
        (output, "batch channel height down width right"),
    )
    ordered = loops.by_result()
    assert ordered.is_even(1, len(ordered.sizes)) and not loops.is_even(1, len(loops.sizes))
    assert ordered.sizes == (6, 4, 2, 5, 2)
    assert ordered.strides(0) == (80, 5, 40, 1, 20)
    assert tile(ordered, 4, 0).column_loops > 1
    shuffled = torch.empty(8, 64, 28, 28, 2, 2)  # the columns that are read lie 784 apart
    sizes = {"batch": 8, "channel": 64, "down": 2, "right": 2, "height": 28, "width": 28}
    x = torch.empty(8, 64, 2, 2, 28, 28)
    reading = (x, "batch channel down right height width")
    written = (shuffled, "batch channel height width down right")
    block = tile(swept(sizes, reading, written).by_result(), 2, 0)
    assert (block.rows, block.columns, block.warps) == (4, 128, 1)


@triton.jit
def places(
    pointer, sizes, divisors, counts, COLUMN_LOOPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    position, is_row, is_column = tile_of(
        sizes, divisors, counts, COLUMN_LOOPS, BLOCK, BLOCK, False
    )
    tl.store(pointer + position[0] * 64 + position[1] + position[2] * 0, 1, is_row & is_column)


@pytest.mark.parametrize("size", [7, 48])
def test_the_compiler_sees_divisions_by_multiples_of_16(size: int) -> None:
    """A constant among the divisors has to stay one: as a number that is 0, it would make every
    quotient 0, which the interpreter does not show."""
    divisors = (divisor(33), tl.constexpr(0) if size % 16 == 0 else divisor(size))
    args = (MockTensor(torch.float32), (33, size), divisors, (1, 33 * size))
    made = compiled_launch(places, architecture("sm_90"), args, {"COLUMN_LOOPS": 2, "BLOCK": 64})
    products = made.texts["ttir"].count("tt.mulhiui")
    divisions = made.texts["ttir"].count("arith.remsi %column")
    assert (products, divisions) == ((0, 1) if size == 48 else (1, 0))


@pytest.mark.parametrize("width", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reads", [1, 2])
def test_neighbouring_rows_are_shared_by_few_programs_of_many_warps(
    reads: int, width: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_limits, "multiprocessors", lambda device: 132)
    generator = random.Random(20261128)
    reducing = Reducing(sweeps=1, reductions=3, stores_columns=True)
    for _ in range(200):
        rows, columns = generator.choice([3, 64, 300, 2048]), generator.randrange(1, 300_000)
        x = torch.empty(columns, rows, dtype=width, device="meta")
        reading, written = [(x, "n c")] * reads, [(torch.empty_like(x), "n c")]
        over = Sweep({"c": rows}, {"n": columns}, reading, written)
        block = block_of_rows(over, x.element_size(), 0, reducing, torch.device("cuda"))
        if block.parts < 2:
            continue
        blocks = -(-rows // block.rows)
        assert block.parts * block.rows <= MOST_PARTIALS
        assert block.parts & (block.parts - 1) == 0
        assert block.columns * (block.parts - 1) <= 2 * columns
        if rows >= 64 and columns > 100_000:
            assert blocks * block.parts * block.warps >= 132 * 4


@pytest.mark.parametrize("stores_columns", [False, True])
def test_a_reduction_over_a_transposed_operand_gets_square_blocks(
    stores_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rows that are read once are worth more than whole cache lines of the other operand."""
    monkeypatch.setattr(gpu_limits, "multiprocessors", lambda device: 132)
    x = torch.empty(1024, 4096, dtype=torch.bfloat16, device="meta")
    other = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")
    written = (x, "rows columns") if stores_columns else (x[:, 0], "rows")
    over = Sweep(
        {"rows": 1024},
        {"columns": 4096},
        [(x, "rows columns"), (other, "columns rows")],
        [written],
    )
    reducing = Reducing(sweeps=1, reductions=1, stores_columns=stores_columns)
    block = block_of_rows(over, 2, 0, reducing, torch.device("cuda"))
    if stores_columns:
        assert block.columns == 4096
    else:
        assert (block.rows, block.columns) == (64, 32)


@pytest.mark.parametrize("reads", [1, 2])
@pytest.mark.parametrize("columns", [512, 8192, 65536])
def test_what_is_read_once_leaves_the_cache_first(
    reads: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the launch writes as much, or what it reads may still be there for the next one."""
    device = torch.device("cuda")
    monkeypatch.setattr(gpu_limits, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(gpu_limits, "cache_bytes", lambda device: 50 << 20)
    for rows in (16, 4096):
        x = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
        reading = [(x, "rows columns")] * reads
        for stores, written in ((False, (x[:, 0], "rows")), (True, (x, "rows columns"))):
            over = Sweep({"rows": rows}, {"columns": columns}, reading, [written])
            for sweeps in (1, 2):
                reducing = Reducing(sweeps, sweeps, stores_columns=stores)
                block = block_of_rows(over, 2, 0, reducing, device)
                once = [is_read_once(over, 2, block, reducing, n, device) for n in range(4)]
                whole, is_large = block.parts == 0, reads * x.numel() * 2 > 25 << 20
                if stores:
                    assert once[: sweeps + 2 : sweeps + 1] == [False, False]
                    assert once[1] == (whole or (block.parts > 1 and is_large))
                elif sweeps == 1:
                    assert once[:2] == [True, True]
                else:
                    assert once[0] == (whole or (block.parts > 1 and is_large))


def test_few_rows_are_spread_over_the_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_limits, "multiprocessors", lambda device: 132)
    reducing = Reducing(sweeps=1, reductions=1, stores_columns=True)
    for rows, columns, expected in ((64, 8, 32), (1024, 8, 32), (64, 512, 1), (65536, 8, 256)):
        x = torch.empty(rows, columns, device="meta")
        over = Sweep({"n": rows}, {"c": columns}, [(x, "n c")], [(x, "n c")])
        assert block_of_rows(over, 4, 0, reducing, torch.device("cuda")).rows == expected


def test_partial_results_that_many_programs_read_are_joined_first() -> None:
    def launches(left_bytes: int, **of: Any) -> list[tuple[int, int, int]]:
        return launches_of(Reducing(**{"reductions": 2, **of}), 64, left_bytes)

    several = {"sweeps": 2, "stores_columns": True}
    assert launches(1 << 10, **several) == [(1, 64, 0), (2, 64, 0), (3, 64, 0)]
    joined = [(1, 64, 0), (-1, 1, 0), (2, 64, 1), (-2, 1, 1), (3, 64, 2)]
    assert launches(1 << 17, **several) == joined
    assert launches(1 << 17, sweeps=1) == [(1, 64, 0), (2, 1, 0)]
    assert launches(1 << 17, **several, sums=1) == launches(1 << 10, **several)


@pytest.mark.parametrize(
    ("width", "is_nested"), [(111, False), (1001, False), (4001, True), (5001, False), (8190, True)]
)
def test_a_loop_is_swept_over_alone_where_it_fills_a_block(
    monkeypatch: pytest.MonkeyPatch, width: int, is_nested: bool
) -> None:
    """A block of 4096 columns in a loop of 111 would leave most threads idle."""
    monkeypatch.setattr(gpu_limits, "multiprocessors", lambda device: 132)
    x = torch.empty(64, 2048, width + 1, device="meta", dtype=torch.bfloat16)
    total = torch.empty((), device="meta")
    sizes = {"batch": 64, "length": 2048, "width": width}
    loops = Sweep({}, sizes, [(x[..., 1:], "batch length width")], [(total, "")])
    block = block_of_rows(loops, 2, 0, Reducing(1, 1), torch.device("meta"))
    assert block.columns == 4096
    assert has_nested_columns(loops, block) == is_nested


@pytest.mark.parametrize(
    ("columns", "operands", "warps"),
    [(3, 1, 1), (8, 1, 1), (16, 1, 1), (64, 1, 2), (8, 2, 2)],
)
def test_a_warp_reduces_few_columns_alone(
    monkeypatch: pytest.MonkeyPatch, columns: int, operands: int, warps: int
) -> None:
    """The mean over eight heads: rows are neighbours in memory."""
    monkeypatch.setattr(gpu_limits, "multiprocessors", lambda device: 132)
    sizes = {"batch": 32, "length": 1 << 20}
    x = torch.empty(32, columns, 1 << 20, device="meta", dtype=torch.bfloat16)
    mean = torch.empty(32, 1 << 20, device="meta", dtype=torch.bfloat16)
    read, written = (x, "batch heads length"), (mean, "batch length")
    loops = Sweep(sizes, {"heads": columns}, [read] * operands, [written])
    block = block_of_rows(loops, 2, 0, Reducing(1, 1), torch.device("cuda"))
    assert block.warps == warps


def blocks_on_an_h200(monkeypatch: pytest.MonkeyPatch, over: Sweep, reducing: Reducing) -> Block:
    monkeypatch.setattr(gpu_limits, "multiprocessors", lambda device: 132)
    return block_of_rows(over, 2, 0, reducing, torch.device("cuda"))


def test_pairs_of_points_visit_their_coordinates_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing that is read has an element for each pair, so that all of it is in the cache."""
    x = torch.empty(8, 1024, 3, device="meta", dtype=torch.bfloat16)
    distance = torch.empty(8, 1024, 1024, device="meta", dtype=torch.bfloat16)
    over = Sweep(
        {"b": 8, "i": 1024, "j": 1024},
        {"c": 3},
        [(x, "b i c"), (x, "b j c")],
        [(distance, "b i j")],
    )
    block = blocks_on_an_h200(monkeypatch, over, Reducing(1, 1))
    assert (block.rows, block.columns, block.warps, block.parts) == (1024, 1, 4, 1)
    of_each = torch.empty(8, 1024, 1024, 3, device="meta", dtype=torch.bfloat16)
    over = Sweep(
        {"b": 8, "i": 1024, "j": 1024}, {"c": 3}, [(of_each, "b i j c")], [(distance, "b i j")]
    )
    assert blocks_on_an_h200(monkeypatch, over, Reducing(1, 1)).columns == 4


def test_rows_that_share_elements_are_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of each coordinate of a point sums up the same distances."""
    distance = torch.empty(8, 1024, 1024, device="meta", dtype=torch.bfloat16)
    point = torch.empty(8, 1024, 3, device="meta", dtype=torch.bfloat16)
    for summed, kept in (("j", "i"), ("i", "j")):
        over = Sweep(
            {"b": 8, kept: 1024, "c": 3},
            {summed: 1024},
            [(distance, "b i j"), (point, f"b {summed} c")],
            [(point, f"b {kept} c")],
        )
        assert over.sharing_rows == 3
        assert over.rows_are_contiguous == (summed == "i")
        block = blocks_on_an_h200(monkeypatch, over, Reducing(1, 1))
        assert (block.rows, block.columns) == (128, 16)


def test_what_lies_along_the_columns_is_read_for_several_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient of a box is summed up over the corners of all others."""
    overlap = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
    corner = torch.empty(4096, device="meta", dtype=torch.bfloat16)
    for corners, rows in ((4, 16), (3, 1)):
        reads = [(overlap, "a b"), *[(corner, "a")] * corners, *[(corner, "b")] * corners]
        over = Sweep({"a": 4096}, {"b": 4096}, reads, [(corner, "a")])
        assert blocks_on_an_h200(monkeypatch, over, Reducing(1, 1)).rows == rows
        flat = Sweep({"a": 4096, "b": 4096}, {}, reads[1:], [(overlap, "a b")])
        assert tile(flat, 2, 0).rows == (4 if corners == 4 else 1)


def test_programs_with_much_in_registers_have_more_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(16384, 2048, device="meta", dtype=torch.bfloat16)
    column = torch.empty(2048, device="meta", dtype=torch.bfloat16)
    warps = []
    for reductions in (1, 2):
        over = Sweep({"c": 2048}, {"n": 16384}, [(x, "n c"), (x, "n c")], [(column, "c")])
        block = blocks_on_an_h200(monkeypatch, over, Reducing(1, reductions))
        warps.append(block.rows * block.columns // block.warps)
    assert warps == [2048, 1024]


def test_long_rows_of_neighbours_are_kept_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax over 2048 rows of 64 columns reads sectors, once, in place of lines, twice."""
    x = torch.empty(256, 2048, 64, device="meta", dtype=torch.bfloat16)
    over = Sweep({"b": 256, "c": 64}, {"n": 2048}, [(x, "b n c")], [(x, "b n c")])
    block = blocks_on_an_h200(monkeypatch, over, Reducing(2, 2, stores_columns=True))
    assert (block.rows, block.columns, block.warps, block.parts) == (16, 2048, 16, 0)


def test_rows_that_are_also_summed_are_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One operand leaves room for more programs; many leave room for one row."""
    x = torch.empty(50176, 192, device="meta", dtype=torch.bfloat16)
    column = torch.empty(192, device="meta", dtype=torch.bfloat16)
    found = []
    for reads in (1, 2, 8):
        over = Sweep({"n": 50176}, {"c": 192}, [(x, "n c")] * reads, [(x, "n c"), (column, "c")])
        block = blocks_on_an_h200(monkeypatch, over, Reducing(1, 1, True, sums=1))
        found.append((block.rows, block.warps, block.turns))
    assert found == [(4, 2, 6), (4, 2, 12), (1, 1, 24)]


@pytest.mark.parametrize("columns", [1, 7, 13, 100, 511, 1000, 4096])
def test_sums_over_rows_own_columns_alone(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """A program owns no more columns than there are: rows that follow them in memory are none."""
    monkeypatch.setattr(gpu_limits, "multiprocessors", lambda device: 132)
    x = torch.empty(65536, columns, device="meta")
    total = torch.empty(columns, device="meta")
    sizes = {"length": 65536}, {"width": columns}
    over = Sweep(*sizes, [(x, "length width")], [(x, "length width"), (total, "width")])
    block = block_of_columns(over, 4, 0, torch.device("cuda"))
    assert block.columns <= max(16, 2 * columns)
    assert block.rows * block.columns >= 1024
    programs = -(-65536 // (block.rows * block.turns)) * -(-columns // block.columns)
    assert min(264, 32 * columns) <= programs <= 2048


def test_heavy_blocks_of_neighbouring_rows_have_more_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that end where no pack does, and parts of operands, count as the whole ones do."""
    x = torch.empty(64, 1024, 512, device="meta")
    sizes = {"width": 512}, {"batch": 64, "length": 1023}
    parts = [(x[:, first : first + 1023], "batch length width") for first in (0, 1) * 3]
    total = torch.empty(512, device="meta")
    few, many = (
        blocks_on_an_h200(
            monkeypatch, Sweep(*sizes, parts[:count], [(total, "width")]), Reducing(1, 1)
        )
        for count in (1, 6)
    )
    assert many.rows * many.columns // many.warps < few.rows * few.columns // few.warps
    y = torch.empty(16384, 50, 33, device="meta", dtype=torch.bfloat16)
    rows, columns = {"batch": 16384, "width": 33}, {"length": 50}
    odd = Sweep(rows, columns, [(y, "batch length width")], [(y, "batch length width")])
    block = blocks_on_an_h200(monkeypatch, odd, Reducing(2, 2, stores_columns=True))
    assert (block.rows, block.columns, block.warps) == (64, 64, 8)


@pytest.mark.parametrize(
    ("columns", "dtype", "reads", "held"),
    [
        (10007, torch.float32, 1, (16384, 16)),
        (10007, torch.float32, 2, (8192, 32)),  # whole, a third of the registers would be idle
        (16384, torch.float32, 2, (16384, 32)),
        (32000, torch.float32, 1, (32768, 32)),
        (32000, torch.float32, 2, (16384, 32)),
        (32000, torch.bfloat16, 2, (32768, 32)),
        (50257, torch.bfloat16, 1, (8192, 32)),
        (65536, torch.float32, 1, (16384, 32)),
        (16384, torch.float32, 3, (8192, 32)),
    ],
)
def test_long_rows_stay_in_the_registers_or_in_the_cache_between_sweeps(
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    dtype: torch.dtype,
    reads: int,
    held: tuple[int, int],
) -> None:
    monkeypatch.setattr(gpu_limits, "multiprocessors", lambda device: 132)
    x = torch.empty(1024, columns, device="meta", dtype=dtype)
    sizes = {"length": 1024}, {"width": columns}
    read = [(x, "length width")] * reads
    over = Sweep(*sizes, read, [(x, "length width")])
    reducing = Reducing(1, 1, stores_columns=True)
    block = block_of_rows(over, x.element_size(), 0, reducing, torch.device("cuda"))
    assert (block.rows, block.columns, block.warps) == (1, *held)


def test_a_row_that_one_sweep_reads_needs_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(4096, 32000, device="meta", dtype=torch.bfloat16)
    sizes = {"length": 4096}, {"width": 32000}
    over = Sweep(*sizes, [(x, "length width")], [(x, "length width")])
    found = [
        blocks_on_an_h200(monkeypatch, over, Reducing(1, 1, stores_columns=True, idle=idle))
        for idle in (0, 1)
    ]
    assert [(block.columns, block.warps) for block in found] == [(32768, 32), (4096, 4)]


def test_windows_of_several_lines_are_spread_over_more_warps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.empty(64, 512, 7, 4, 7, 4, device="meta")
    pooled = torch.empty(64, 512, 7, 7, device="meta")
    rows = {"batch": 64, "channels": 512, "group": 7, "group_2": 7}
    columns = {"height": 4, "width": 4}
    read = [(x, "batch channels group height group_2 width")]
    over = Sweep(rows, columns, read, [(pooled, "batch channels group group_2")])
    block = blocks_on_an_h200(monkeypatch, over, Reducing(1, 1))
    assert (block.rows, block.columns, block.warps) == (64, 16, 4)


def test_positions_take_registers_beside_values(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(32768, 196, device="meta")
    places = torch.empty(32768, device="meta", dtype=torch.int64)
    over = Sweep({"length": 32768}, {"width": 196}, [(x, "length width")], [(places, "length")])
    found = [
        blocks_on_an_h200(monkeypatch, over, Reducing(2, 2, has_integers=whole)).rows
        for whole in (False, True)
    ]
    assert found == [8, 4]


def test_few_elements_of_many_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_limits, "multiprocessors", lambda device: 132)
    x = torch.empty(64, 512, 1024, device="meta", dtype=torch.bfloat16)
    dims = "batch length width"
    sizes = {"batch": 64, "length": 512, "width": 1024}
    few, many = (
        tile(Sweep(sizes, {}, [(x, dims)] * count, [(x, dims)]), 2, 0) for count in (3, 12)
    )
    of_a_thread = [one.rows * one.columns // (32 * one.warps) for one in (few, many)]
    assert of_a_thread == [16, 4]


@triton.jit
def scaled_rows(
    x_pointer, scale_pointer, counts, sizes, divisors, x_strides, scale_strides,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    element, is_row, is_column = tile_of(
        sizes, divisors, counts, 1, BLOCK_ROWS, BLOCK_COLUMNS, False
    )
    at = x_pointer + offset(element, x_strides)
    scale = load(scale_pointer + offset(element, scale_strides), is_row, is_column)
    tl.store(at, load(at, is_row, is_column) * scale, is_row & is_column)


@pytest.mark.parametrize(
    ("dtype", "columns", "width"),
    [
        (torch.bfloat16, 1000, "v4.b32"),
        (torch.float32, 100, "v4.b32"),
        (torch.bfloat16, 1024, "v4.b32"),
    ],
)
def test_rows_whose_width_a_pack_divides_are_loaded_in_packs(
    dtype: torch.dtype, columns: int, width: str
) -> None:
    """Triton itself looks for what 16 divides; other powers of two stand behind a size."""
    x = torch.empty(64, columns, dtype=dtype, device="meta")
    scale = torch.empty(64, device="meta")
    sizes = {"length": 64, "width": columns}
    over = swept_of(sizes, (x, "length width"), (scale, "length"))
    block = tile(over, x.element_size(), 0)
    assert block.column_loops == 1
    counts = (64, *_with_factor(columns))
    args = (MockTensor(dtype), MockTensor(torch.float32), counts, *_loops(over, 1)[:4])
    blocks = {"BLOCK_ROWS": 1, "BLOCK_COLUMNS": 1024}
    made = compiled_launch(scaled_rows, architecture("sm_90"), args, blocks)
    assert f"ld.global.{width}" in made.texts["ptx"] and f"st.global.{width}" in made.texts["ptx"]


def swept_of(sizes: dict[str, int], x: tuple[Tensor, str], scale: tuple[Tensor, str]) -> Sweep:
    return Sweep(sizes, {}, [x, scale], [x])


def test_strides_have_a_factor_behind_them_that_no_quotient_of_1_hides() -> None:
    zero, one, eight = tl.constexpr(0), tl.constexpr(1), tl.constexpr(8)
    assert _factored((1000, 1)) == (125, one, eight)
    assert _factored((zero, 24, 1)) == (zero, 3, one, eight)
    assert _factored((8, 1)) == (2, one, tl.constexpr(4))
    for strides in ((16, 1), (48, 32), (7, 1), (2, 1), (1,), (zero, 1), ()):
        assert _factored(strides) == strides
    assert _with_factor(1000) == (125, eight)
    assert [_with_factor(count) for count in (0, 1, 7, 16, 96)] == [(0,), (1,), (7,), (16,), (96,)]


def test_odd_rows_get_tiles_of_their_own_where_many_values_belong_to_a_row() -> None:
    x = torch.empty(64, 50257, device="meta", dtype=torch.bfloat16)
    values = [(torch.empty(64, device="meta"), "length")] * 3
    sizes = {"length": 64, "width": 50257}
    reads = [(x, "length width"), *values]
    many = tile(Sweep(sizes, {}, reads, [(x, "length width")]), 2, 0)
    assert (many.column_loops, many.rows, many.columns, many.warps) == (1, 1, 2048, 4)
    few = tile(Sweep(sizes, {}, reads[:2], [(x, "length width")]), 2, 0)
    assert few.column_loops == 2
    short = torch.empty(64, 100, device="meta")
    block = tile(swept_of({"length": 64, "width": 100}, (short, "length width"), values[0]), 4, 0)
    assert (block.rows, block.columns) == (8, 128)


def _loss(rows: int, columns: int, operands: int) -> Sweep:
    """Return the sweep of a loss over several tensors, one of which has longer rows."""
    names = {"length": rows, "width": columns}
    tensors = [torch.empty(rows, columns, device="meta") for _ in range(operands - 1)]
    tensors.append(torch.empty(rows, columns + 1, device="meta")[:, 1:])
    reading = [(one, "length width") for one in tensors]
    return Sweep({}, names, reading, [(torch.empty((), device="meta"), "")])


def test_a_loss_over_several_operands_is_shared_by_all_multiprocessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single row is no reason for narrow blocks, in which each operand would be read for several
    rows at a time."""
    monkeypatch.setattr(gpu_limits, "multiprocessors", lambda device: 132)
    reducing = Reducing(sweeps=1, reductions=1)
    block = block_of_rows(_loss(4096, 200, 5), 4, 0, reducing, torch.device("cuda"))
    assert (block.rows, block.columns, block.parts) == (1, 2048, 256)
    short = block_of_rows(_loss(64, 200, 5), 4, 0, reducing, torch.device("cuda"))
    assert short.parts in (0, 1)  # too few elements for another launch


@pytest.mark.parametrize(
    ("columns", "rows", "across"), [(3000, 1, 1024), (582, 8, 128), (60, 16, 64)]
)
def test_rows_of_which_nothing_is_kept_have_small_blocks(
    columns: int, rows: int, across: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of an elementwise function and of a number for each row come from one pass."""
    monkeypatch.setattr(gpu_limits, "multiprocessors", lambda device: 132)
    x = torch.empty(100_000, columns, dtype=torch.bfloat16, device="meta")
    scale = torch.empty(100_000, device="meta")
    full, of_rows = (x, "length width"), (scale, "length")
    sizes = ({"length": 100_000}, {"width": columns})
    over = Sweep(*sizes, [full, full, of_rows], [full, of_rows])
    reducing = Reducing(sweeps=1, reductions=1)
    block = block_of_rows(over, 2, 0, reducing, torch.device("cuda"))
    assert (block.rows, block.columns, block.warps) == (rows, across, 4)


def _windows(sizes: tuple[int, ...], dtype: torch.dtype, is_last: bool) -> Sweep:
    """Return the sweep of a pooling of 3 x 3 elements with step 1; ``is_last``: channels last."""
    order = torch.channels_last if is_last else torch.contiguous_format
    x = torch.empty(sizes, dtype=dtype, device="meta", memory_format=order)
    names = dict(zip(("batch", "channels", "height", "width"), sizes, strict=True))
    positions: list[tuple[Tensor | None, str]] = [
        *((None, name) for name in ("height", "group", "width", "group_2")),
        (x, "batch channels ? ?"),
    ]
    written = [(torch.empty_like(x), "batch channels height width")]
    swept = Sweep(names, {"group": 3, "group_2": 3}, positions, written)
    return swept.over_elements().by_result()


def test_tiles_of_windows_are_rows_of_an_image_where_these_fill_them() -> None:
    assert _windows((4, 8, 56, 56), torch.float32, False).window == 9
    block = tile(_windows((4, 8, 56, 56), torch.float32, False), 4, 0)
    assert (block.rows, block.columns, block.column_loops, block.warps) == (8, 64, 1, 4)
    block = tile(_windows((4, 8, 65, 65), torch.float32, False), 4, 0)
    assert (block.rows, block.columns, block.column_loops) == (1, 512, 2)


@pytest.mark.parametrize(("dtype", "warps"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_thread_has_one_pack_of_channels(dtype: torch.dtype, warps: int) -> None:
    block = tile(_windows((4, 64, 56, 56), dtype, True), dtype.itemsize, 0)
    assert (block.rows, block.columns, block.column_loops, block.warps) == (8, 64, 1, warps)

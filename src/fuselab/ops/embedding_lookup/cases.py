"""The tables, ids, cases and draws of all embedding operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.criteo import KAGGLE_CARDINALITIES
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops._shared.indices import ID_DTYPES
from fuselab.ops.embedding_lookup.validation import HASHES, OUT_OF_RANGE

# The (samples, rows of each table, tags) that are timed: Criteo's tables, 2 GiB in float32 at
# D = 16, and the same tables cut to 100,000 rows each, 65 MB.
_CAPPED = tuple(min(rows, 100_000) for rows in KAGGLE_CARDINALITIES)
TIMED = (
    *((batch, KAGGLE_CARDINALITIES, ("huge",)) for batch in (128, 2048, 65536)),
    *((batch, _CAPPED, tags) for batch, tags in ((128, ("tiny",)), (2048, ()))),
)
# The sizes timed on a CPU, which move from 64 kB to 200 MB, and those timed in every dtype.
TIMED_ON_CPU = (
    (20, _CAPPED, 16),
    (128, _CAPPED, 16),
    (1000, (1000,) * 8, 33),
    (4096, (100_000,), 128),
    (777, (5000,) * 26, 65),
    (2048, _CAPPED, 16),
    (8192, _CAPPED, 16),
    (16384, (50_000,) * 4, 64),
    (16384, _CAPPED, 16),
    (10000, (1000,) * 26, 33),
    (32768, _CAPPED, 16),
    (60000, _CAPPED, 16),
)
TIMED_IN_EVERY_DTYPE = ((2, (7, 5), 8), (64, (1000,) * 5, 16), (2048, (20_000,) * 26, 16))


def case_name(batch: int, sizes: Sequence[int], width: int, options: Mapping[str, Any]) -> str:
    how = " ".join(str(value).removeprefix("torch.") for value in options.values())
    return f"{batch} ids of {len(sizes)} tables, {sum(sizes)} rows x {width} {how}".strip()


def tables_and_ids(
    batch: int,
    sizes: Sequence[int],
    width: int,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    strayed: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """Return normally distributed tables, views of one storage, and uniform ids. ``strayed`` ids
    exceed their table's rows on both sides."""
    # Large tables are filled on the device: drawing 2 GiB of normal numbers takes the CPU 20 s.
    large = sum(sizes) * width > 2**26
    if large:
        flat = torch.empty(sum(sizes), width, dtype=dtype, device=device).uniform_(-1, 1)
    else:
        flat = torch.randn(sum(sizes), width, generator=generator).to(device, dtype)
    bounds = torch.tensor(sizes, dtype=torch.float64)
    ids = (
        torch.rand((batch, len(sizes)), generator=generator, dtype=torch.float64) * bounds
    ).long()
    if strayed:
        ids += torch.randint(-3, 4, ids.shape, generator=generator)
    return list(flat.split(list(sizes))), ids.to(device)


def draw(draw: Draw) -> Inputs:
    """Return random tables and ids; some ids are out of range where the rule allows it."""
    tables, ids, rules = _drawn(draw)
    return Inputs((tables, ids), {**rules, "dtype": draw.choice((None, *FLOATING))})


def draw_gradient(draw: Draw) -> tuple[list[Tensor], Tensor, Tensor, dict[str, str | None]]:
    """Return the tables, the ids, the upstream gradient and the rules of an update."""
    tables, ids, rules = _drawn(draw)
    dtype = draw.choice((None, *FLOATING))
    return tables, ids, draw.tensor(*ids.shape, tables[0].shape[1], dtype=dtype), rules


def _drawn(draw: Draw) -> tuple[list[Tensor], Tensor, dict[str, str | None]]:
    batch, width, count = draw.size(31, 33), draw.size(16, 128), draw.choice((1, 2, 5, 26, 33))
    sizes = [draw.choice((3, 1, 2, 17)) for _ in range(count)]
    hash = draw.choice((None, *HASHES))
    out_of_range = draw.choice(OUT_OF_RANGE)
    dtype = draw.choice(ID_DTYPES)
    stray = 9 if hash or out_of_range != "error" else 0
    smallest = min(sizes)
    ids = draw.integers(batch, count, low=-stray, high=smallest + stray, dtype=dtype)
    # Only the first table gets a random layout. Kernels want contiguous rows in every table, and
    # few draws would have them in all of many.
    first, *others = (draw.tensor(size, width) for size in sizes)
    tables = [first, *(table.contiguous() for table in others)]
    return tables, ids, {"out_of_range": out_of_range, "hash": hash}


def space(draw: Draw) -> Inputs:
    """Return tables and ids as recommendation models have them; the batch grows."""
    tables, ids, rules = _space(draw)
    return Inputs(
        (tables, ids), {**rules, "dtype": draw.choice((None, None, None, torch.bfloat16))}
    )


def space_gradient(draw: Draw) -> tuple[list[Tensor], Tensor, Tensor, dict[str, str | None]]:
    """Return the arguments of ``draw_gradient`` as recommendation models have them."""
    tables, ids, rules = _space(draw)
    return tables, ids, draw.tensor(*ids.shape, tables[0].shape[1]), rules


def _space(draw: Draw) -> tuple[list[Tensor], Tensor, dict[str, str | None]]:
    batch, width = draw.size(), draw.choice((16, 8, 32, 64, 100, 128, 256))
    sizes = [draw.choice((1000, 37, 20_000, 100_000)) for _ in range(draw.choice((26, 1, 4, 8)))]
    rules: dict[str, str | None] = draw.choice(
        ({}, {}, {"out_of_range": "clamp"}, {"hash": "modulus"})
    )
    ids = draw.integers(batch, len(sizes), low=0, high=1 << 31)
    if "hash" not in rules:
        ids = ids % torch.tensor(sizes, device=ids.device)
    tables = [draw.tensor(size, width).contiguous() for size in sizes]
    return tables, ids, rules


def _case(batch: int, sizes: Sequence[int], width: int, *tags: str, **kwargs: Any) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        strayed = bool(kwargs.keys() - {"dtype"})
        tables, ids = tables_and_ids(batch, sizes, width, device, dtype, generator, strayed)
        return Inputs((tables, ids), kwargs)

    return Case(case_name(batch, sizes, width, kwargs), make, frozenset(tags))


SMALL = (3, 1, 105, 27, 5000)


CPU_CASES = (
    *(_case(*case, *cpu_sizes.ROW) for case in TIMED_ON_CPU),
    *(_case(*case, *cpu_sizes.DTYPES) for case in TIMED_IN_EVERY_DTYPE),
)


CASES = (
    *(_case(batch, sizes, 16, "bench", "sweep", *tags) for batch, sizes, tags in TIMED),
    _case(65536, KAGGLE_CARDINALITIES, 16, "bench", "huge", dtype=torch.bfloat16),
    *(_case(7, SMALL, width, "boundary") for width in (1, 2, 3, 4, 7, 8, 16, 17, 127, 128, 129)),
    *(_case(batch, SMALL, 16, "boundary") for batch in (0, 1, 2, 51, 52, 255, 256, 257)),
    *(_case(100, SMALL, 16, "boundary", out_of_range=rule) for rule in ("clamp", "ignore")),
    _case(100, SMALL, 16, "boundary", hash="modulus"),
    *(_case(100, SMALL, 16, "boundary", dtype=dtype) for dtype in FLOATING),
    _case(100, SMALL, 17, "boundary", dtype=torch.bfloat16),
    _case(5, (4,) * 33, 4, "boundary"),
    _case(3, (4,) * 257, 4, "boundary"),
    _case(40, (1,), 1200, "boundary"),
)

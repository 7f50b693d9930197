"""Configurations that tuning may choose from: rows in flight of the look-up, and how a gradient is
brought to rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.ops.embedding_lookup.change import Change
from fuselab.ops.embedding_lookup.description import MOST
from fuselab.ops.embedding_lookup.rules import compute_dtype
from fuselab.ops.embedding_lookup.spread import Spread
from fuselab.runtime import tuning
from fuselab.runtime.gpu_limits import multiprocessors, shared_bytes
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tuning import Config

LOOK_UP_AHEAD = (4, 2, 8)
SCATTER_SAMPLES = (1024, 256)
TILE_SAMPLES = (32, 16)
RUNS = (32, 16, 8)
MOST_SAMPLES = 4096  # kMostSamples of cuda_kernels.cu
_TILE_THREADS = 128  # kTileThreads


def look_up(
    tables: Sequence[Tensor], ids: Tensor, out_of_range: str, hash: str | None
) -> tuple[Config, ...]:
    """``ahead``: rows in flight per thread."""
    return tuple(Config(ahead=ahead) for ahead in LOOK_UP_AHEAD)


def chosen_look_up(
    tables: Sequence[Tensor], ids: Tensor, out_of_range: str, hash: str | None
) -> Config:
    key = _key(len(tables), tables[0].shape[1], tables[0].dtype, ids.shape[0])
    candidates = look_up(tables, ids, out_of_range, hash)
    return tuning.chosen("fuselab::embedding_lookup", "cuda", key, candidates)


def change(
    how: Change,
    tables: Sequence[Tensor | None],
    rows: Sequence[int],
    ids: Tensor,
    grad_output: Tensor,
) -> tuple[Config, ...]:
    """``kernel`` and what it has. Atomics where their order may vary and their rounding does not
    matter: ``scatter`` of ``samples`` of one table per block (more of them make larger runs, fewer
    make more blocks), or ``tiles`` of ``samples`` of all tables. In 16 bits, for row-wise Adagrad,
    and where PyTorch shall be deterministic, ``sorted`` positions, ``run`` of them per group, or,
    of few samples, a block per ``table``.
    """
    if (
        how.update == "rowwise_adagrad"
        or grad_output.element_size() < 4
        or torch.are_deterministic_algorithms_enabled()
    ):
        by_run = [Config(kernel="sorted", run=run) for run in RUNS]
        spread = Spread.of_change(tables, grad_output)
        if ids.shape[0] > MOST_SAMPLES or spread.tiles > 1 or spread.lanes > 8:
            return tuple(by_run)
        return (*by_run, Config(kernel="table"))
    batch, count = ids.shape
    many, few = SCATTER_SAMPLES
    enough = 2 * multiprocessors(ids.device)
    samples = (many, few) if count * ceil_div(batch, many) >= enough else (few, many)
    scatter = [Config(kernel="scatter", samples=number) for number in samples]
    tiles = [
        Config(kernel="tiles", samples=number)
        for number in TILE_SAMPLES
        if _fits_tiles(tables, rows, grad_output, number)
    ]
    return (*scatter, *tiles)


def chosen_change(
    how: Change,
    tables: Sequence[Tensor | None],
    rows: Sequence[int],
    ids: Tensor,
    grad_output: Tensor,
) -> Config:
    candidates = change(how, tables, rows, ids, grad_output)
    name, implementation = {
        "gradient": ("embedding_lookup", "cuda_backward"),
        "sgd": ("embedding_sgd_", "cuda"),
        "rowwise_adagrad": ("embedding_adagrad_", "cuda"),
    }[how.update]
    order = "sorted" if candidates[0].kernel == "sorted" else "atomic"
    key = (*_key(len(tables), grad_output.shape[2], grad_output.dtype, ids.shape[0]), order)
    return tuning.chosen(f"fuselab::{name}", implementation, key, candidates)


def tile_bytes(tables: int, width: int, samples: int) -> int:
    """Shared memory of scatter_tiles: gradients; address, pitch and rows of tables; places."""
    return samples * tables * width * 4 + tables * (20 + 4 * (samples + 1))


def _fits_tiles(
    tables: Sequence[Tensor | None], rows: Sequence[int], grad_output: Tensor, samples: int
) -> bool:
    """Whether scatter_tiles takes these: float rows of 4, 8, ... 128, whole 16 bytes everywhere, at
    least half of a block's threads with a table to walk, and two blocks on a multiprocessor."""
    count, width = grad_output.shape[1:]
    lanes = width // 4
    return (
        grad_output.dtype == torch.float32
        and width in (4, 8, 16, 32, 64, 128)
        and Spread.of_change(tables, grad_output) == Spread(4, lanes, 1)
        and count <= MOST
        and count * lanes >= _TILE_THREADS // 2
        and max(rows) < 2**31 - 1
        and grad_output.is_contiguous()
        and 2 * tile_bytes(count, width, samples) <= shared_bytes(grad_output.device)
    )


def table_size(batch: int) -> int:
    """Keys that a block of update_tables sorts."""
    return power_of_two(batch, 64)


def table_threads(size: int) -> int:
    return min(size // 2, 1024)


def table_bytes(size: int, spread: Spread, grad_output: Tensor) -> int:
    """Shared memory of update_tables: keys, and two partial sums per group of lanes."""
    row = grad_output.shape[2] * compute_dtype(grad_output.dtype).itemsize
    return 8 * size + 2 * table_threads(size) // spread.lanes * row


def _key(tables: int, width: int, dtype: torch.dtype, batch: int) -> tuple[object, ...]:
    return (dtype, tables, width, power_of_two(batch, 128, 65536))

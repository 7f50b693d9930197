"""Configurations that tuning may choose from: rows in flight of the look-up, and how a gradient is
brought to rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

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


_LOOK_UP = tuple(Config(ahead=ahead) for ahead in LOOK_UP_AHEAD)


def look_up(
    tables: Sequence[Tensor], ids: Tensor, out_of_range: str, hash: str | None
) -> tuple[Config, ...]:
    """``ahead``: rows in flight per thread."""
    return _LOOK_UP


def chosen_look_up(tables: Sequence[Tensor], ids: Tensor) -> Config:
    key = _key(len(tables), tables[0].shape[1], tables[0].dtype, ids.shape[0])
    return tuning.chosen("fuselab::embedding_lookup", "cuda", key, _LOOK_UP)


def change(
    update: str, spread: Spread, rows: Sequence[int], ids: Tensor, grad_output: Tensor
) -> tuple[Config, ...]:
    """``kernel`` and what it has, for ``Change.update``. Atomics where their order may vary and
    their rounding does not matter: ``scatter`` of ``samples`` of one table per block (more of them
    make larger runs, fewer make more blocks), or ``tiles`` of ``samples`` of all tables. In 16
    bits, for row-wise Adagrad, and where PyTorch shall be deterministic, ``sorted`` positions,
    ``run`` of them per group, or, of few samples, a block per ``table``.
    """
    batch, count = ids.shape
    if (
        update == "rowwise_adagrad"
        or grad_output.element_size() < 4
        or torch.are_deterministic_algorithms_enabled()
    ):
        return _in_order(batch <= MOST_SAMPLES and spread.tiles == 1 and spread.lanes <= 8)
    enough = count * ceil_div(batch, SCATTER_SAMPLES[0]) >= 2 * multiprocessors(ids.device)
    return _by_atomics(enough, _tile_samples(spread, rows, grad_output))


@functools.cache
def _in_order(by_table: bool) -> tuple[Config, ...]:
    by_run = [Config(kernel="sorted", run=run) for run in RUNS]
    return (*by_run, Config(kernel="table")) if by_table else tuple(by_run)


@functools.cache
def _by_atomics(enough: bool, tiles: Sequence[int]) -> tuple[Config, ...]:
    """``enough``: blocks of most samples for every multiprocessor."""
    samples = SCATTER_SAMPLES if enough else SCATTER_SAMPLES[::-1]
    scatter = [Config(kernel="scatter", samples=number) for number in samples]
    return (*scatter, *(Config(kernel="tiles", samples=number) for number in tiles))


def chosen_change(
    update: str, spread: Spread, rows: Sequence[int], ids: Tensor, grad_output: Tensor
) -> Config:
    candidates = change(update, spread, rows, ids, grad_output)
    name, implementation = {
        "gradient": ("fuselab::embedding_lookup", "cuda_backward"),
        "sgd": ("fuselab::embedding_sgd_", "cuda"),
        "rowwise_adagrad": ("fuselab::embedding_adagrad_", "cuda"),
    }[update]
    order = "sorted" if candidates[0].kernel == "sorted" else "atomic"
    key = (*_key(len(rows), grad_output.shape[2], grad_output.dtype, ids.shape[0]), order)
    return tuning.chosen(name, implementation, key, candidates)


def tile_bytes(tables: int, width: int, samples: int) -> int:
    """Shared memory of scatter_tiles: gradients; address, pitch and rows of tables; places."""
    return samples * tables * width * 4 + tables * (20 + 4 * (samples + 1))


def _tile_samples(spread: Spread, rows: Sequence[int], grad_output: Tensor) -> tuple[int, ...]:
    """What scatter_tiles takes of these: float rows of 4, 8, ... 128, whole 16 bytes everywhere, at
    least half of a block's threads with a table to walk, and two blocks on a multiprocessor."""
    count, width = grad_output.shape[1:]
    lanes = width // 4
    if (
        grad_output.dtype != torch.float32
        or width not in (4, 8, 16, 32, 64, 128)
        or spread != Spread(4, lanes, 1)
        or not _TILE_THREADS // 2 <= count * lanes <= MOST * lanes
        or max(rows) >= 2**31 - 1
        or not grad_output.is_contiguous()
    ):
        return ()
    most = shared_bytes(grad_output.device) // 2
    return tuple(number for number in TILE_SAMPLES if tile_bytes(count, width, number) <= most)


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

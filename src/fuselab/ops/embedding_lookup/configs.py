"""Configurations that tuning may choose from, for the look-up and for the change of rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fuselab.ops.embedding_lookup.row_threads import Spread
from fuselab.ops.embedding_lookup.row_update import RowUpdate
from fuselab.ops.embedding_lookup.table_groups import MOST, Group, alignment
from fuselab.runtime import tuning
from fuselab.runtime.gpu_limits import multiprocessors, shared_bytes
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tuning import Config

THREADS = 256  # kThreads of cuda_kernels.cu
RUNS = (32, 8)
MOST_SAMPLES = 4096  # kMostSamples
SCATTER = Config(kernel="scatter")
POSITIONS = Config(kernel="positions")
MOST_THREADS = 1024  # kMostThreads
MOST_PLACES = 32
SAMPLES_AHEAD = 4  # kSamplesAhead
SAMPLES = Config(kernel="samples")
MANY_SAMPLES = 8192


def look_up(ids: Tensor, chunk_bytes: int, chunks: int) -> tuple[Config, ...]:
    """Return the look-up's candidates, the default first.

    Kernel ``samples`` has one block per multiprocessor, which stays and takes whole samples. It is
    the default if there is a sample for every place of these blocks. Kernel ``positions`` has
    blocks of single (sample, table) positions. On an H200 with Criteo's 26 tables x 16 float32,
    whole samples win from about 2048 samples on. Fetching rows 2 or 6 samples ahead instead of 4,
    two blocks of 512 threads, and streaming stores gained nothing.
    """
    if chunks > 32:
        return (POSITIONS,)
    lanes = power_of_two(chunks)
    by_samples = _by_samples(ids, chunk_bytes, lanes)
    if by_samples and ids.shape[0] < multiprocessors(ids.device) * places(ids.shape[1], lanes):
        return (POSITIONS, *by_samples)
    return (*by_samples, POSITIONS)


def chosen_look_up(ids: Tensor, chunk_bytes: int, chunks: int) -> Config:
    samples = power_of_two(ids.shape[0], 128, 65536)
    key = (chunk_bytes, chunks, ids.shape[1], samples)
    candidates = look_up(ids, chunk_bytes, chunks)
    return tuning.chosen("fuselab::embedding_lookup", "cuda", key, candidates)


def row_chunk(group: Group, width: int, itemsize: int, output_itemsize: int) -> tuple[int, int]:
    """Return the bytes that a thread of a look-up moves at a time (at most 16 read or written) and
    how many of these chunks make a row."""
    step = alignment(*group.addresses, *group.pitches, width * itemsize)
    step = min(step, itemsize * 16 // output_itemsize)
    return step, width * itemsize // step


def _by_samples(ids: Tensor, chunk_bytes: int, lanes: int) -> tuple[Config, ...]:
    """Return the configuration that takes whole samples, or none where it does not apply. It needs
    one launch for all tables, chunks of 4, 8 or 16 bytes, and at most ``MOST_PLACES`` samples at a
    time, so that a block keeps few partial sums of a row."""
    tables = ids.shape[1]
    if tables > MOST or chunk_bytes not in (4, 8, 16):
        return ()
    if not 1 <= places(tables, lanes) <= MOST_PLACES:
        return ()
    return (SAMPLES,) if ring_bytes(chunk_bytes, ids) <= shared_bytes(ids.device) else ()


def ring_bytes(chunk_bytes: int, ids: Tensor) -> int:
    """Return the bytes of shared memory for loads in flight: chunks and ids for every thread."""
    return SAMPLES_AHEAD * MOST_THREADS * (chunk_bytes + ids.element_size())


def places(tables: int, lanes: int) -> int:
    """Return the samples that a block takes at a time."""
    return MOST_THREADS // (tables * lanes)


def samples_shape(ids: Tensor, lanes: int) -> tuple[int, int]:
    """Return the blocks and the threads per block of a kernel that takes whole samples."""
    at_once = places(ids.shape[1], lanes)
    blocks = min(multiprocessors(ids.device), ceil_div(ids.shape[0], at_once))
    return blocks, ceil_div(at_once * ids.shape[1] * lanes, 32) * 32


@functools.lru_cache
def summed_rows(rows: tuple[int, ...], most: int) -> tuple[int, int]:
    """Choose the smallest tables that have at most ``most`` rows together; return the rows of the
    largest of them, and the rows of all. Tables of equal length are all chosen or all left out. If
    none is chosen, the result is (-1, 0)."""
    ordered = sorted(rows)
    for count, sum_ in zip(range(len(rows), 0, -1), [*accumulate(ordered)][::-1], strict=True):
        if sum_ <= most and (count == len(rows) or ordered[count] > ordered[count - 1]):
            return ordered[count - 1], sum_
    return -1, 0


def shared_sums(
    how: RowUpdate, spread: Spread, ids: Tensor, grad_output: Tensor, rows: Sequence[int]
) -> tuple[int, int, int]:
    """Return the rows of the largest table that scatter_samples sums in shared memory, the rows of
    all tables that it sums there, and the bytes of shared memory that it needs."""
    ring = ring_bytes(spread.vector * grad_output.element_size(), ids)
    row = spread.lanes * spread.vector * how.dtype.itemsize
    sums = places(ids.shape[1], spread.lanes) * row + 8  # the sums of a row, and its address
    room = (shared_bytes(ids.device) - ring - 8) // sums
    most_rows, summed = summed_rows(tuple(rows), room)
    return most_rows, summed, ring + summed * sums + summed % 2 * 8


def change(
    how: RowUpdate, spread: Spread, ids: Tensor, grad_output: Tensor, rows: Sequence[int]
) -> tuple[Config, ...]:
    """Return the candidates for changing rows by ``how`` in tables with ``rows`` rows each.

    Atomics are used where their order may vary and their rounding does not matter. They go by whole
    ``samples`` if there are many and shared memory has room for all tables of fewer than
    ``THREADS`` rows, which ``scatter`` would sum before its atomics; else by ``scatter``. A fixed
    order is used for tables of 16 bits, for row-wise Adagrad, and under
    ``torch.use_deterministic_algorithms``: one block per ``table`` for few samples, or ``sorted``
    positions, ``run`` of them per group.

    SGD of 65536 samples of Criteo's 26 tables x 16 float32 takes 80.8 us by samples on an H200,
    and the sum of its parts measured one by one is 83 us: 31 for the gradients and ids at 4 TB/s,
    26 for atomics on five tables larger than the L2, 9 for the next three tables, 17 for the ten
    below, and the last eight are summed in shared memory. So the kernel takes no longer than its
    parts.

    Larger runs add up more values before memory sees them, smaller runs give more blocks. The
    default is the largest run that gives every multiprocessor two blocks.
    """
    if (
        how.update == "rowwise_adagrad"
        or how.dtype.itemsize < 4
        or torch.are_deterministic_algorithms_enabled()
    ):
        by_table = ids.shape[0] <= MOST_SAMPLES and spread.tiles == 1 and spread.lanes <= 8
        threads = ids.numel() * spread.lanes // RUNS[0]
        return _in_order(by_table, threads >= 2 * multiprocessors(ids.device) * THREADS)
    if spread.tiles > 1:
        return (SCATTER,)
    chunk_bytes = spread.vector * grad_output.element_size()
    by_samples = _by_samples(ids, chunk_bytes, spread.lanes)
    if by_samples and ids.shape[0] >= MANY_SAMPLES:
        most_rows, _, _ = shared_sums(how, spread, ids, grad_output, rows)
        if not any(most_rows < count < THREADS for count in rows):
            return (*by_samples, SCATTER)
    return (SCATTER, *by_samples)


@functools.cache
def _in_order(by_table: bool, enough: bool) -> tuple[Config, ...]:
    by_run = [Config(kernel="sorted", run=run) for run in (RUNS if enough else RUNS[::-1])]
    return (Config(kernel="table"), *by_run) if by_table else tuple(by_run)


def chosen_change(
    how: RowUpdate, spread: Spread, ids: Tensor, grad_output: Tensor, rows: Sequence[int]
) -> Config:
    candidates = change(how, spread, ids, grad_output, rows)
    name, implementation = {
        "gradient": ("fuselab::embedding_lookup", "cuda_backward"),
        "sgd": ("fuselab::embedding_sgd_", "cuda"),
        "rowwise_adagrad": ("fuselab::embedding_adagrad_", "cuda"),
    }[how.update]
    order = "any order" if SCATTER in candidates else "fixed order"
    samples = power_of_two(ids.shape[0], 128, 65536)
    key = (how.dtype, grad_output.dtype, ids.shape[1], grad_output.shape[2], samples, order)
    return tuning.chosen(name, implementation, key, candidates)


def table_size(batch: int) -> int:
    """Return the number of keys that a block of update_tables sorts."""
    return power_of_two(batch, 64)


def table_threads(size: int) -> int:
    return min(size // 2, 1024)


def table_bytes(how: RowUpdate, size: int, spread: Spread, width: int) -> int:
    """Return the shared memory of update_tables in bytes: keys, and two partial sums per group of
    lanes."""
    row = width * how.compute_dtype.itemsize
    return 8 * size + 2 * table_threads(size) // spread.lanes * row

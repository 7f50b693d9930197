"""Configurations that tuning may choose from: how rows are looked up, and changed."""

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
    """``kernel``: one block per multiprocessor that stays for whole ``samples``, from one for each
    of its places on, else blocks of ``positions``.

    Criteo's 26 tables x 16 float32 on an H200, 2026-11-22, us, by samples and by positions: 9.0 and
    9.5 of 2048 samples, 14.0 and 15.1 of 8192, 57 and 63 of 65536 (44 by samples to bfloat16). Rows
    under way 2 or 6 samples before gain nothing over 4, nor do two blocks of 512 threads and
    streaming stores; rows that pass the L1 take 63."""
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
    """Bytes that a thread of a look-up moves at a time (16 at most, read or written), and how many
    of them make a row."""
    step = alignment(*group.addresses, *group.pitches, width * itemsize)
    step = min(step, itemsize * 16 // output_itemsize)
    return step, width * itemsize // step


def _by_samples(ids: Tensor, chunk_bytes: int, lanes: int) -> tuple[Config, ...]:
    """What takes whole samples: in one launch, by copies of 4, 8 or 16 bytes, one sample to
    ``MOST_PLACES`` at a time, so that a block's sums of a row are few."""
    tables = ids.shape[1]
    if tables > MOST or chunk_bytes not in (4, 8, 16):
        return ()
    if not 1 <= places(tables, lanes) <= MOST_PLACES:
        return ()
    return (SAMPLES,) if ring_bytes(chunk_bytes, ids) <= shared_bytes(ids.device) else ()


def ring_bytes(chunk_bytes: int, ids: Tensor) -> int:
    """Shared memory for what is under way: chunks and ids for every thread."""
    return SAMPLES_AHEAD * MOST_THREADS * (chunk_bytes + ids.element_size())


def places(tables: int, lanes: int) -> int:
    """Samples that a block takes at a time."""
    return MOST_THREADS // (tables * lanes)


def samples_shape(ids: Tensor, lanes: int) -> tuple[int, int]:
    """Blocks and threads of a kernel that takes whole samples."""
    at_once = places(ids.shape[1], lanes)
    blocks = min(multiprocessors(ids.device), ceil_div(ids.shape[0], at_once))
    return blocks, ceil_div(at_once * ids.shape[1] * lanes, 32) * 32


@functools.lru_cache
def summed_rows(rows: tuple[int, ...], most: int) -> tuple[int, int]:
    """Of the smallest tables that have at most ``most`` rows together: the rows of the largest, and
    of all. Tables of as many rows are all in or all out."""
    ordered = sorted(rows)
    for count, sum_ in zip(range(len(rows), 0, -1), [*accumulate(ordered)][::-1], strict=True):
        if sum_ <= most and (count == len(rows) or ordered[count] > ordered[count - 1]):
            return ordered[count - 1], sum_
    return -1, 0


def shared_sums(
    how: RowUpdate, spread: Spread, ids: Tensor, grad_output: Tensor, rows: Sequence[int]
) -> tuple[int, int, int]:
    """Of the tables that scatter_samples sums in shared memory: the rows of the largest, and of
    all. And the bytes of shared memory that it needs."""
    ring = ring_bytes(spread.vector * grad_output.element_size(), ids)
    row = spread.lanes * spread.vector * how.dtype.itemsize
    sums = places(ids.shape[1], spread.lanes) * row + 8  # of a row, and its address
    room = (shared_bytes(ids.device) - ring - 8) // sums
    most_rows, summed = summed_rows(tuple(rows), room)
    return most_rows, summed, ring + summed * sums + summed % 2 * 8


def change(
    how: RowUpdate, spread: Spread, ids: Tensor, grad_output: Tensor, rows: Sequence[int]
) -> tuple[Config, ...]:
    """``kernel`` and what it has, for ``how`` and tables of ``rows``. Atomics where their order may
    vary and their rounding does not matter: whole ``samples`` where they are many and no table that
    ``scatter`` would sum is left to atomics alone, else ``scatter``. In tables of 16 bits, for
    row-wise Adagrad, and where PyTorch shall be deterministic: of few samples a block per
    ``table``, or ``sorted`` positions, ``run`` of them per group.

    SGD of Criteo's 26 tables x 16 float32 on an H200, 2026-11-22, us, by scatter and by samples:
    10.4 and 10.9 of 2048 samples, 20.1 and 18.1 of 8192, 87.3 and 80.8 of 65536. With the look-up
    65536 take 132.8: ``nn.Embedding(sparse=True)`` and its SGD 8.8 times that, 1170, one table with
    ``index_add_`` 9.9 times, 1317. Ten times as fast as ``nn.Embedding`` would leave the update 60
    of its 81. Its parts, each by itself, make 83:
    - 31: 123 MB of gradients and ids, at 4 TB/s;
    - 26: 0.33 million atomics on rows of the five tables of 141 to 648 MB, beyond the L2's 60;
    - 9: 0.20 million on the next three (6 to 18 MB), 4 of them for what memory has to bring first;
    - 17: 0.66 million on ten tables, 3 MB together. The last eight are summed in shared memory.
    Atomics are counted as a kernel does them that adds to 1.18 million random rows of 64 bytes and
    nothing else: 30 of 20,000 rows, 35 of 200,000, 93 of 33 million (12.7 thousand rows a us), by
    red.v4, red and bulk reductions alike. In scatter, blocks of 512 or 1024 samples, gradients that
    are not staged, and five or six blocks per multiprocessor gain nothing in float32 and at most
    2 % in bfloat16.

    Larger runs add more up before memory sees it, smaller ones make more blocks. The default is
    the largest that gives every multiprocessor two. Row-wise Adagrad of 2048 samples takes 44.0 by
    table, 73.6 in runs of 8, 93.9 of 32; of 65536 samples 361.1 and 309.5.
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
    """Keys that a block of update_tables sorts."""
    return power_of_two(batch, 64)


def table_threads(size: int) -> int:
    return min(size // 2, 1024)


def table_bytes(how: RowUpdate, size: int, spread: Spread, width: int) -> int:
    """Shared memory of update_tables: keys, and two partial sums per group of lanes."""
    row = width * how.compute_dtype.itemsize
    return 8 * size + 2 * table_threads(size) // spread.lanes * row

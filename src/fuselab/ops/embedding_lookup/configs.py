"""Configurations that tuning may choose from: how rows are looked up, and changed."""

from __future__ import annotations

import functools
from itertools import accumulate

import torch
from torch import Tensor

from fuselab.ops.embedding_lookup.change import Change
from fuselab.ops.embedding_lookup.description import MOST, Group, alignment
from fuselab.ops.embedding_lookup.spread import Spread
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


def look_up(ids: Tensor, chunk_bytes: int, chunks: int) -> tuple[Config, ...]:
    """``kernel``: one block per multiprocessor that stays for whole ``samples``, from one for each
    of its places on, else blocks of ``positions``.

    Criteo's 26 tables x 16 float32 on an H200, 2026-11-22, us, by samples and by positions: 8.8 and
    9.0 of 2048 samples, 14.1 and 15.0 of 8192, 57 and 63 of 65536 (bfloat16 out: 44 and 56). Rows
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


def change(how: Change, spread: Spread, ids: Tensor, grad_output: Tensor) -> tuple[Config, ...]:
    """``kernel`` and what it has, for ``how``. Atomics where their order may vary and their
    rounding does not matter: ``scatter``, or whole ``samples``. In tables of 16 bits, for row-wise
    Adagrad, and where PyTorch shall be deterministic: of few samples a block per ``table``, or
    ``sorted`` positions, ``run`` of them per group.

    Criteo's 26 tables x 16 float32 on an H200, 2026-11-21, us. ``scatter`` of 2048 samples takes
    SGD 9.6, of 65536 84.6 (gradients in bfloat16: 10.8 and 78.1). At 65536 its reads alone take
    46.8 (53.8, of as many rows with half the bytes), the rest are atomics to 0.53 million rows.
    With the look-up's 57 that is 8 times as fast as the 1183 of ``nn.Embedding(sparse=True)`` and
    its SGD; ten times would leave the update 61. Blocks of 512 or 1024 samples, gradients that are
    not staged, and five or six blocks per multiprocessor gain nothing in float32 and at most 2 % in
    bfloat16.

    Larger runs add more up before memory sees it, smaller ones make more blocks. The default is
    the largest that gives every multiprocessor two. Row-wise Adagrad of 2048 samples takes 49.6 by
    table, 73.2 in runs of 8, 93.8 of 32; of 65536 samples 358.9 and 307.8.
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
    return (SCATTER, *_by_samples(ids, chunk_bytes, spread.lanes))


@functools.cache
def _in_order(by_table: bool, enough: bool) -> tuple[Config, ...]:
    by_run = [Config(kernel="sorted", run=run) for run in (RUNS if enough else RUNS[::-1])]
    return (Config(kernel="table"), *by_run) if by_table else tuple(by_run)


def chosen_change(how: Change, spread: Spread, ids: Tensor, grad_output: Tensor) -> Config:
    candidates = change(how, spread, ids, grad_output)
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


def table_bytes(how: Change, size: int, spread: Spread, width: int) -> int:
    """Shared memory of update_tables: keys, and two partial sums per group of lanes."""
    row = width * how.compute_dtype.itemsize
    return 8 * size + 2 * table_threads(size) // spread.lanes * row

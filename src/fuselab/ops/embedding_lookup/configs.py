"""Configurations that tuning may choose from: how a gradient is brought to rows."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fuselab.ops.embedding_lookup.change import Change
from fuselab.ops.embedding_lookup.spread import Spread
from fuselab.runtime import tuning
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import power_of_two
from fuselab.runtime.tuning import Config

THREADS = 256  # kThreads of cuda_kernels.cu
RUNS = (32, 8)
MOST_SAMPLES = 4096  # kMostSamples
SCATTER = Config(kernel="scatter")


def change(how: Change, spread: Spread, ids: Tensor, grad_output: Tensor) -> tuple[Config, ...]:
    """``kernel`` and what it has, for ``how``. Atomics where their order may vary and their
    rounding does not matter: ``scatter``. In tables of 16 bits, for row-wise Adagrad, and where
    PyTorch shall be deterministic: of few samples a block per ``table``, or ``sorted`` positions,
    ``run`` of them per group.

    Criteo's 26 tables x 16 float32 on an H200, 2026-11-21, us. ``scatter`` of 2048 samples takes
    SGD 9.6, of 65536 84.6 (gradients in bfloat16: 10.8 and 78.1). At 65536 its reads alone take
    46.8 (53.8, of as many rows with half the bytes), the rest are atomics to 0.53
    million rows. With a look-up of 55 to 63 that is 8 times as fast as the 1183 of
    ``nn.Embedding(sparse=True)`` and its SGD; ten times would leave the update 55 to 63. Blocks of
    512 or 1024 samples, gradients that are not staged, and five or six blocks per multiprocessor
    gain nothing in float32 and at most 2 % in bfloat16.

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
    return (SCATTER,)


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
    order = "any order" if candidates[0].kernel == "scatter" else "fixed order"
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

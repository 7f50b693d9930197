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
SCATTERS = tuple(
    Config(kernel="scatter", samples=samples, staged=staged)
    for samples, staged in ((256, 1), (512, 1), (256, 0), (512, 0), (1024, 0))
)


def change(how: Change, spread: Spread, ids: Tensor, grad_output: Tensor) -> tuple[Config, ...]:
    """``kernel`` and what it has, for ``how``. Atomics where their order may vary and their
    rounding does not matter: ``scatter`` of ``samples`` of one table per block, where gradients to
    be sorted are ``staged`` in shared memory (1) or read in order (0). In tables of 16 bits, for
    row-wise Adagrad, and where PyTorch shall be deterministic: of few samples a block per
    ``table``, or ``sorted`` positions, ``run`` of them per group.

    Larger pieces add more up before memory sees it, smaller ones make more blocks. The default run
    is the largest that gives every multiprocessor two. Criteo's 26 tables x 16 float32 (H200,
    2026-11-21): the update of 2048 samples takes row-wise Adagrad 49.6 us by table, 73.2 in runs
    of 8, 93.8 of 32; of 65536 samples 358.9 and 307.8.
    """
    if (
        how.update == "rowwise_adagrad"
        or how.dtype.itemsize < 4
        or torch.are_deterministic_algorithms_enabled()
    ):
        by_table = ids.shape[0] <= MOST_SAMPLES and spread.tiles == 1 and spread.lanes <= 8
        threads = ids.numel() * spread.lanes // RUNS[0]
        return _in_order(by_table, threads >= 2 * multiprocessors(ids.device) * THREADS)
    return SCATTERS


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

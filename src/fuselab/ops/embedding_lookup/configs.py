"""Configurations that tuning may choose from: how a gradient is brought to rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.ops.embedding_lookup.change import Change
from fuselab.ops.embedding_lookup.spread import Spread
from fuselab.runtime import tuning
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tuning import Config

THREADS = 256  # kThreads of cuda_kernels.cu
SCATTER_SAMPLES = (1024, 256)
RUNS = (32, 8)
HINTS = ("none", "stream", "prefetch", "ahead")  # Hints of cuda_kernels.cu
MOST_SAMPLES = 4096  # kMostSamples


def change(how: Change, spread: Spread, ids: Tensor, grad_output: Tensor) -> tuple[Config, ...]:
    """``kernel`` and what it has, for ``how``. Atomics where their order may vary and their
    rounding does not matter: ``scatter`` of ``samples`` of one table per block. In tables of 16
    bits, for row-wise Adagrad, and where PyTorch shall be deterministic: of few samples a block per
    ``table``, or ``sorted`` positions, ``run`` of them per group.

    Larger pieces add more up before memory sees it, smaller ones make more blocks. The default is
    the largest that gives every multiprocessor two. Criteo's 26 tables x 16 float32 (H200,
    2026-11-21): the update of 2048 samples takes row-wise Adagrad 49.6 us by table, 73.2 in runs
    of 8, 93.8 of 32; of 65536 samples 358.9 and 307.8.
    """
    batch, count = ids.shape
    blocks = 2 * multiprocessors(ids.device)
    if (
        how.update == "rowwise_adagrad"
        or how.dtype.itemsize < 4
        or torch.are_deterministic_algorithms_enabled()
    ):
        by_table = batch <= MOST_SAMPLES and spread.tiles == 1 and spread.lanes <= 8
        return _in_order(by_table, ids.numel() * spread.lanes >= blocks * THREADS * RUNS[0])
    return _by_atomics(count * ceil_div(batch, SCATTER_SAMPLES[0]) >= blocks)


@functools.cache
def _in_order(by_table: bool, enough: bool) -> tuple[Config, ...]:
    by_run = [Config(kernel="sorted", run=run) for run in (RUNS if enough else RUNS[::-1])]
    return (Config(kernel="table"), *by_run) if by_table else tuple(by_run)


@functools.cache
def _by_atomics(enough: bool) -> tuple[Config, ...]:
    first, second = SCATTER_SAMPLES if enough else SCATTER_SAMPLES[::-1]
    return (
        *(Config(kernel="scatter", samples=first, hints=hints) for hints in HINTS),
        Config(kernel="scatter", samples=second, hints=HINTS[0]),
    )


def look_up(*_: object) -> tuple[Config, ...]:
    """Whether L2 keeps vectors, which the next kernel reads, or rows, which the update does."""
    return _LOOK_UPS


_LOOK_UPS = tuple(Config(hints=hints) for hints in HINTS[:2])


def chosen_look_up(tables: Sequence[Tensor], ids: Tensor, output: Tensor) -> Config:
    samples = power_of_two(ids.shape[0], 128, 65536)
    key = (tables[0].dtype, output.dtype, ids.shape[1], output.shape[2], samples)
    return tuning.chosen("fuselab::embedding_lookup", "cuda", key, _LOOK_UPS)


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

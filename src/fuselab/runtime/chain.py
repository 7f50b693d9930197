"""Launches of Triton kernels that compute a chain of small matrix products in one go.

A program owns rows and computes all products for them, so that nothing between two products goes
through memory. Every program reads all weights. What it holds of its rows is meant to lie in
registers, the block of a weight that it multiplies with in shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.runtime.gpu_limits import multiprocessors, shared_bytes
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.matmul_precision import input_precision
from fuselab.runtime.sweep import Sweep
from fuselab.runtime.triton_launch import launch
from fuselab.runtime.triton_sweep import divisors
from fuselab.runtime.tuning import Config, chosen

MOST_COLUMNS = 1024  # of which a program holds all
_MOST_ELEMENTS = 16384  # of the widest tile of a program
_LEAST = 16  # the least rows, columns and depth of a block of a product
_STAGES = 2  # blocks of a weight that are in shared memory at a time
# A name of a number of columns, and whether it is taken by parts.
Extent = tuple[str, bool]


class Chain:
    """The kernel of a package that computes a chain of products.

    Args:
        kernel: returns it, so that Triton is imported by the first call.
        op_name: ``FusedOp.name``, under which tuned blocks are kept.
        padded: the numbers of columns of which a program holds all, by name.
        products: of each product what it sums over, and its columns.
    """

    def __init__(
        self,
        kernel: Callable[[], Any],
        op_name: str,
        padded: Sequence[str],
        products: Sequence[tuple[Extent, Extent]],
    ) -> None:
        self._kernel = kernel
        self._op_name = op_name
        self._padded = tuple(padded)
        self._products = tuple(products)

    def refuses(self, columns: Mapping[str, int], *tensors: Tensor) -> str | None:
        """Return None if a program can hold the columns, else the reason in a few words."""
        if any(one.dtype == torch.float64 for one in tensors):
            return "it accumulates in float32"
        for name in self._padded:
            if columns[name] > MOST_COLUMNS:
                return f"{name} is {columns[name]}, and a program holds {MOST_COLUMNS} columns"
        width = max(one.element_size() for one in tensors)
        if not self._fits(columns, _LEAST, _LEAST, width, tensors[0].device):
            return "a block of a weight is larger than the shared memory"
        return None

    def configs(
        self, rows: Mapping[str, int], columns: Mapping[str, int], *tensors: Tensor
    ) -> Sequence[Config]:
        """Return what tuning may choose from, the default first: as many rows as leave a program
        for every multiprocessor, and a block that was within 4 % of the fastest on an H200
        (bfloat16, five functions of 16 to 1024 columns)."""
        count, device = math.prod(rows.values()), tensors[0].device
        width = max(one.element_size() for one in tensors)
        widest = max(map(self._padding(columns), self._padded), default=_LEAST)
        candidates = [
            Config(rows=own, block=block, warps=warps)
            for own in (64, 32, 16, 128)
            for block in (64, 32, 16)
            for warps in (4, 8)
            if own == _LEAST or own * widest <= _MOST_ELEMENTS
            if self._fits(columns, own, block, width, device)
        ]

        def cost(config: Config) -> tuple[bool, int, int, int]:
            own = int(config["rows"])
            leaves_idle = ceil_div(count, own) < multiprocessors(device) and own > _LEAST
            # A wide tile leaves few registers for the blocks of a product.
            block = 64 if own * widest <= 8192 else 32 if widest <= 512 else _LEAST
            is_other = int(config["warps"]) != 4
            return leaves_idle, abs(64 - own), abs(block - int(config["block"])), is_other

        return sorted(candidates, key=cost)

    def run(
        self,
        rows: Mapping[str, int],
        columns: Mapping[str, int],
        read: Sequence[tuple[Tensor, str]],
        written: Sequence[tuple[Tensor, str]],
    ) -> None:
        """Launch the kernel, once; launch nothing if there is nothing to write.

        Args:
            rows: the sizes of the loops over rows by name, outermost first.
            columns: the numbers of columns by name.
            read, written: each tensor with its dimensions: names of loops over rows, ``?`` for
                columns, ``1``.
        """
        import triton.language as tl

        if all(tensor.numel() == 0 for tensor, _ in written):
            return
        swept = Sweep(rows, {}, list(read), list(written))
        tensors = [one for one in swept.tensors if one is not None]
        candidates = self.configs(rows, columns, *tensors)
        bits = 8 * max(one.element_size() for one in tensors)
        padding = self._padding(columns)
        key = (f"{bits}-bit", power_of_two(math.prod(rows.values())), *map(padding, self._padded))
        config = chosen(self._op_name, "triton", key, candidates)
        results = [tensor for tensor, _ in written]
        strides = [swept.strides(place) for place, on_rows in enumerate(swept.on_rows) if on_rows]
        launch(
            self._kernel(),
            (ceil_div(math.prod(rows.values()), int(config["rows"])),),
            *tensors,
            *columns.values(),
            swept.sizes,
            divisors(swept, swept.sizes),
            *strides,
            *swept.steps,
            COMPUTE=tl.float32,
            ROUNDED=all(one.element_size() == 2 for one in results),
            PRECISION=input_precision(tensors[0].dtype),
            WIDE=swept.is_wide,
            BLOCK_ROWS=int(config["rows"]),
            BLOCK=int(config["block"]),
            **{f"PADDED_{name.upper()}": padding(name) for name in self._padded},
            num_warps=int(config["warps"]),
            num_stages=_STAGES,
        )

    def _padding(self, columns: Mapping[str, int]) -> Callable[[str], int]:
        return lambda name: max(_LEAST, power_of_two(max(1, columns[name])))

    def _fits(
        self,
        columns: Mapping[str, int],
        rows: int,
        block: int,
        width: int,
        device: torch.device,
    ) -> bool:
        """Return whether the blocks of the largest product fit into shared memory, of ``width``
        bytes for an element: those of the weight, and the tile that it is multiplied with."""
        padding = self._padding(columns)

        def extent(one: Extent) -> int:
            name, is_part = one
            return block if is_part else padding(name)

        most = max(
            width * (_STAGES * extent(depth) * extent(across) + rows * extent(depth))
            for depth, across in self._products
        )
        return most <= shared_bytes(device)

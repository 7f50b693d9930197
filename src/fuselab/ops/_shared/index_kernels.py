"""Operators that map every id to an index: one thread or lane per id, in all three languages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Implementation
from fuselab.ops._shared.indices import CPP_IDS, index_type
from fuselab.runtime.cpp_source import CppSource
from fuselab.runtime.cuda_source import CudaSource, i64
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.triton_launch import launch

_THREADS, _ITEMS = 256, 4  # kThreads and kItems of every cuda_kernels.cu


def cuda_expressions(name: str) -> tuple[str, ...]:
    """Return all instantiations of the CUDA kernel ``name``, by types of ids and of indices."""
    types = CPP_IDS.values()
    return tuple(f"{name}<{ids}, {index}>" for ids in types for index in types)


def empty_indices(ids: Tensor, *others: Any) -> Tensor:
    """Return a new, uninitialised output: int64, contiguous, in the shape of ``ids``."""
    return torch.empty(ids.shape, dtype=torch.int64, device=ids.device)


@dataclass(frozen=True)
class IndexKernels:
    """The kernels of an operator on ids ``(samples, columns)`` and further arguments, ``others``.

    ``operands(*others)`` returns the tensors that the kernels read besides the ids. ``cuda`` and
    ``cpp`` contain a kernel called ``name``. The C++ kernel gets ``cpp_numbers(*others)`` after
    the sizes, the Triton kernel ``triton_constants(*others)`` by keyword.
    """

    name: str
    cuda: CudaSource
    cpp: CppSource
    triton: Any
    triton_block: int
    operands: Callable[..., tuple[Tensor, ...]]
    cpp_numbers: Callable[..., Sequence[int]] = lambda *others: ()
    triton_constants: Callable[..., Mapping[str, int]] = lambda *others: {}

    def forward_cuda(self, ids: Tensor, *others: Any) -> Tensor:
        """Return the indices from one CUDA launch. The ids are read by their strides; other
        operands are copied if the kernel needs another dtype or layout."""
        output = empty_indices(ids)
        if output.numel():
            self.cuda.launch(
                f"{self.name}<{CPP_IDS[ids.dtype]}, {index_type(ids.numel())}>",
                (ceil_div(ids.numel(), _THREADS * _ITEMS), 1, 1),
                (_THREADS, 1, 1),
                (ids, *self.operands(*others), output, i64(ids.numel()), *_sizes(ids)),
            )
        return output

    def forward_triton(self, ids: Tensor, *others: Any) -> Tensor:
        """Return the indices from one launch of the Triton kernel."""
        output = empty_indices(ids)
        if output.numel():
            launch(
                self.triton,
                (ceil_div(ids.numel(), self.triton_block),),
                *(ids, *self.operands(*others), output),
                *(ids.numel(), ids.shape[1], *ids.stride()),
                **self.triton_constants(*others),
                BLOCK=self.triton_block,
            )
        return output

    def forward_cpp(self, ids: Tensor, *others: Any) -> Tensor:
        """Return the indices from the C++ kernel, on a CPU."""
        output = empty_indices(ids)
        if output.numel():
            numbers = map(i64, self.cpp_numbers(*others))
            self.cpp.launch(
                f"{self.name}<{CPP_IDS[ids.dtype]}>",
                (ids, *self.operands(*others), output, i64(len(ids)), *_sizes(ids), *numbers),
            )
        return output

    def implementations(self) -> dict[str, Implementation]:
        """Return the three implementations, for ``FusedOp.implementations``."""
        return {
            "cuda": Implementation("cuda", self.forward_cuda),
            "triton": Implementation("cuda", self.forward_triton),
            "cpp": Implementation("cpu", self.forward_cpp),
        }


def _sizes(ids: Tensor) -> tuple[i64, i64, i64]:
    return i64(ids.shape[1]), i64(ids.stride(0)), i64(ids.stride(1))

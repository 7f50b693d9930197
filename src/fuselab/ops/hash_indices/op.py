"""The contract of ``fuselab::hash_indices``, and its launchers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.errors import ShapeError, UnknownNameError
from fuselab.op import Cost, FusedOp, Implementation
from fuselab.ops._shared.indices import CPP_IDS, check_integers, index_type
from fuselab.ops.hash_indices import cases, reference, triton_kernels
from fuselab.runtime.cpp_source import CppSource
from fuselab.runtime.cuda_source import CudaSource, i64
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.triton_launch import launch

METHODS = ("modulus",)
CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))
CUDA_EXPRESSIONS = tuple(
    f"hash<{ids}, {index}>" for ids in CPP_IDS.values() for index in CPP_IDS.values()
)
_CUDA_BLOCK = 256, 4  # kThreads and kItems of cuda_kernels.cu
_TRITON_BLOCK = 1024


def validate(ids: Tensor, cardinalities: Tensor, method: str) -> None:
    """Raises DtypeError, ShapeError, UnknownNameError as the reference's docstring says."""
    check_integers("hash_indices", "ids", ids, 2)
    check_integers("hash_indices", "cardinalities", cardinalities, 1)
    if cardinalities.shape[0] != ids.shape[1]:
        raise ShapeError(
            f"hash_indices: 'cardinalities' has {cardinalities.shape[0]} entries for ids of shape "
            f"{tuple(ids.shape)}; expected {ids.shape[1]}, one per column."
        )
    if method not in METHODS:
        raise UnknownNameError("method", method, METHODS)


def fake(ids: Tensor, cardinalities: Tensor, method: str) -> Tensor:
    return torch.empty(ids.shape, dtype=torch.int64, device=ids.device)


def _sizes(ids: Tensor) -> tuple[i64, i64, i64]:
    return i64(ids.shape[1]), i64(ids.stride(0)), i64(ids.stride(1))


def forward_cuda(ids: Tensor, cardinalities: Tensor, method: str) -> Tensor:
    """One launch; cardinalities of another dtype or stride are copied first."""
    output = fake(ids, cardinalities, method)
    if output.numel():
        threads, items = _CUDA_BLOCK
        CUDA.launch(
            f"hash<{CPP_IDS[ids.dtype]}, {index_type(ids.numel())}>",
            (ceil_div(ids.numel(), threads * items), 1, 1),
            (threads, 1, 1),
            (ids, cardinalities.long().contiguous(), output, i64(ids.numel()), *_sizes(ids)),
        )
    return output


def forward_triton(ids: Tensor, cardinalities: Tensor, method: str) -> Tensor:
    output = fake(ids, cardinalities, method)
    if output.numel():
        launch(
            triton_kernels.hash_ids,
            (ceil_div(ids.numel(), _TRITON_BLOCK),),
            ids,
            cardinalities.long().contiguous(),
            output,
            ids.numel(),
            ids.shape[1],
            *ids.stride(),
            BLOCK=_TRITON_BLOCK,
        )
    return output


def forward_cpp(ids: Tensor, cardinalities: Tensor, method: str) -> Tensor:
    output = fake(ids, cardinalities, method)
    if output.numel():
        CPP.launch(
            f"hash<{CPP_IDS[ids.dtype]}>",
            (ids, cardinalities.long().contiguous(), output, i64(ids.shape[0]), *_sizes(ids)),
        )
    return output


def prefer(ids: Tensor, cardinalities: Tensor, method: str) -> Sequence[str]:
    """65536 x 26 ids: CUDA 13.1 us, Triton 19.2, eager 13.7 (H200)."""
    return ("cuda", "triton")


def cost(ids: Tensor, cardinalities: Tensor, method: str) -> Cost:
    """Every id and cardinality read once, every index written once; one division each."""
    read = ids.numel() * ids.element_size() + cardinalities.numel() * cardinalities.element_size()
    return Cost(read, ids.numel() * 8, ids.numel())


OP = FusedOp(
    name="fuselab::hash_indices",
    reference=reference.hash_indices,
    implementations={
        "cuda": Implementation("cuda", forward_cuda),
        "triton": Implementation("cuda", forward_triton),
        "cpp": Implementation("cpu", forward_cpp),
    },
    cost=cost,
    cases=cases.CASES,
    draw=cases.draw,
    validate=validate,
    fake=fake,
    prefer=prefer,
    cpu_cases=cases.CPU_CASES,
    dtypes=(torch.float32,),  # of no argument: ids are integers
)

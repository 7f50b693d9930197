"""The contract of ``fuselab::hash_indices``, and its launchers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.errors import ShapeError, UnknownNameError
from fuselab.op import Case, Cost, Draw, FusedOp, Implementation, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.criteo import CPU_ROWS, KAGGLE_CARDINALITIES
from fuselab.ops._shared.indices import CPP_IDS, ID_DTYPES, check_integers, index_type
from fuselab.ops.hash_indices import reference, triton_kernels
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


def _case(rows: int, cardinalities: Sequence[int], *tags: str, name: str = "") -> Case:
    """Ids of hashed strings (32 bits, as Criteo's), some missing (-1)."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        ids = torch.randint(-1, 2**32 - 1, (rows, len(cardinalities)), generator=generator)
        bounds = torch.tensor(cardinalities, dtype=torch.int64)
        return Inputs((ids.to(device), bounds.to(device)))

    return Case(name or f"{rows}x{len(cardinalities)}", make, frozenset(tags))


def _extremes(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Both ends of int64 and of 32 bits, over cardinalities at both ends."""
    ends = [0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, -(2**31), 2**63 - 1, -(2**63)]
    bounds = torch.tensor([1, 2, 3, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1])
    ids = torch.tensor(ends)[:, None].expand(-1, len(bounds))
    return Inputs((ids.to(device), bounds.to(device)))


CPU_CASES = tuple(_case(rows, KAGGLE_CARDINALITIES, *cpu_sizes.ROW) for rows in CPU_ROWS)
CASES = (
    _case(128, KAGGLE_CARDINALITIES, "bench", "sweep", "tiny"),
    _case(2048, KAGGLE_CARDINALITIES, "bench", "sweep"),
    _case(65536, KAGGLE_CARDINALITIES, "bench", "sweep"),
    Case("extremes", _extremes, frozenset({"boundary"})),
    *(_case(rows, (7, 1, 105), "boundary") for rows in (0, 1, 2, 3, 341, 342)),
    _case(1024, (5,), "boundary"),
    _case(1025, (5,), "boundary"),
    _case(3, (), "boundary", name="no columns"),
)


def draw(draw: Draw) -> Inputs:
    rows, columns = draw.size(341), draw.size(26)
    dtype = draw.choice(ID_DTYPES)
    limits = torch.iinfo(dtype)
    ids = draw.integers(rows, columns, low=limits.min, high=limits.max, dtype=dtype)
    largest = draw.choice((10, 2**31 - 1))
    return Inputs((ids, draw.integers(columns, low=1, high=largest, dtype=draw.choice(ID_DTYPES))))


OP = FusedOp(
    name="fuselab::hash_indices",
    reference=reference.hash_indices,
    implementations={
        "cuda": Implementation("cuda", forward_cuda),
        "triton": Implementation("cuda", forward_triton),
        "cpp": Implementation("cpu", forward_cpp),
    },
    cost=cost,
    cases=CASES,
    draw=draw,
    validate=validate,
    fake=fake,
    prefer=prefer,
    cpu_cases=CPU_CASES,
    dtypes=(torch.float32,),  # of no argument: ids are integers
)

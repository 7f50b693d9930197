"""The contract of ``fuselab::vocabulary_indices``, and its launchers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.errors import DtypeError, ShapeError
from fuselab.op import Case, Cost, Draw, FusedOp, Implementation, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.criteo import CPU_ROWS, KAGGLE_CARDINALITIES
from fuselab.ops._shared.indices import CPP_IDS, ID_DTYPES, check_integers, index_type
from fuselab.ops.vocabulary_indices import reference, triton_kernels
from fuselab.ops.vocabulary_indices.reference import vocabulary
from fuselab.runtime.cpp_source import CppSource
from fuselab.runtime.cuda_source import CudaSource, i64
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.triton_launch import launch

CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))
CUDA_EXPRESSIONS = tuple(
    f"look_up<{ids}, {index}>" for ids in CPP_IDS.values() for index in CPP_IDS.values()
)
_CUDA_BLOCK = 256, 4  # kThreads and kItems of cuda_kernels.cu
_TRITON_BLOCK = 512


def validate(ids: Tensor, sorted_keys: Tensor, slots: Tensor, offsets: Tensor) -> None:
    """Raises DtypeError, ShapeError as the reference's docstring says."""
    check_integers("vocabulary_indices", "ids", ids, 2)
    parts = {"sorted_keys": sorted_keys, "slots": slots, "offsets": offsets}
    for name, tensor in parts.items():
        check_integers("vocabulary_indices", name, tensor, 1)
        if tensor.dtype != torch.int64:
            raise DtypeError(f"vocabulary_indices: '{name}' is {tensor.dtype}; expected int64.")
    if offsets.shape[0] != ids.shape[1] + 1:
        raise ShapeError(
            f"vocabulary_indices: 'offsets' has {offsets.shape[0]} entries for ids of shape "
            f"{tuple(ids.shape)}; expected {ids.shape[1] + 1}, one per column and the end."
        )
    if slots.shape[0] != sorted_keys.shape[0]:
        raise ShapeError(
            f"vocabulary_indices: 'slots' has {slots.shape[0]} entries; expected "
            f"{sorted_keys.shape[0]}, one per key."
        )


def fake(ids: Tensor, sorted_keys: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    return torch.empty(ids.shape, dtype=torch.int64, device=ids.device)


def _arguments(
    ids: Tensor, sorted_keys: Tensor, slots: Tensor, offsets: Tensor, output: Tensor
) -> tuple[Tensor, ...]:
    return ids, sorted_keys.contiguous(), slots.contiguous(), offsets.contiguous(), output


def _sizes(ids: Tensor) -> tuple[i64, i64, i64]:
    return i64(ids.shape[1]), i64(ids.stride(0)), i64(ids.stride(1))


def forward_cuda(ids: Tensor, sorted_keys: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    output = fake(ids, sorted_keys, slots, offsets)
    if output.numel():
        threads, items = _CUDA_BLOCK
        CUDA.launch(
            f"look_up<{CPP_IDS[ids.dtype]}, {index_type(ids.numel())}>",
            (ceil_div(ids.numel(), threads * items), 1, 1),
            (threads, 1, 1),
            (
                *_arguments(ids, sorted_keys, slots, offsets, output),
                i64(ids.numel()),
                *_sizes(ids),
            ),
        )
    return output


def forward_triton(ids: Tensor, sorted_keys: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    output = fake(ids, sorted_keys, slots, offsets)
    if output.numel():
        launch(
            triton_kernels.look_up,
            (ceil_div(ids.numel(), _TRITON_BLOCK),),
            *_arguments(ids, sorted_keys, slots, offsets, output),
            ids.numel(),
            ids.shape[1],
            *ids.stride(),
            STEPS=len(sorted_keys).bit_length(),
            BLOCK=_TRITON_BLOCK,
        )
    return output


def forward_cpp(ids: Tensor, sorted_keys: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    output = fake(ids, sorted_keys, slots, offsets)
    if output.numel():
        CPP.launch(
            f"look_up<{CPP_IDS[ids.dtype]}>",
            (
                *_arguments(ids, sorted_keys, slots, offsets, output),
                i64(ids.shape[0]),
                *_sizes(ids),
                i64(sorted_keys.shape[0]),
            ),
        )
    return output


def prefer(ids: Tensor, sorted_keys: Tensor, slots: Tensor, offsets: Tensor) -> Sequence[str]:
    """65536 x 26 ids: Triton 111 us, CUDA 134, eager 2534; 2048 x 26 37.3, 37.5 and 716 (H200)."""
    return ("triton", "cuda")


def cost(ids: Tensor, sorted_keys: Tensor, slots: Tensor, offsets: Tensor) -> Cost:
    """Every id read once, of keys and slots at most one per id, every index written once; a
    comparison per step of the search."""
    touched = min(ids.numel(), sorted_keys.numel())
    read = ids.numel() * ids.element_size() + 16 * touched + 8 * offsets.numel()
    columns = max(ids.shape[1], 1)
    steps = (sorted_keys.numel() // columns).bit_length()
    return Cost(read, ids.numel() * 8, ids.numel() * steps)


def _case(rows: int, sizes: Sequence[int], *tags: str, name: str = "") -> Case:
    """Vocabularies of ``sizes`` scattered 32-bit ids, in no order; a fifth of the ids unknown."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        step = 2**32 // max((*sizes, 1))
        columns = [
            torch.randperm(size, generator=generator) * step - (place % 2)
            for place, size in enumerate(sizes)
        ]
        ids = torch.randint(-1, 2**32, (rows, len(sizes)), generator=generator)
        known = torch.rand(ids.shape, generator=generator) < 0.8
        for place, column in enumerate(columns):
            if len(column):
                picked = column[torch.randint(len(column), (rows,), generator=generator)]
                ids[:, place] = torch.where(known[:, place], picked, ids[:, place])
        return Inputs(tuple(tensor.to(device) for tensor in (ids, *vocabulary(columns))))

    return Case(name or f"{rows}x{len(sizes)}", make, frozenset(tags))


_KAGGLE = tuple(min(size, 1_000_000) for size in KAGGLE_CARDINALITIES)
CPU_CASES = tuple(_case(rows, _KAGGLE, *cpu_sizes.ROW) for rows in CPU_ROWS)
CASES = (
    _case(128, _KAGGLE, "bench", "sweep", "tiny"),
    _case(2048, _KAGGLE, "bench", "sweep"),
    _case(65536, _KAGGLE, "bench", "sweep"),
    *(_case(rows, (1, 0, 2, 3, 7, 8, 9, 1000), "boundary") for rows in (0, 1, 2, 3, 65)),
    _case(1025, (5,), "boundary"),
    _case(3, (0,), "boundary", name="an empty vocabulary"),
    _case(3, (), "boundary", name="no columns"),
)


def draw(draw: Draw) -> Inputs:
    """Vocabularies over a small range of ids, so that both known and unknown ones are met."""
    rows, columns = draw.size(511), draw.size(26)
    generator = torch.Generator().manual_seed(columns)
    sizes = torch.randint(0, 40, (columns,), generator=generator).tolist()
    known = [torch.randperm(64, generator=generator)[:size] - 8 for size in sizes]
    ids = draw.integers(rows, columns, low=-10, high=60, dtype=draw.choice(ID_DTYPES))
    return Inputs((ids, *(tensor.to(draw.device) for tensor in vocabulary(known))))


OP = FusedOp(
    name="fuselab::vocabulary_indices",
    reference=reference.vocabulary_indices,
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

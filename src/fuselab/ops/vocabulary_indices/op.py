"""The contract of ``fuselab::vocabulary_indices``, and its launchers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.errors import DtypeError, ShapeError
from fuselab.op import Cost, FusedOp
from fuselab.ops._shared.index_kernels import IndexKernels, cuda_expressions, empty_indices
from fuselab.ops._shared.indices import check_integers
from fuselab.ops.vocabulary_indices import cases, reference, triton_kernels
from fuselab.runtime.cpp_source import CppSource
from fuselab.runtime.cuda_source import CudaSource

CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))
CUDA_EXPRESSIONS = cuda_expressions("look_up")


def validate(ids: Tensor, sorted_keys: Tensor, slots: Tensor, offsets: Tensor) -> None:
    """Raise DtypeError or ShapeError as the reference's docstring says."""
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


def _operands(sorted_keys: Tensor, slots: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    return sorted_keys.contiguous(), slots.contiguous(), offsets.contiguous()


KERNELS = IndexKernels(
    "look_up",
    CUDA,
    CPP,
    triton_kernels.look_up,
    triton_block=512,
    operands=_operands,
    cpp_numbers=lambda sorted_keys, *others: sorted_keys.shape,
    triton_constants=lambda sorted_keys, *others: {"STEPS": len(sorted_keys).bit_length()},
)
forward_triton = KERNELS.forward_triton


def prefer(ids: Tensor, sorted_keys: Tensor, slots: Tensor, offsets: Tensor) -> Sequence[str]:
    """Return Triton first: 65536 x 26 ids take it 111 us on an H200, CUDA 134 and eager 2534."""
    return ("triton", "cuda")


def cost(ids: Tensor, sorted_keys: Tensor, slots: Tensor, offsets: Tensor) -> Cost:
    """Return the least traffic, every id read once, at most one key and slot read per id, every
    index written once, and a comparison per step of the search."""
    touched = min(ids.numel(), sorted_keys.numel())
    read = ids.numel() * ids.element_size() + 16 * touched + 8 * offsets.numel()
    columns = max(ids.shape[1], 1)
    steps = (sorted_keys.numel() // columns).bit_length()
    return Cost(read, ids.numel() * 8, ids.numel() * steps)


OP = FusedOp(
    name="fuselab::vocabulary_indices",
    reference=reference.vocabulary_indices,
    implementations=KERNELS.implementations(),
    cost=cost,
    cases=cases.CASES,
    draw=cases.draw,
    space=cases.space,
    validate=validate,
    fake=empty_indices,
    prefer=prefer,
    cpu_cases=cases.CPU_CASES,
    dtypes=(torch.float32,),  # a placeholder: no argument has it, for ids are integers
)

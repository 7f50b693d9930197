"""Launchers of the CUDA C++ kernels. The number of vectors and their width are template arguments,
because a model has one of each; a new pair compiles in 0.3 s, once per machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fuselab.ops._shared.dtypes import CUDA_NAMES
from fuselab.ops._shared.matrices import row_readable
from fuselab.ops._shared.saved import of_saved
from fuselab.ops._shared.template_arguments import flags
from fuselab.ops.dot_interaction import warp_launch
from fuselab.ops.dot_interaction.layout import backward_of, forward_of, pair_count
from fuselab.runtime import tuning
from fuselab.runtime.cuda_source import CudaSource, i32, i64
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.parameters import Scalar
from fuselab.runtime.tuning import Config

CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
_THREADS = 256
# Four blocks of 48 KB share a multiprocessor. A sample that needs more gets a block of its own, up
# to what sm_80 allows one block (163 KB; sm_90 allows 227 KB).
_SHARED_BYTES = 48 * 1024
_MOST_SHARED_BYTES = 160 * 1024
_BLOCK = 4  # kBlock of cuda_kernels.cu

CUDA_EXPRESSIONS = tuple(
    f"{step}<{element}, {vectors}, {width}, {samples}, {aligned}>"
    for step in ("forward", "backward")
    for element, vectors, width, samples, aligned in (
        ("float", 27, 16, 8, "true"),
        ("float", 27, 16, 8, "false"),
        ("__half", 27, 16, 8, "true"),
        ("__nv_bfloat16", 27, 16, 8, "true"),
        ("double", 27, 16, 4, "true"),
        ("float", 27, 128, 2, "true"),
        ("__nv_bfloat16", 1, 3, 8, "false"),
        ("float", 100, 64, 1, "true"),
    )
)


def sample_bytes(step: str, vectors: int, width: int, columns: int, itemsize: int) -> int:
    """Return the bytes of shared memory that one sample takes."""
    four = 32 if itemsize == 8 else 16
    blocks, chunks = ceil_div(vectors, _BLOCK), ceil_div(width, _BLOCK)
    if step == "forward":
        return blocks * _BLOCK * chunks * four + columns * itemsize
    return vectors * (chunks + blocks) * four


def samples_per_block(bytes_of_one: int) -> tuple[int, ...]:
    """Return the samples that fit a block's shared memory, 8 (a warp each) first; else 1, in a
    block of its own."""
    return tuple(count for count in (8, 4, 2) if count * bytes_of_one <= _SHARED_BYTES) or (1,)


def _sample_bytes(step: str, embeddings: Tensor, columns: int) -> int:
    _, tables, width = embeddings.shape
    return sample_bytes(step, tables + 1, width, columns, embeddings.element_size())


def configs(dense: Tensor, embeddings: Tensor, padding: int) -> tuple[Config, ...]:
    """Return the samples of a block (4 and 2 put more threads on each sample) and those of a warp,
    which waits for no other warp."""
    columns = dense.shape[1] + pair_count(embeddings.shape[1] + 1) + padding
    one = _sample_bytes("forward", embeddings, columns)
    return _candidates(one, columns, dense, embeddings)


def configs_backward(
    needs: Sequence[bool], grad_output: Tensor, dense: Tensor, embeddings: Tensor
) -> tuple[Config, ...]:
    one = _sample_bytes("backward", embeddings, 0)
    return _candidates(one, grad_output.shape[1], dense, embeddings)


def _candidates(
    bytes_of_one: int, columns: int, dense: Tensor, embeddings: Tensor
) -> tuple[Config, ...]:
    """Return the candidates, the default first.

    At a width of 16 the warps' kernels come first: 65536x26x16 in bfloat16 takes them 32 us forward
    and the blocks' 85 on an H200. Wider vectors were not measured, so there the blocks' come first.
    """
    block = [Config(kernel="block", samples=samples) for samples in samples_per_block(bytes_of_one)]
    if not _are_aligned(row_readable(dense), row_readable(embeddings)):
        return tuple(block)
    warp = warp_launch.candidates(embeddings, columns)
    return (*warp, *block) if embeddings.shape[2] == 16 else (*block, *warp)


def _launch(
    step: str,
    tensors: Sequence[Tensor | None],
    dense: Tensor,
    embeddings: Tensor,
    columns: int,
    candidates: Sequence[Config],
    *upstream_stride: int,
) -> None:
    strides = (*upstream_stride, dense.stride(0), *embeddings.stride()[:2])
    batch, tables, width = embeddings.shape
    name = "cuda" if step == "forward" else "cuda_backward"
    key = (embeddings.dtype, tables + 1, width, power_of_two(batch, 128, 65536))
    config = tuning.chosen("fuselab::dot_interaction", name, key, candidates)
    if config.kernel == "warp":
        warp_launch.launch(step, tensors, embeddings, strides, columns, config)
        return
    sizes: list[Scalar] = [i64(batch), *map(i64, strides)]
    if step == "forward":
        sizes.append(i32(columns))
    CUDA.launch(
        f"{step}<{CUDA_NAMES[embeddings.dtype]}, {tables + 1}, {width}, {config.samples}, "
        f"{flags(_are_aligned(dense, embeddings))}>",
        (ceil_div(batch, config.samples), 1, 1),
        (_THREADS, 1, 1),
        (*tensors, *sizes),
        shared_bytes=config.samples * _sample_bytes(step, embeddings, columns),
    )


def _are_aligned(dense: Tensor, embeddings: Tensor) -> bool:
    """Return whether every row consists of whole chunks of 4 elements that are aligned to their own
    size, or to 16 bytes if that is less."""
    chunk_bytes = min(4 * dense.element_size(), 16)
    starts = (dense.data_ptr(), embeddings.data_ptr())
    steps = (dense.stride(0), *embeddings.stride()[:2])
    return (
        dense.shape[1] % 4 == 0
        and all(start % chunk_bytes == 0 for start in starts)
        and all(step * dense.element_size() % chunk_bytes == 0 for step in steps)
    )


@forward_of
def forward(dense: Tensor, embeddings: Tensor, padding: int, output: Tensor) -> None:
    tensors, candidates = (dense, embeddings, output), configs(dense, embeddings, padding)
    _launch("forward", tensors, dense, embeddings, output.shape[1], candidates)


@backward_of
def backward(
    grad_output: Tensor, dense: Tensor, embeddings: Tensor, grads: Sequence[Tensor | None]
) -> None:
    tensors = (grad_output, dense, embeddings, *grads)
    candidates = configs_backward((), grad_output, dense, embeddings)
    shape, stride = grad_output.shape, grad_output.stride(0)
    _launch("backward", tensors, dense, embeddings, shape[1], candidates, stride)


def supports(dense: Tensor, embeddings: Tensor, padding: int) -> str | None:
    """Return None if a sample fits one block's shared memory, forward and backward, else the
    reason."""
    if embeddings.dim() != 3 or embeddings.shape[2] == 0:
        return "a vector has no element"
    vectors, width = embeddings.shape[1] + 1, embeddings.shape[2]
    columns = width + pair_count(vectors) + padding
    needed = max(
        sample_bytes(step, vectors, width, columns, embeddings.element_size())
        for step in ("forward", "backward")
    )
    if needed > _MOST_SHARED_BYTES:
        return f"a sample needs {needed} bytes of shared memory; it has {_MOST_SHARED_BYTES}"
    return None


supports_backward = of_saved(supports, 0, 0)  # without padding

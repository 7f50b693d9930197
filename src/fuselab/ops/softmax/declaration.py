"""What softmax and log_softmax declare alike: refusals, shapes, costs, sizes worth trying."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fuselab.errors import DimensionError, UnsupportedDtypeError
from fuselab.op import Case, Cost, Draw, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops.softmax.layout import neighbours
from fuselab.ops.softmax.tensors import Form, empty_output


def validates(form: Form) -> Callable[..., None]:
    """``FusedOp.validate`` of the operator and, without ``dtype``, of its in-place form."""

    def validate(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> None:
        if (dtype or input.dtype) not in FLOATING:
            name = "'input'" if dtype is None else "'dtype'"
            raise UnsupportedDtypeError(
                f"{form}: {name} is {dtype or input.dtype}; expected float32, float16, bfloat16 or "
                f"float64 ({form}(..., dtype=torch.float32) casts the input first)."
            )
        limit = max(input.dim(), 1)
        if not -limit <= dim < limit:
            raise DimensionError(
                f"{form}: 'dim' is {dim}, out of range; expected {-limit} to {limit - 1} for an "
                f"input of shape {tuple(input.shape)}."
            )

    return validate


def fake(input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    return empty_output(input, dtype)


def autocast(
    autocast_dtype: torch.dtype, input: Tensor, dim: int, dtype: torch.dtype | None
) -> tuple[Tensor, int, torch.dtype | None]:
    """On CUDA torch.autocast runs both in float32; on the CPU it leaves them alone."""
    narrow = input.is_cuda and input.dtype in (torch.float16, torch.bfloat16)
    return input, dim, torch.float32 if narrow and dtype is None else dtype


def save(
    output: Tensor, input: Tensor, dim: int, dtype: torch.dtype | None
) -> tuple[Tensor, int, torch.dtype]:
    """Of the input only its dtype: the gradient is a function of the output."""
    return output, dim, input.dtype


def fake_gradient(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    if not needs[0]:
        return (None,)
    return (torch.empty(output.shape, dtype=input_dtype, device=output.device),)


def are_narrow_columns(tensor: Tensor, dim: int) -> bool:
    """Whether partial vectors would fetch columns, and so many of them that ATen is faster."""
    between = neighbours(tensor, dim)
    return 1 < between < 16 and tensor.numel() > 64 * between


def cost(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Cost:
    """The input read once, the output written once; maximum, difference, exp, sum, and softmax's
    product or log_softmax's second difference."""
    output_dtype = dtype or input.dtype
    return Cost(
        _distinct(input) * input.element_size(),
        input.numel() * output_dtype.itemsize,
        5 * input.numel(),
        "fp64" if output_dtype == torch.float64 else "fp32",
    )


def cost_backward(input: Tensor, dim: int, dtype: torch.dtype | None) -> Cost:
    """Upstream gradient and output read once, the gradient written once; four operations."""
    output_dtype = dtype or input.dtype
    return Cost(
        2 * input.numel() * output_dtype.itemsize,
        input.numel() * input.element_size(),
        4 * input.numel(),
        "fp64" if output_dtype == torch.float64 else "fp32",
    )


def _distinct(tensor: Tensor) -> int:
    """Elements in memory: an expanded dimension holds one."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size if stride else min(size, 1) for size, stride in pairs)


def _case(
    shape: Sequence[int],
    *tags: str,
    dim: int = -1,
    mean: float = 0.0,
    name: str = "",
) -> Case:
    """Normal values around ``mean``."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        values = torch.randn(tuple(shape), generator=generator) + mean
        return Inputs((values.to(device, dtype),), {"dim": dim})

    size = "x".join(map(str, shape)) or "scalar"
    return Case(name or (size if dim == -1 else f"{size} dim {dim}"), make, frozenset(tags))


def _masked(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Attention's causal mask: -inf above the diagonal."""
    scores = torch.randn((4, 65, 65), generator=generator)
    future = torch.ones(65, 65, dtype=torch.bool).triu(1)
    return Inputs((scores.masked_fill(future, -math.inf).to(device, dtype),))


def regime(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> str:
    """Return what decides a kernel's speed on a CPU: how wide rows are, or that columns are
    reduced, and whether many lie beside each other; ``cast`` where the dtype changes."""
    if dtype is not None and dtype != input.dtype:
        return "cast"
    between = neighbours(input, dim)
    if between > 1:
        return "columns" if between >= 16 else "narrow columns"
    width = input.shape[dim] if input.dim() else 1
    for limit in (7, 15, 31, 127, 2047):
        if width <= limit:
            return f"rows up to {limit}"
    return "rows"


def _cpu_cases() -> Iterator[Case]:
    for shape in cpu_sizes.MATRICES:
        yield _case(shape, *cpu_sizes.ROW)
    for width in (5, 10, 24, 64, 257, 4099):
        for elements in (2**8, 2**12, 2**16, 2**20):
            yield _case((max(elements // width, 1), width), *cpu_sizes.DTYPES)
    yield _case((8, 300_001), *cpu_sizes.DTYPES)
    for outer, width, inner in ((1, 16, 16), (1, 100, 64), (8, 19, 1024), (1, 1024, 4096)):
        yield _case((outer, width, inner), *cpu_sizes.DTYPES, dim=1)
    for outer, width, inner in ((2, 5, 3), (64, 100, 3), (64, 1000, 7)):
        yield _case((outer, width, inner), *cpu_sizes.DTYPES, dim=1)


CASES = (
    _case((4, 4), "bench", "sweep", "tiny"),
    _case((4096, 128), "bench", "sweep"),
    _case((4096, 1024), "bench", "sweep"),
    _case((4096, 4096), "bench", "sweep"),
    _case((4096, 16384), "bench", "sweep"),
    _case((2048, 65536), "bench", "sweep"),
    _case((1024, 262144), "bench", "sweep"),
    _case((64, 1_000_000), "bench", "sweep"),
    _case((32, 19, 128, 128), "bench", dim=1),
    *(
        _case((3, width), "boundary")
        for width in (1, 2, 3, 15, 16, 17, 31, 33, 255, 256, 257, 1023, 1025, 4095, 4097, 16385)
    ),
    # On an H200 a row of a cluster, and one in pieces.
    _case((3, 70_000), "boundary"),
    _case((2, 300_000), "boundary"),
    _case((), "boundary"),
    _case((0, 3), "boundary"),
    _case((3, 0), "boundary"),
    # A kernel that takes the maximum before it masks padded lanes sums such a row to 0.
    _case((5, 100), "boundary", mean=-200.0, name="5x100 around -200"),
    Case("causal mask", _masked, frozenset({"boundary"})),
    _case((2, 3, 5, 7), "boundary", dim=1),
    _case((70, 33), "boundary", dim=0),
    _case((5, 2, 3), "boundary", dim=1),
    _case((2, 1_000_000), "boundary", "huge"),
    _case((3, 2000, 40), "boundary", "huge", dim=1),
)


CPU_CASES = tuple(_cpu_cases())


def draw(draw: Draw) -> Inputs:
    """One to four dimensions; the reduced one meets the tables' edges."""
    ndim = draw.choice((2, 1, 3, 4))
    dim = draw.choice((-1, *range(-ndim, ndim)))
    shape = [
        draw.size(1024, 2048, 4096) if place == dim % ndim else draw.size() for place in range(ndim)
    ]
    return Inputs((draw.tensor(*shape),), {"dim": dim})

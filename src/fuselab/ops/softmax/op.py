"""The contract of ``fuselab::softmax``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.errors import ArgumentError, DtypeError
from fuselab.op import Case, Cost, Draw, FusedOp, Gradient, Implementation, Inputs, Rewrite
from fuselab.ops.softmax import cpu_launch, cuda_launch, reference, triton_launch
from fuselab.ops.softmax.cuda_launch import CUDA, CUDA_EXPRESSIONS
from fuselab.ops.softmax.tensors import DTYPES, empty_output

__all__ = ["CUDA", "CUDA_EXPRESSIONS", "OP"]


def validate(input: Tensor, dim: int, dtype: torch.dtype | None) -> None:
    """Raises DtypeError, ArgumentError as the reference's docstring says."""
    if (dtype or input.dtype) not in DTYPES:
        name = "'input'" if dtype is None else "'dtype'"
        raise DtypeError(
            f"softmax: {name} is {dtype or input.dtype}; expected float32, float16, bfloat16 or "
            "float64 (dtype=torch.float32 casts the input first)."
        )
    limit = max(input.dim(), 1)
    if not -limit <= dim < limit:
        raise ArgumentError(
            f"softmax: 'dim' is {dim}, out of range; expected {-limit} to {limit - 1} for an input "
            f"of shape {tuple(input.shape)}."
        )


def fake(input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    return empty_output(input, dtype)


def autocast(
    autocast_dtype: torch.dtype, input: Tensor, dim: int, dtype: torch.dtype | None
) -> tuple[Tensor, int, torch.dtype | None]:
    """On CUDA torch.autocast runs softmax in float32; on the CPU it leaves softmax alone."""
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


def prefer(input: Tensor, dim: int, dtype: torch.dtype | None) -> Sequence[str]:
    """On the GPU ``_order_on_cuda``; on the CPU the C++ kernel, but for columns narrower than a
    vector.

    Against ATen, one thread of an AMD EPYC (Zen 4): 4096x1024 takes 0.65 of its time in float32 and
    0.78 in bfloat16, 65536x10 0.09, (1024, 4096) over dim 0 0.35; (64, 1000, 3) over dim 1 3 times.
    """
    if input.is_cuda:
        return _order_on_cuda(input, dim, dtype or input.dtype)
    return ("reference",) if _are_narrow_columns(input, dim) else ("cpp",)


def prefer_backward(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Sequence[str]:
    """As ``prefer``; on the CPU C++ for columns (0.6 of ATen's time over dim 0), ATen for rows, of
    which the C++ kernel takes 1.1 to 1.5 of its time."""
    if output.is_cuda:
        return _order_on_cuda(output, dim, output.dtype)
    rows = _neighbours(output, dim) == 1
    return ("reference",) if rows or _are_narrow_columns(output, dim) else ("cpp",)


def _order_on_cuda(tensor: Tensor, dim: int, dtype: torch.dtype) -> Sequence[str]:
    """Triton first for float32 rows of the tables' line that ends at 16384, CUDA first elsewhere.

    us, Triton / CUDA (H200, torch 2.11, Triton 3.6, 2026-11-21):
                            4096x16384 float32   4096x4096 bfloat16   4096x16384 bfloat16
        forward             131.2 / 132.1        20.4 / 20.2          72.0 / 69.2
        backward            190.8 / 195.8        29.5 / 29.6          101.5 / 98.7
    """
    rows = dtype == torch.float32 and tensor.dim() > 0 and _neighbours(tensor, dim) == 1
    return ("triton", "cuda") if rows and 8192 < tensor.shape[dim] <= 16384 else ("cuda", "triton")


def _are_narrow_columns(tensor: Tensor, dim: int) -> bool:
    """Whether partial vectors would fetch columns, and so many of them that ATen is faster."""
    neighbours = _neighbours(tensor, dim)
    return 1 < neighbours < 16 and tensor.numel() > 64 * neighbours


def _neighbours(tensor: Tensor, dim: int) -> int:
    """Elements between two of one softmax in a contiguous tensor."""
    return math.prod(tensor.shape[dim % tensor.dim() + 1 :]) if tensor.dim() else 1


def cost(input: Tensor, dim: int, dtype: torch.dtype | None) -> Cost:
    """The input read once, the output written once; maximum, difference, exp, sum, product."""
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


CASES = (
    _case((4, 4), "bench", "sweep", "tiny"),
    _case((4096, 128), "bench", "sweep"),
    _case((4096, 1024), "bench", "sweep"),
    _case((4096, 4096), "bench", "sweep"),
    _case((4096, 16384), "bench", "sweep"),
    _case((2048, 65536), "bench", "sweep"),
    _case((1024, 262144), "bench", "sweep"),
    _case((32, 19, 128, 128), "bench", dim=1),
    *(
        _case((3, width), "boundary")
        for width in (1, 2, 3, 15, 16, 17, 31, 33, 255, 256, 257, 1023, 1025, 4095, 4097, 16385)
    ),
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


def draw(draw: Draw) -> Inputs:
    """One to four dimensions; the reduced one meets the tables' edges."""
    ndim = draw.choice((2, 1, 3, 4))
    dim = draw.choice((-1, *range(-ndim, ndim)))
    shape = [
        draw.size(1024, 2048, 4096) if place == dim % ndim else draw.size() for place in range(ndim)
    ]
    return Inputs((draw.tensor(*shape),), {"dim": dim})


def _rewrite_call(input: Tensor, dim: int) -> Inputs:
    return Inputs((input,), {"dim": dim})


def _library(input: Tensor, dim: int) -> Tensor:
    """torch.softmax, F.softmax, Tensor.softmax and nn.Softmax alike."""
    return torch.softmax(input, dim)


def _naive(input: Tensor, dim: int) -> Tensor:
    term = torch.exp(input - input.max(dim=dim, keepdim=True).values)
    return term / term.sum(dim=dim, keepdim=True)


def _naive_amax(input: Tensor, dim: int) -> Tensor:
    term = torch.exp(input - torch.amax(input, dim=dim, keepdim=True))
    return term / torch.sum(term, dim=dim, keepdim=True)


def _naive_item(input: Tensor, dim: int) -> Tensor:
    term = torch.exp(input - input.max(dim=dim, keepdim=True)[0])
    return term / term.sum(dim=dim, keepdim=True)


OP = FusedOp(
    name="fuselab::softmax",
    reference=reference.softmax,
    implementations={
        "triton": Implementation(
            "cuda", triton_launch.forward, triton_launch.backward, triton_launch.supports
        ),
        "cuda": Implementation("cuda", cuda_launch.forward, cuda_launch.backward),
        "cpp": Implementation("cpu", cpu_launch.forward, cpu_launch.backward),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=CASES,
    gradient=Gradient(save, reference.softmax_backward, fake_gradient, prefer_backward),
    draw=draw,
    validate=validate,
    fake=fake,
    prefer=prefer,
    autocast=autocast,
    rewrites=tuple(
        Rewrite(pattern, _rewrite_call) for pattern in (_library, _naive, _naive_amax, _naive_item)
    ),
    peers={"naive": reference.naive},
    dtypes=DTYPES,
)

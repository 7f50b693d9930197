"""Inputs on which softmax kernels have gone wrong, and the bar they are held to."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Forward = Callable[..., Tensor]

# Both sides of every place where a narrow table line, a warp or a vector ends.
BOUNDARY_WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255)
BOUNDARY_WIDTHS += (256, 257, 511, 512, 513, 1023, 1024, 1025)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def special_rows(dtype: torch.dtype, width: int = 70) -> Tensor:
    """One row per kind of value."""
    rows = normal(10, width, dtype=torch.float64)
    rows[1, 3] = math.inf
    rows[2, width - 1] = math.nan
    rows[3] = -math.inf
    rows[4, 5:] = -math.inf
    rows[5] -= 200
    rows[6] = -0.0
    rows[7] = 1.0
    rows[8, 0] = torch.finfo(dtype).max
    rows[9] = torch.finfo(dtype).min
    return rows.to(dtype)


def layouts() -> dict[str, tuple[Tensor, int]]:
    """Strided inputs with the dimension to take: what a kernel must not read as contiguous."""
    base = normal(6, 10, 24)
    return {
        "transposed": (base.transpose(0, 2), -1),
        "transposed, first": (base.transpose(0, 2), 0),
        "padded rows": (base[:, :, :21], -1),
        "two batch strides": (base[:, ::2, 2:20], -1),
        "three batch strides": (normal(3, 4, 5, 6, 7).permute(2, 1, 0, 3, 4)[:, :, :, ::2], -1),
        "every other": (base[..., ::2], -1),
        "every third, wide step": (normal(5, 33 * 12)[:, ::12], -1),
        "odd offset": (normal(61)[1:].view(5, 12), -1),
        "expanded along": (normal(4, 1).expand(4, 9), -1),
        "expanded rows": (normal(1, 9).expand(5, 9), -1),
        "expanded all": (normal(1).expand(5, 9), 0),
        "columns, padded": (base[:, :, 1:20], 1),
        "columns, first": (base, 0),
        "columns of a slice": (base[:, 1:8], 1),
        "columns, strided inner": (base[..., ::2], 1),
        "columns, expanded inner": (normal(4, 6, 1).expand(4, 6, 5), 1),
        "channels last": (normal(2, 5, 3, 4).to(memory_format=torch.channels_last), 1),
    }


def assert_forward(
    forward: Forward,
    input: Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    form: str = "softmax",
) -> None:
    """``forward(input, dim, dtype)`` within 4 times eager's error of float64, per row; ``form`` is
    the name of torch's function."""
    before = input.clone()
    output = forward(input, dim, dtype)
    library = getattr(torch, form)
    eager = library(input, dim, dtype=dtype)
    assert output.stride() == eager.stride()

    def exact(input: Tensor) -> Tensor:
        return library((input if dtype is None else input.to(dtype)).double(), dim)

    function = partial(library, dim=dim, dtype=dtype)
    _assert_right(output, dim, output.dtype, function, exact, input)
    assert torch.equal(input.nan_to_num(), before.nan_to_num()), "the input changed"


def assert_backward(
    backward: Callable[..., tuple[Tensor | None, ...]],
    output: Tensor,
    grad: Tensor,
    dim: int = -1,
    input_dtype: torch.dtype | None = None,
    form: str = "softmax",
) -> None:
    """``backward(needs, grad, output, dim, input_dtype)`` held to the same bar."""
    input_dtype = input_dtype or output.dtype
    (ours,) = backward((True,), grad, output, dim, input_dtype)
    assert ours is not None and ours.dtype == input_dtype and ours.is_contiguous()

    library = getattr(torch, f"_{form}_backward_data")

    def eager(grad: Tensor, output: Tensor) -> Tensor:
        return library(grad, output, dim, output.dtype).to(input_dtype)

    def exact(grad: Tensor, output: Tensor) -> Tensor:
        return library(grad.double(), output.double(), dim, torch.float64)

    _assert_right(ours, dim, output.dtype, eager, exact, grad, output)
    assert backward((False,), grad, output, dim, input_dtype) == (None,)


def _assert_right(
    ours: Tensor, dim: int, dtype: torch.dtype, eager: Forward, exact: Forward, *args: Tensor
) -> None:
    """NaN where eager has it; the error of every row at most 4 times eager's, plus 2 ulp.

    Where a row misses the bar, eager may have been exact by luck: of 15000 columns of two elements
    that cancel, one does. Its error is then the largest of its own, of that on copies of the
    arguments moved by some ulp, and of what float64's result does when the arguments move by one
    rounding of the arithmetic: 2^-23, which no kernel that computes in float32 can be held to beat.

    float64 is held against eager, which rounds as we do: what one rounding of the arguments, 2^-52,
    changes stands for eager's error, and 64 times it is allowed, plus 8 ulp.
    """

    def rows(tensor: Tensor) -> Tensor:
        """One softmax per row, float64."""
        moved = tensor.movedim(dim, -1) if tensor.dim() else tensor.view(1, 1)
        return moved.reshape(-1, moved.shape[-1]).double()

    expected = eager(*args)
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
    if not ours.numel():
        return
    truth = rows(exact(*args))
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.isposinf(), expected.isposinf())
    assert torch.equal(ours.isneginf(), expected.isneginf())

    def error(result: Tensor, truth: Tensor) -> Tensor:
        return finite(rows(result) - truth).amax(-1)

    def finite(tensor: Tensor) -> Tensor:
        return tensor.abs().nan_to_num(nan=0.0, posinf=0.0)

    double = dtype == torch.float64 and ours.dtype == torch.float64
    factor, slack, rounding = (64, 8, 2.0**-52) if double else (4, 2, 2.0**-23)
    limits = torch.finfo(ours.dtype)
    largest = finite(truth).amax(-1).clamp(limits.tiny, limits.max)
    ulp = limits.eps * 2 ** largest.log2().floor()
    mine, allowed = error(ours, truth), error(expected, truth)
    generator = torch.Generator().manual_seed(0)
    for _ in range(16):
        if (mine <= factor * allowed + slack * ulp).all():
            return
        copies = [_moved(value, 3, generator) for value in args]
        nearby = [_moved(value.double(), 1, generator, rounding) for value in args]
        allowed = torch.maximum(allowed, error(eager(*copies), rows(exact(*copies))))
        allowed = torch.maximum(allowed, error(exact(*nearby), truth))
    share = mine / (factor * allowed + slack * ulp)
    worst = int(share.argmax())
    assert share[worst] <= 1, (
        f"row {worst} is off by {mine[worst] / ulp[worst]:.3g} ulp, "
        f"eager by {allowed[worst] / ulp[worst]:.3g}"
    )


def _moved(
    value: Tensor, most: int, generator: torch.Generator, rounding: float | None = None
) -> Tensor:
    """Every element by up to ``most`` roundings, either way; integers stay."""
    if not value.is_floating_point():
        return value
    rounding = rounding or torch.finfo(value.dtype).eps
    steps = torch.randint(-most, most + 1, value.shape, generator=generator).to(
        value.device, torch.float64
    )
    return (value.double() * (1 + steps * rounding)).to(value.dtype)


def assert_right_at_both_ends(input: Tensor, output: Tensor, gradient: Tensor, dim: int) -> None:
    """float16 softmax too large for ``torch.softmax`` and for a float64 copy: the first and the
    last 2^20 elements along the longest dimension against the formula, summed in float64 by pieces;
    ``gradient`` is that of ``input`` as upstream gradient.

    Eager is no measure here: it asserts at 2^31 elements per row, and its float32 sum of 2^20 equal
    terms is 1.6 % off. The bar is 2 ulp of each element, at least 2 of the subnormal step 2^-24.
    """
    longest = max(range(input.dim()), key=lambda place: input.shape[place])
    length = min(max(1, 2**20 * input.shape[longest] // input.numel()), input.shape[longest])
    for begin in (0, input.shape[longest] - length):
        ends = [tensor.narrow(longest, begin, length) for tensor in (input, output, gradient)]
        # The softmaxes that reach into the end: all of each where they lie along it.
        whole = (input, output) if longest == dim % input.dim() else ends[:2]
        maximum, total, product = _statistics(*whole, dim)
        x, y, grad = (tensor.double() for tensor in ends)
        _assert_half(y, (x - maximum).exp() / total)
        # The upstream gradient minus the sum may cancel: the ulp is that of the larger.
        size = y * torch.maximum(x.abs(), product.abs())
        _assert_half(grad, y * (x - product), size)


def _statistics(input: Tensor, output: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """maximum, sum(exp(input - maximum)) and sum(input * output) in float64, along ``dim``."""
    maximum = input.amax(dim, keepdim=True).double()
    total, product = torch.zeros_like(maximum), torch.zeros_like(maximum)
    step = max(1, 2**27 * input.shape[dim] // input.numel())
    for begin in range(0, input.shape[dim], step):
        length = min(step, input.shape[dim] - begin)
        x, y = (tensor.narrow(dim, begin, length).double() for tensor in (input, output))
        product += (x * y).sum(dim, keepdim=True)
        total += (x - maximum).exp_().sum(dim, keepdim=True)
    return maximum, total, product


def _assert_half(ours: Tensor, exact: Tensor, magnitude: Tensor | None = None) -> None:
    magnitude = (exact if magnitude is None else magnitude).abs()
    ulp = 2.0**-10 * 2 ** magnitude.clamp(min=2.0**-14).log2().floor()
    worst = ((ours - exact).abs() / ulp).max()
    assert worst <= 2, f"off by {worst:.3g} ulp"
    assert bool((exact >= 2.0**-14).any()) or bool((exact == 0).all()), "nothing to see in float16"

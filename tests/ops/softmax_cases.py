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
    forward: Forward, input: Tensor, dim: int = -1, dtype: torch.dtype | None = None
) -> None:
    """``forward(input, dim, dtype)`` within 4 times eager's error of float64, per row."""
    before = input.clone()
    output = forward(input, dim, dtype)
    eager = torch.softmax(input, dim, dtype=dtype)
    assert output.stride() == eager.stride()

    def exact(input: Tensor) -> Tensor:
        return torch.softmax((input if dtype is None else input.to(dtype)).double(), dim)

    function = partial(torch.softmax, dim=dim, dtype=dtype)
    _assert_right(output, dim, output.dtype, function, exact, input)
    assert torch.equal(input.nan_to_num(), before.nan_to_num()), "the input changed"


def assert_backward(
    backward: Callable[..., tuple[Tensor | None, ...]],
    output: Tensor,
    grad: Tensor,
    dim: int = -1,
    input_dtype: torch.dtype | None = None,
) -> None:
    """``backward(needs, grad, output, dim, input_dtype)`` held to the same bar."""
    input_dtype = input_dtype or output.dtype
    (ours,) = backward((True,), grad, output, dim, input_dtype)
    assert ours is not None and ours.dtype == input_dtype and ours.is_contiguous()

    def eager(grad: Tensor, output: Tensor) -> Tensor:
        gradient = torch._softmax_backward_data(grad, output, dim, output.dtype)
        return gradient.to(input_dtype)

    def exact(grad: Tensor, output: Tensor) -> Tensor:
        return torch._softmax_backward_data(grad.double(), output.double(), dim, torch.float64)

    _assert_right(ours, dim, output.dtype, eager, exact, grad, output)
    assert backward((False,), grad, output, dim, input_dtype) == (None,)


def _assert_right(
    ours: Tensor, dim: int, dtype: torch.dtype, eager: Forward, exact: Forward, *args: Tensor
) -> None:
    """NaN where eager has it; the error of every row at most 4 times eager's, plus 2 ulp.

    What computes in float64 is held against itself. Where a row misses the bar, eager may have been
    exact by luck: its error is then the largest on copies of the arguments, moved by some ulp.
    """

    def rows(tensor: Tensor) -> Tensor:
        """One softmax per row, float64."""
        moved = tensor.movedim(dim, -1) if tensor.dim() else tensor.view(1, 1)
        return moved.reshape(-1, moved.shape[-1]).double()

    expected = eager(*args)
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
    if dtype == torch.float64 and ours.dtype == torch.float64:
        torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-16, equal_nan=True)
        return
    if not ours.numel():
        return
    truth = rows(exact(*args))
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.isinf(), expected.isinf())

    def error(result: Tensor, truth: Tensor) -> Tensor:
        return (rows(result) - truth).abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1)

    limits = torch.finfo(ours.dtype)
    largest = truth.abs().nan_to_num(nan=0.0).amax(-1).clamp(limits.tiny, limits.max)
    ulp = limits.eps * 2 ** largest.log2().floor()
    mine, allowed = error(ours, truth), error(expected, truth)
    generator = torch.Generator().manual_seed(0)
    for _ in range(16):
        if (mine <= 4 * allowed + 2 * ulp).all():
            return
        copies = [_moved_by_some_ulp(value, generator) for value in args]
        allowed = torch.maximum(allowed, error(eager(*copies), rows(exact(*copies))))
    worst = int((mine / (4 * allowed + 2 * ulp)).argmax())
    assert (mine <= 4 * allowed + 2 * ulp).all(), (
        f"row {worst} is off by {mine[worst] / ulp[worst]:.3g} ulp, "
        f"eager by {allowed[worst] / ulp[worst]:.3g}"
    )


def _moved_by_some_ulp(value: Tensor, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value
    steps = torch.randint(-3, 4, value.shape, generator=generator).to(value.device)
    return (value.double() * (1 + steps * torch.finfo(value.dtype).eps)).to(value.dtype)

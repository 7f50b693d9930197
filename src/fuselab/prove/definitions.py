"""Normalisations and products by their definitions in simpler operators, which round and overflow
as a kernel written after the formula does."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_NORMALISATIONS = (
    torch.ops.aten.native_layer_norm,
    torch.ops.aten.native_layer_norm_backward,
    torch.ops.aten.native_group_norm_backward,
    torch.ops.aten.hardsigmoid_backward,  # eager's sixth is rounded to float32, in float64 too
    # Eager's vectors take NaN for a negative number, its remaining elements for a positive one.
    torch.ops.aten.elu_backward,
    torch.ops.aten.hardswish_backward,
    torch.ops.aten.native_batch_norm,
    torch.ops.aten.native_batch_norm_backward,
    torch.ops.aten._native_batch_norm_legit,
    torch.ops.aten._native_batch_norm_legit_no_training,
)


def _group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    area: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what aten.native_group_norm does; PyTorch's definition of it differs by device."""
    dtype, input = input.dtype, _computed_in(input)
    grouped = input.reshape(batch, groups, channels // groups * area)
    variance, mean = torch.var_mean(grouped, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    output = ((grouped - mean) * rstd).reshape(input.shape)
    spread = (channels, *[1] * (input.ndim - 2))
    output = output if weight is None else output * weight.reshape(spread)
    output = output if bias is None else output + bias.reshape(spread)
    return output.to(dtype), mean.reshape(batch, groups), rstd.reshape(batch, groups)


def _vector_norm(
    input: Tensor,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what aten.linalg_vector_norm does, a norm of order 2 by its sum of squares; eager adds
    float32 in double on a CPU, where no square overflows."""
    if order != 2:
        other: Tensor = torch.ops.aten.linalg_vector_norm(input, order, dim, keepdim, dtype=dtype)
        return other
    wide = _computed_in(input if dtype is None else input.to(dtype))
    root = (wide * wide).sum(None if dim is None else list(dim), keepdim).sqrt()
    return root.to(dtype or input.dtype)


def _variance(
    input: Tensor,
    dim: list[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    """Return what aten.var.correction does, in two passes over the input in its own dtype."""
    dims = dim or list(range(input.ndim))
    mean = input.mean(dims, keepdim=True)
    squares = (input - mean).square().sum(dims, keepdim=keepdim)
    count = input.numel() // max(mean.numel(), 1)
    return squares / max(count - (1 if correction is None else correction), 0)


def _variance_and_mean(
    input: Tensor, dim: list[int] | None = None, **how: Any
) -> tuple[Tensor, Tensor]:
    """Return what aten.var_mean.correction does."""
    dims = dim or list(range(input.ndim))
    return _variance(input, dim, **how), input.mean(dims, keepdim=how.get("keepdim", False))


def _softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Return what aten.softplus does, without its threshold, above which eager returns the input:
    in float64 that is off by 24,000 ulp."""
    wide = _computed_in(input) * beta
    return ((wide.clamp_min(0) + torch.log1p(torch.exp(-wide.abs()))) / beta).to(input.dtype)


def _softplus_backward(grad_output: Tensor, input: Tensor, beta: float, threshold: float) -> Tensor:
    """Return what aten.softplus_backward does, without its threshold."""
    slope = torch.sigmoid(_computed_in(input) * beta)
    return (_computed_in(grad_output) * slope).to(grad_output.dtype)


def _computed_in(value: Tensor) -> Tensor:
    """Return a tensor in the dtype that eager computes its sums in: 16 bits in float32."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def definitions() -> dict[Any, Any]:
    """Return the definition of each operator that has one."""
    found: dict[Any, Any] = dict(get_decompositions(_NORMALISATIONS))
    found[torch.ops.aten.native_group_norm.default] = _group_norm
    found[torch.ops.aten.linalg_vector_norm.default] = _vector_norm
    found[torch.ops.aten.var.correction] = _variance
    found[torch.ops.aten.var_mean.correction] = _variance_and_mean
    found[torch.ops.aten.softplus.default] = _softplus
    found[torch.ops.aten.softplus_backward.default] = _softplus_backward
    found[torch.ops.aten.std.correction] = lambda *args, **how: _variance(*args, **how).sqrt()
    return found


class _Products(TorchFunctionMode):
    """Compute products over a dimension one factor after the other.

    PyTorch's gradient of a product divides the product by each factor, and gives NaN where both are
    infinite. That of a chain of multiplications divides nothing. A mode of dispatch comes too late
    for it: autograd has its formula by then.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RUNNING_PRODUCTS:
            return _running_product(*args, **kwargs)
        if func in _PRODUCTS and len(args) + len(kwargs) > 1 and "dtype" not in kwargs:
            return _product(*args, **kwargs)
        return func(*args, **kwargs)


_RUNNING_PRODUCTS = (torch.cumprod, Tensor.cumprod)
_PRODUCTS = (torch.prod, Tensor.prod)


def _running_product(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return what torch.cumprod does."""
    factors = input if dtype is None else input.to(dtype)
    if not factors.is_floating_point() or not factors.numel() or not factors.ndim:
        return torch.cumprod(factors, dim)
    steps = list(itertools.accumulate(_computed_in(factors).unbind(dim), torch.mul))
    return torch.stack(steps, dim).to(factors.dtype)


def _product(input: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Return what torch.prod over one dimension does."""
    if not input.is_floating_point() or not input.numel() or not input.ndim:
        return torch.prod(input, dim, keepdim)
    product = functools.reduce(torch.mul, _computed_in(input).unbind(dim)).to(input.dtype)
    return product.unsqueeze(dim) if keepdim else product


# Operators by which autograd's formulas multiply a gradient, or divide it.
_OF_SLOPES = (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor)


def _without_slopes_of_nothing(result: Tensor, factors: Sequence[Any]) -> Tensor:
    """Return the product of a gradient and a slope, with 0 for that of 0 and an infinity.

    ``torch.where`` gives the branch that it does not take a gradient of 0, which autograd
    multiplies by a slope that may be infinite there. A kernel does not compute that branch. A NaN
    of either factor stays one.
    """
    tensors = [factor for factor in factors if isinstance(factor, Tensor)]
    is_nothing = result.isnan()
    for factor in tensors:
        is_nothing = is_nothing & ~factor.isnan()
    has_zero = functools.reduce(torch.logical_or, (factor == 0 for factor in tensors))
    return torch.where(is_nothing & has_zero, 0.0, result)


class Composed(TorchDispatchMode):
    """Compute normalisations, variances and products by their definitions in simpler operators, and
    gradients without those of a branch that is not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.definitions = definitions()
        self.products = _Products()

    def __enter__(self) -> Composed:
        self.products.__enter__()
        entered: Composed = super().__enter__()
        return entered

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.products.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = self.definitions.get(func, func)(*args, **(kwargs or {}))
        if func in _OF_SLOPES and torch._C._current_autograd_node() is not None:
            return _without_slopes_of_nothing(found, args)
        return found

"""The definitions of operators by simpler ones: in kernels, and in the formulas of gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from fuselab.ejection import batch_norm, random_slopes
from fuselab.ejection.lists import definitions_of_lists

aten = torch.ops.aten

# PyTorch's own definitions of composed operators by simpler ones. Their arithmetic is what the
# eager kernels compute; group normalisation is lowered by ours, in `moments.py`.
COMPOSED = (
    aten._fused_rms_norm,
    aten._fused_rms_norm_backward,
    aten._native_batch_norm_legit_no_training,
    aten._unsafe_masked_index,
    aten._unsafe_masked_index_put_accumulate,
    aten._prelu_kernel,
    aten._prelu_kernel_backward,
    aten.addcdiv,
    aten.addcmul,
    aten.aminmax,
    aten.channel_shuffle,
    aten.col2im,
    aten.count_nonzero,
    aten.deg2rad,
    aten.diag_embed,
    aten.dist,
    aten.dot,
    aten.celu,
    aten.elu,
    aten.elu_backward,
    aten.eye,
    aten.gelu,
    aten.gelu_backward,
    aten.glu,
    aten.glu_backward,
    aten.hardsigmoid,
    aten.hardsigmoid_backward,
    aten.hardswish,
    aten.hardswish_backward,
    aten.hardtanh,
    aten.heaviside,
    aten.hardtanh_backward,
    aten.im2col,
    aten.index_fill,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.leaky_relu,
    aten.leaky_relu_backward,
    aten.lerp,
    aten.linspace,
    aten.logaddexp,
    aten.logaddexp2,
    aten.logit,
    aten.logit_backward,
    aten.logspace,
    aten.logsumexp,
    aten.log_sigmoid_forward,
    aten.log_sigmoid_backward,
    aten.masked_fill,
    aten.mish,
    aten.mish_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.mvlgamma,
    aten.nan_to_num,
    aten.nll_loss_backward,
    aten.nll_loss_forward,
    aten.nll_loss2d_backward,
    aten.nll_loss2d_forward,
    aten.pixel_shuffle,
    aten.pixel_unshuffle,
    aten.rad2deg,
    aten.renorm,
    aten.rot90,
    aten.rsub,
    aten.selu,
    aten.sigmoid_backward,
    aten.sinc,
    aten.special_entr,
    aten.special_xlog1py,
    aten.silu,
    aten.silu_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.softplus,
    aten.softplus_backward,
    aten.softshrink,
    aten.hardshrink,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.std.correction,
    aten.std_mean,
    aten.tanh_backward,
    aten.trace,
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.threshold,
    aten.threshold_backward,
    aten.tril,
    aten.triu,
    aten._softmax,
    aten._softmax_backward_data,
    aten._log_softmax,
    aten._log_softmax_backward_data,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten.native_batch_norm_backward,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.norm,
    aten.linalg_vector_norm,
    aten.vdot,
    aten.xlogy,
    aten.square,
    aten.t,
)

# Gradients of which PyTorch has no derivative, and the operators whose second results they read:
# in the formulas of a gradient these stand as the simpler operators that they are made of. So does
# batch normalisation, whose own operators refuse the empty tensors that the function takes.
WITHOUT_DERIVATIVE = (
    aten._fused_rms_norm,
    aten._fused_rms_norm_backward,
    aten._native_batch_norm_legit_functional,
    aten.glu_backward,
    aten.hardsigmoid_backward,
    aten.hardswish_backward,
    aten.logit_backward,
    aten.mish_backward,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten.silu_backward,
    aten.soft_margin_loss_backward,
)


def _nansum(
    input: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a sum without the elements that are NaN."""
    known = torch.where(input.isnan(), 0, input)
    return aten.sum.dim_IntList(known, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Return ``beta * input + alpha * (mat1 @ mat2)``, without ``input`` if ``beta`` is 0, with the
    matrices as they are: PyTorch's own definition converts those of 16 bits to float32."""
    product = aten.mm.default(mat1, mat2)
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product  # type: ignore[no-any-return]
    return (input if beta == 1 else input * beta) + product  # type: ignore[no-any-return]


def _cross(input: Tensor, other: Tensor, *, dim: int = -1) -> Tensor:
    """Return the cross product of the vectors along ``dim``, by the three coordinates."""
    x, y = input.unbind(dim), other.unbind(dim)
    parts = [x[k - 2] * y[k - 1] - x[k - 1] * y[k - 2] for k in range(3)]
    return torch.stack(parts, dim)


def _ldexp(input: Tensor, other: Tensor) -> Tensor:
    """Return ``input`` times the power of two, as PyTorch computes it."""
    return input * torch.pow(2.0, other)


def _angle(input: Tensor) -> Tensor:
    """Return the angle of real numbers: pi where they are negative, else 0, and NaN for NaN."""
    known = torch.where(input < 0, math.pi, 0.0).to(input.dtype)
    return torch.where(input.isnan(), input, known)


def _cosines(*first: float) -> Callable[..., Tensor]:
    """Return the definition of a window that is a sum of cosines: ``a - b cos(2 pi k / n) + c cos(4
    pi k / n)`` at its elements ``k``, where ``n`` is its length if it is periodic, else one less.
    ``first`` are the factors that a call does not give."""

    def window(length: int, periodic: bool = True, *factors: float, **keywords: Any) -> Tensor:
        if length == 1:
            return torch.ones(1, **keywords)
        place = torch.arange(length, **{"dtype": torch.get_default_dtype(), **_given(keywords)})
        angle = place * (2 * math.pi / (length if periodic else length - 1))
        total = torch.zeros_like(place)
        for order, factor in enumerate((*factors, *first[len(factors) :])):
            total = total + (-1) ** order * factor * torch.cos(order * angle)
        return total

    return window


def _bartlett_window(length: int, periodic: bool = True, **keywords: Any) -> Tensor:
    """Return a window that grows to 1 and falls again, along two lines."""
    if length == 1:
        return torch.ones(1, **keywords)
    place = torch.arange(length, **{"dtype": torch.get_default_dtype(), **_given(keywords)})
    return 1 - (place * (2 / (length if periodic else length - 1)) - 1).abs()


def _given(keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keywords.items() if value is not None}


_WINDOWS: Mapping[Any, Callable[..., Tensor]] = {
    aten.bartlett_window: _bartlett_window,
    aten.blackman_window: _cosines(0.42, 0.5, 0.08),
    aten.hamming_window: _cosines(0.54, 0.46),
    aten.hann_window: _cosines(0.5, 0.5),
}


@functools.cache
def definitions_in_kernels() -> Mapping[Any, Callable[..., Any]]:
    """Return the definitions by simpler operators of those that kernels compute so."""
    own: dict[Any, Callable[..., Any]] = {
        **batch_norm.GRADIENT,
        **random_slopes.DEFINITIONS,
        **definitions_of_lists(),
        **{
            getattr(window, name): definition
            for window, definition in _WINDOWS.items()
            for name in window.overloads()
            if "out" not in name
        },
        aten.angle.default: _angle,
        aten.nansum.default: _nansum,
        aten.addmm.default: _addmm,
        aten.linalg_cross.default: _cross,
        aten.ldexp.Tensor: _ldexp,
    }
    return {**get_decompositions(COMPOSED), **own}


@functools.cache
def definitions_in_formulas() -> Mapping[Any, Callable[..., Any]]:
    """Return the definitions by simpler operators of those that have no derivative themselves."""
    own = get_decompositions(WITHOUT_DERIVATIVE)
    return {**own, **batch_norm.IN_FORMULAS, **definitions_of_lists()}

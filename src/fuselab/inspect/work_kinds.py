"""The kind of work of an operator or a kernel, by its name: arithmetic, traffic, or neither."""

from __future__ import annotations

import re

# An ATen call on the CPU that touches less than this costs its dispatch, not its traffic: one
# dispatch takes 2 to 4 us, and 32 KiB take about 3 us at 10 GB/s.
DISPATCH_BYTES = 32 * 1024


def _aten(words: str) -> frozenset[str]:
    return frozenset(f"aten::{word}" for word in words.split())


_COMPUTE_OP = re.compile(
    r"aten::(addmm|mm|bmm|baddbmm|addbmm|_addmm_activation|_scaled_mm|_int_mm|addmv|mv|dot|vdot|ger|addr"
    r"|.*conv.*|mkldnn_(?!reshape).*|linalg_.*|cdist|_cdist.*|.*attention.*|_fft.*|cholesky.*"
    r"|lstm|gru|_thnn_fused.*|_cudnn_rnn.*|mkldnn_rnn.*)(_forward|_backward)?"
)
_COMPUTE_KERNEL = re.compile(
    r"gemm|gemv|cutlass|wgmma|xmma|conv|winograd|flash|fmha|attention|nvjet|cublas|cudnn"
    r"|splitk|triton_tem|fft",
    re.IGNORECASE,
)

_NO_WORK = _aten(
    "t transpose as_strided as_strided_ view _unsafe_view reshape expand expand_as slice "
    "select narrow squeeze squeeze_ unsqueeze unsqueeze_ permute detach detach_ alias unbind "
    "split split_with_sizes chunk unfold view_as flatten unflatten empty empty_like "
    "empty_strided new_empty new_empty_strided resize_ set_ result_type is_nonzero lift_fresh "
    "lift resolve_conj resolve_neg numpy_T mT adjoint _reshape_alias requires_grad_ "
    "_local_scalar_dense item to type_as diagonal movedim swapaxes real conj"
)

# Operators that return the tensor that they are given where nothing is to be done, as dropout does
# in evaluation. Where they do work, they call operators that do.
RETURNS_ITS_INPUT = _aten(
    "dropout dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ contiguous"
)

_POINTWISE = _aten(
    "abs add addcdiv addcmul acos asin atan atan2 bernoulli bitwise_and bitwise_not "
    "bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min copy cos cosh div dropout elu "
    "elu_backward eq erf erfc exp exp2 expm1 fill floor fmod frac ge gelu gelu_backward glu "
    "gt hardsigmoid hardswish hardswish_backward hardtanh hardtanh_backward huber_loss "
    "isfinite isinf isnan le leaky_relu leaky_relu_backward lerp log log10 log1p log2 "
    "log_sigmoid_forward log_sigmoid_backward logical_and logical_not logical_or logical_xor "
    "lt masked_fill maximum minimum mish mul native_dropout native_dropout_backward ne neg "
    "nan_to_num pow reciprocal relu relu6 remainder round rsqrt rsub sgn sigmoid "
    "sigmoid_backward sign silu silu_backward sin sinh softplus softplus_backward sqrt square "
    "sub tan tanh tanh_backward threshold threshold_backward trunc where xlogy zero "
    "binary_cross_entropy_with_logits mse_loss mse_loss_backward smooth_l1_loss "
    "smooth_l1_loss_backward binary_cross_entropy binary_cross_entropy_backward"
)
_REDUCTION = _aten(
    "sum mean amax amin max min prod norm linalg_vector_norm logsumexp var std var_mean any "
    "all _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
    "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
    "native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward "
    "_fused_rms_norm argmax argmin nansum"
)

# Operators that make a tensor out of a Python value, a shape or nothing.
CREATION = _aten(
    "zeros ones full arange linspace eye tensor scalar_tensor lift_fresh tril_indices "
    "triu_indices logspace range"
)

HOST_SYNC = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"})

_PAGEABLE = re.compile(r"pageable", re.IGNORECASE)
_TRANSFER = re.compile(r"HtoD|DtoH|Host|Pageable|Pinned", re.IGNORECASE)

# Ranges in which the host prepares or fetches a batch: fuselab's, and those of DataLoader.
DATA_RANGE = re.compile(r"copy data|enumerate\(DataLoader\)#.*|dataload.*", re.IGNORECASE)


def is_compute_op(name: str) -> bool:
    """Return whether the operator's time is arithmetic: a matrix product, convolution,
    attention."""
    return _COMPUTE_OP.fullmatch(name) is not None


def is_work(name: str) -> bool:
    """Return whether the operator touches elements, which a view or empty allocation does not."""
    return name.startswith("aten::") and name not in _NO_WORK


def is_pointwise(name: str) -> bool:
    return name.removesuffix("_") in _POINTWISE


def is_reduction(name: str) -> bool:
    return name in _REDUCTION


def is_fusible(name: str) -> bool:
    """Return whether one kernel can contain the operator together with its neighbours."""
    return is_pointwise(name) or is_reduction(name)


def is_compute_kernel(name: str) -> bool:
    return _COMPUTE_KERNEL.search(name) is not None


def is_transfer(copy_name: str) -> bool:
    """Return whether a GPU copy crosses between host and device, not within the device."""
    return _TRANSFER.search(copy_name) is not None


def is_pageable(copy_name: str) -> bool:
    return _PAGEABLE.search(copy_name) is not None

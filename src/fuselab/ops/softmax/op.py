"""The contracts of ``fuselab::softmax``, ``fuselab::log_softmax`` and their forms in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.errors import DimensionError, UnsupportedDtypeError
from fuselab.op import Cost, FusedOp, Gradient, Implementation, Inputs, Rewrite
from fuselab.ops._shared.cost import arithmetic_unit, bytes_behind
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops._shared.launched import launched
from fuselab.ops.softmax import cases, cpu_launch, cuda_launch, reference, triton_launch
from fuselab.ops.softmax.layout import Form, empty_output, neighbours


def validates(form: Form) -> Callable[..., None]:
    """Return ``FusedOp.validate`` of the operator and, without ``dtype``, of its in-place form."""

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
    """Ask for a float32 result of 16-bit inputs on CUDA, as torch.autocast does; on a CPU it
    changes nothing."""
    narrow = input.is_cuda and input.dtype in (torch.float16, torch.bfloat16)
    return input, dim, torch.float32 if narrow and dtype is None else dtype


def save(
    output: Tensor, input: Tensor, dim: int, dtype: torch.dtype | None
) -> tuple[Tensor, int, torch.dtype]:
    """Keep of the input only its dtype, for the gradient is a function of the output."""
    return output, dim, input.dtype


def fake_gradient(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    if not needs[0]:
        return (None,)
    return (torch.empty(output.shape, dtype=input_dtype, device=output.device),)


def are_narrow_columns(tensor: Tensor, dim: int) -> bool:
    """Return whether columns are so narrow that they would be fetched by partial vectors, and so
    many that ATen is faster."""
    between = neighbours(tensor, dim)
    return 1 < between < 16 and tensor.numel() > 64 * between


def cost(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Cost:
    """Return the least traffic, the input read once and the output written once. The arithmetic is
    maximum, difference, exp, sum, and softmax's product or log_softmax's second difference."""
    output_dtype, numel = dtype or input.dtype, input.numel()
    written = numel * output_dtype.itemsize
    return Cost(bytes_behind(input), written, 5 * numel, arithmetic_unit(output_dtype))


def cost_backward(input: Tensor, dim: int, dtype: torch.dtype | None) -> Cost:
    """Return the least traffic, upstream gradient and output read once and the gradient written
    once, and four operations per element."""
    output_dtype, numel = dtype or input.dtype, input.numel()
    read, written = 2 * numel * output_dtype.itemsize, numel * input.element_size()
    return Cost(read, written, 4 * numel, arithmetic_unit(output_dtype))


def regime(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> str:
    """Return the key of a kernel's speed on a CPU: the width class of rows, or that columns are
    reduced, ``narrow`` if few are side by side; ``cast`` if the dtype changes."""
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


def prefer(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Sequence[str]:
    """Return CUDA C++ first: on an H200 it is as fast as Triton up to 16384 columns, and up to
    twice as fast for wider rows (1024x262144 in bfloat16: 262 us for 545) and other dimensions."""
    return ("cuda", "triton")


def prefer_backward(
    form: Form,
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor,
    dim: int,
    input_dtype: torch.dtype,
) -> Sequence[str]:
    """Return CUDA C++ first on a GPU. On a CPU return C++, except for narrow columns and the rows
    of softmax, for which ATen's own kernel is as fast."""
    if output.is_cuda:
        return ("cuda", "triton")
    rows = form == "softmax" and neighbours(output, dim) == 1
    return ("reference",) if rows or are_narrow_columns(output, dim) else ("cpp",)


def _rewrite_call(input: Tensor, dim: int) -> Inputs:
    return Inputs((input,), {"dim": dim})


def _library(input: Tensor, dim: int) -> Tensor:
    """Match torch.softmax, F.softmax, Tensor.softmax and nn.Softmax."""
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


def _liger() -> Callable[..., Tensor]:
    """Return Liger's kernel, which takes the last dimension only."""
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    def softmax(input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        wide = input if dtype is None else input.to(dtype)
        output: Tensor = LigerSoftmaxFunction.apply(wide.movedim(dim, -1)).movedim(-1, dim)
        return output

    return softmax


def _log_library(input: Tensor, dim: int) -> Tensor:
    """Match torch.log_softmax, F.log_softmax, Tensor.log_softmax and nn.LogSoftmax."""
    return torch.log_softmax(input, dim)


def _log_of_softmax(input: Tensor, dim: int) -> Tensor:
    """Match the logarithm of softmax. It is -inf where softmax underflows; log_softmax is finite
    there."""
    return torch.log(F.softmax(input, dim))


def _minus_logsumexp(input: Tensor, dim: int) -> Tensor:
    return input - torch.logsumexp(input, dim=dim, keepdim=True)


def _implementation(
    device: Literal["cuda", "cpu"], launcher: ModuleType, form: Form, in_place: bool
) -> Implementation:
    forward = launcher.forward_in_place if in_place else launcher.forward
    backward = None if in_place else partial(launcher.backward, form=form)
    return launched(device, launcher, forward=partial(forward, form=form), backward=backward)


def _declared(form: Form, in_place: bool, **particular: Any) -> FusedOp:
    """Return the contract of one form from the parts that differ."""
    if not in_place:
        particular |= {
            "cost_backward": cost_backward,
            "fake": fake,
            "autocast": autocast,
            "configs": {
                "triton": triton_launch.configs,
                "triton_backward": triton_launch.configs_backward,
                "cuda": cuda_launch.configs,
                "cuda_backward": cuda_launch.configs_backward,
            },
        }
    return FusedOp(
        name=f"fuselab::{form}{'_' if in_place else ''}",
        implementations={
            "triton": _implementation("cuda", triton_launch, form, in_place),
            "cuda": _implementation("cuda", cuda_launch, form, in_place),
            "cpp": _implementation("cpu", cpu_launch, form, in_place),
        },
        cost=cost,
        cases=cases.CASES,
        draw=cases.draw,
        validate=validates(form),
        prefer=prefer,
        dtypes=FLOATING,
        mutates=("input",) if in_place else (),
        regime=regime,
        cpu_cases=cases.CPU_CASES,
        **particular,
    )


def _rewrites(*patterns: Callable[..., Tensor]) -> tuple[Rewrite, ...]:
    return tuple(Rewrite(pattern, _rewrite_call) for pattern in patterns)


OP = _declared(
    "softmax",
    in_place=False,
    reference=reference.softmax,
    gradient=Gradient(
        save, reference.softmax_backward, fake_gradient, partial(prefer_backward, "softmax")
    ),
    rewrites=_rewrites(_library, _naive, _naive_amax, _naive_item),
    peers={"naive": reference.naive_softmax},
    libraries={"liger": _liger},
)
IN_PLACE = _declared("softmax", in_place=True, reference=reference.softmax_)
LOG_SOFTMAX = _declared(
    "log_softmax",
    in_place=False,
    reference=reference.log_softmax,
    gradient=Gradient(
        save, reference.log_softmax_backward, fake_gradient, partial(prefer_backward, "log_softmax")
    ),
    rewrites=_rewrites(_log_library, _log_of_softmax, _minus_logsumexp),
    peers={"naive": reference.naive_log_softmax},
)
LOG_SOFTMAX_IN_PLACE = _declared("log_softmax", in_place=True, reference=reference.log_softmax_)

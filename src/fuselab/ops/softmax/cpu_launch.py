"""Launching the C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import CPP_NAMES
from fuselab.ops.softmax.layout import rows_in_place_or_copied
from fuselab.ops.softmax.tensors import FORMS, Form, cast, empty_output
from fuselab.runtime.cpp_source import CppSource, i64

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))


def forward(input: Tensor, dim: int, dtype: torch.dtype | None, form: Form = "softmax") -> Tensor:
    """The forward in C++; another input dtype is cast first, as torch does on the CPU."""
    output = empty_output(input, dtype)
    if output.numel() == 0:
        return output
    _launch("forward", form, input.to(output.dtype), dim, output)
    return output


def forward_in_place(input: Tensor, dim: int, form: Form = "softmax") -> None:
    """The forward over its input; one that is not contiguous takes a workspace of its size."""
    if not input.is_contiguous():
        input.copy_(forward(input, dim, None, form))
    elif input.numel():
        _launch("forward", form, input, dim, input)


def backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor,
    dim: int,
    input_dtype: torch.dtype,
    form: Form = "softmax",
) -> tuple[Tensor | None, ...]:
    """The gradient in C++, in the output's dtype, cast to the input's last."""
    if not needs[0]:
        return (None,)
    grad_input = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    if grad_input.numel():
        _launch("backward", form, grad_output, dim, output.contiguous(), grad_input)
    return (cast(grad_input, input_dtype),)


def _launch(step: str, form: Form, strided: Tensor, dim: int, *contiguous: Tensor) -> None:
    """Rows read ``strided`` where it lies if their elements are neighbours, columns want a copy."""
    strided, rows = rows_in_place_or_copied(strided, dim)
    if rows.columns or rows.dim_stride != 1:
        strided, rows = rows_in_place_or_copied(strided.contiguous(), dim)
    name = f"{FORMS[form]}, {CPP_NAMES[strided.dtype]}"
    if rows.columns:
        sizes = (i64(rows.outer_count), i64(rows.width), i64(rows.inner_count))
        CPP.launch(f"{step}_columns<{name}>", (strided, *contiguous, *sizes))
        return
    places = (i64(rows.inner_count), i64(rows.outer_stride), i64(rows.inner_stride))
    CPP.launch(
        f"{step}_rows<{name}>", (strided, *contiguous, i64(rows.rows), i64(rows.width), *places)
    )

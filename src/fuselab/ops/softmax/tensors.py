"""What every implementation names, allocates or casts alike."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import FLOATING

Form = Literal["softmax", "log_softmax"]
FORMS: dict[Form, str] = {"softmax": "kSoftmax", "log_softmax": "kLogSoftmax"}  # in C++


def empty_output(input: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Contiguous, whatever the input's strides: torch.softmax gives the same."""
    return torch.empty(input.shape, dtype=dtype or input.dtype, device=input.device)


def readable(input: Tensor, dtype: torch.dtype) -> Tensor:
    """The input itself where a GPU kernel reads its dtype (and casts on the way), else cast."""
    return input if input.dtype in FLOATING else input.to(dtype)


def empty_gradient(output: Tensor, input_dtype: torch.dtype) -> Tensor:
    """The gradient in the input's dtype, or the output's where no GPU kernel writes the former."""
    dtype = input_dtype if input_dtype in FLOATING else output.dtype
    return torch.empty(output.shape, dtype=dtype, device=output.device)


def cast(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad if grad.dtype == dtype else grad.to(dtype)

"""Arguments of a public function: their types, and floats that are tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import (
    ArgumentError,
    ArgumentTypeError,
    DifferentiationError,
    NumberRangeError,
    OperandError,
)
from fuselab.op import tensors_in
from fuselab.runtime.dispatch.registration import Registration


def check_types(registration: Registration, args: Sequence[Any]) -> None:
    """Raise for a value that is not of its parameter's type; contracts may then rely on types. A
    float may be a 0-d tensor, but not one whose gradient would be dropped. It takes 1 us."""
    op, short = registration.op, registration.op.short_name
    for value, (name, types, words) in zip(args, registration.accepted, strict=True):
        if not isinstance(value, types):
            raise ArgumentTypeError(
                f"{short}: '{name}' must be {words}, got {type(value).__name__}."
            )
    for place in registration.sequence_positions:
        wrong = next((item for item in args[place] if not isinstance(item, Tensor)), None)
        if wrong is not None:
            name, _, words = registration.accepted[place]
            raise ArgumentTypeError(
                f"{short}: '{name}' must be {words}, got a {type(wrong).__name__} in it."
            )
    if op.mutates and any(tensor.is_neg() for tensor in tensors_in(args)):
        raise ArgumentError(
            f"{short}: it writes over its arguments, and one of them is a lazy negation "
            "(torch.Tensor.is_neg); resolve_neg() gives an ordinary tensor."
        )
    for place in registration.float_positions:
        value, name = args[place], registration.accepted[place][0]
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise NumberRangeError(f"{short}: '{name}' must be a number that a float can hold.")
        if isinstance(value, Tensor):
            if value.is_complex():
                raise OperandError(f"{short}: '{name}' must be a real number, got {value.dtype}.")
            if value.dim() != 0:
                raise ArgumentTypeError(
                    f"{short}: '{name}' must be a number, got a Tensor of shape "
                    f"{tuple(value.shape)}."
                )
            if value.requires_grad and torch.is_grad_enabled():
                raise DifferentiationError(
                    f"{short}: '{name}' has no gradient; detach it, or spell the expression in "
                    "plain PyTorch."
                )


def with_host_floats(registration: Registration, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with CPU tensors of float parameters read as numbers, as PyTorch does:
    copying them to a GPU would be refused while a CUDA graph is captured."""
    if torch._C._are_functorch_transforms_active():
        return args  # under vmap a tensor is no single number
    read = list(args)
    for place in registration.float_positions:
        if type(args[place]) is Tensor and args[place].is_cpu:
            read[place] = args[place].item()
    return tuple(read)


def with_scalar_tensors(registration: Registration, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with floats as 0-d tensors on the inputs' device. They are made by a
    multiplication, because Dynamo keeps that symbolic."""
    first = tensors_in(args)[0]
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    converted = list(args)
    for place in registration.float_positions:
        value = args[place]
        converted[place] = (
            value.to(first.device, dtype, non_blocking=first.is_cuda)
            if isinstance(value, Tensor)
            else torch.ones((), dtype=dtype, device=first.device) * value
        )
    return tuple(converted)

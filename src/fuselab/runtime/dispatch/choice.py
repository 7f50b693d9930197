"""Which implementation runs a call: what ``auto`` takes, and why a named one cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import ArgumentTypeError, DeviceError, LayoutError
from fuselab.op import FusedOp
from fuselab.runtime import cpu_choice, fallback, process_choice, surveyed_choice


def choose(op: FusedOp, args: Sequence[Any]) -> str:
    """Return what ``implementation="auto"`` takes for these arguments: an implementation's name, or
    ``"reference"``."""
    return choose_on(op, args, device_of(op, args))


def choose_on(op: FusedOp, args: Sequence[Any], device: torch.device) -> str:
    """Return what ``choose`` does, for arguments known to be on ``device``."""
    try:
        return _first_that_can(op, args, device)
    except Exception as error:
        raise _of_arguments(op, args, error) from None


def _of_arguments(op: FusedOp, args: Sequence[Any], error: Exception) -> Exception:
    """Return the error to raise after a choice failed with ``error``.

    Arguments are validated only then, which saves 2 us for valid ones: the error is that of
    validation if it refuses them, otherwise ``error`` itself.
    """
    try:
        op.validate(*args)
    except Exception as refusal:
        return refusal
    return error


def is_by_survey(op: FusedOp, args: Sequence[Any]) -> bool:
    """Return whether ``auto`` takes what a survey found faster than what it would take without."""
    device = device_of(op, args)
    return choose_on(op, args, device) != _by_rule(op, args, device)


def _by_rule(op: FusedOp, args: Sequence[Any], device: torch.device) -> str:
    """Return what ``auto`` takes without a survey."""
    order = _order(op, args, device)
    return next((name for name in order if _can_run(op, name, args, device)), "reference")


def _first_that_can(op: FusedOp, args: Sequence[Any], device: torch.device) -> str:
    taken = _by_rule(op, args, device)
    if process_choice.named(op) is not None or cpu_choice.is_forced():
        return taken
    surveyed = surveyed_choice.better(op, args, device, taken)
    return surveyed if surveyed and _can_run(op, surveyed, args, device) else taken


def _can_run(op: FusedOp, name: str, args: Sequence[Any], device: torch.device) -> bool:
    if name == "reference":
        return True
    implementation = op.implementations.get(name)
    return (
        implementation is not None
        and implementation.device == device.type
        and not fallback.is_broken(op.name, name)
        and implementation.supports(*args) is None
    )


def _order(op: FusedOp, args: Sequence[Any], device: torch.device) -> Sequence[str]:
    """Return the implementations that ``auto`` asks for these arguments, the first one first."""
    named = process_choice.named(op)
    if named is not None and not cpu_choice.is_forced():
        return (named,) if named in op.implementations else ()
    if device.type == "cpu":
        return cpu_choice.order(op, args)
    return op.prefer(*args) if op.prefer is not None else tuple(op.implementations)


def why_not(op: FusedOp, implementation: str, args: Sequence[Any]) -> str | None:
    """Return None if ``implementation`` can run ``args``, else the reason in a few words."""
    if implementation == "reference":
        return None
    device = device_of(op, args)
    declared = op.implementations[implementation]
    if declared.device != device.type:
        return f"it runs on {declared.device}, the inputs are on {device.type}"
    try:
        return declared.supports(*args)
    except Exception as error:
        raise _of_arguments(op, args, error) from None


def device_of(op: FusedOp, args: Sequence[Any]) -> torch.device:
    """Return the device of the arguments' tensors.

    Raises:
        ArgumentTypeError: an argument is no tensor, or none is one.
        LayoutError: a tensor is sparse, nested or quantized.
        DeviceError: tensors are on several devices.
    """
    first: tuple[str, Tensor] | None = None
    for name, given in zip(op.signature.parameters, args, strict=True):
        if name not in op.tensor_parameters or given is None:
            continue
        for value in given if isinstance(given, (list, tuple)) else (given,):
            if not isinstance(value, Tensor):
                raise ArgumentTypeError(
                    f"{op.short_name}: '{name}' must be a Tensor, got {type(value).__name__}."
                )
            if value.layout is not torch.strided:
                raise LayoutError(
                    f"{op.short_name}: '{name}' has layout {value.layout}; expected torch.strided "
                    "(to_dense() gives it)."
                )
            if value.is_nested or value.is_quantized:
                what, cure = (
                    ("nested", "unbind") if value.is_nested else ("quantized", "dequantize")
                )
                raise LayoutError(
                    f"{op.short_name}: '{name}' is a {what} tensor; expected an ordinary one "
                    f"({cure}() gives it)."
                )
            if first is None:
                first = name, value
            elif value.device != first[1].device:
                raise DeviceError(
                    f"{op.short_name}: '{name}' is on {value.device} and '{first[0]}' on "
                    f"{first[1].device}; move them to one device."
                )
    if first is None:
        raise ArgumentTypeError(f"{op.short_name}: at least one tensor argument is needed.")
    device = first[1].device
    for name, given in zip(op.signature.parameters, args, strict=True):
        if (
            name in op.float_parameters
            and isinstance(given, Tensor)
            and not (given.device == device or given.is_cpu)
        ):
            raise DeviceError(
                f"{op.short_name}: '{name}' is on {given.device} and '{first[0]}' on {device}; "
                "give a number, or a tensor on that device."
            )
    return device

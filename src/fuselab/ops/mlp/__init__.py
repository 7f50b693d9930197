"""Linear layers with an activation after each, in one kernel if no gradient is needed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Inputs, tensors_in
from fuselab.ops._shared.dtypes import cast_operands
from fuselab.ops.mlp import layers_launch
from fuselab.ops.mlp.op import OP, validate
from fuselab.runtime.dispatch import check_types, operator, registration_of

_operator = operator(OP)


@functools.wraps(_operator)
def mlp(*args: Any, implementation: str = "auto", **named: Any) -> Tensor:
    # The operator keeps no hidden activation, so a gradient would have to compute all layers again.
    if (
        implementation == "auto"
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors_in((*args, *named.values())))
    ):
        try:
            bound = OP.bind(Inputs(args, named))
        except TypeError:
            return _operator(*args, **named)  # raises an error that says what is wrong
        if not torch.compiler.is_compiling():
            check_types(registration_of(OP), bound)
        device = bound[0].device.type
        if device != "meta" and torch.is_autocast_enabled(device):  # it raises for meta
            validate(*cast_operands(torch.get_autocast_dtype(device), *bound))
        else:
            validate(*bound)
        return layers_launch.forward(*bound)
    return _operator(*args, implementation=implementation, **named)


__all__ = ["OP", "mlp"]

"""Schemas of raw operators, from the annotations of a reference, and what an argument may be."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import ContractError
from fuselab.op import FusedOp

_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor]: "Tensor[]",
    float: "float",
    int: "SymInt",
    int | None: "SymInt?",
    bool: "bool",
    str: "str",
    str | None: "str?",
    torch.dtype: "ScalarType",
    torch.dtype | None: "ScalarType?",
    Sequence[bool]: "bool[]",
    Sequence[int]: "SymInt[]",
}

# The types that a parameter's value may have, and their description in an error.
VALUE_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    Tensor: ((Tensor,), "a Tensor"),
    Sequence[Tensor]: ((list, tuple), "a list of Tensors"),
    float: ((float, numbers.Real, Tensor, torch.SymFloat, torch.SymInt), "a number"),
    int: ((int, numbers.Integral, torch.SymInt), "an int"),
    bool: ((bool, torch.SymBool), "a bool"),
    str: ((str,), "a str"),
    torch.dtype: ((torch.dtype,), "a torch.dtype"),
    Sequence[bool]: ((list, tuple), "a list of bools"),
    Sequence[int]: ((list, tuple), "a list of ints"),
}

for _annotation in (Tensor, int, str, torch.dtype):
    _types, _words = VALUE_TYPES[_annotation]
    VALUE_TYPES[_annotation | None] = (*_types, type(None)), f"{_words} or None"


def schema_type(op_name: str, parameter: inspect.Parameter) -> str:
    """Return the schema's type of a parameter, by its annotation. Raises ContractError."""
    try:
        return _SCHEMA_TYPES[parameter.annotation]
    except (KeyError, TypeError):
        raise ContractError(
            f"{op_name}: parameter '{parameter.name}' is annotated {parameter.annotation!r}; use "
            "Tensor, Tensor | None, Sequence[Tensor], float, int, int | None, bool, str, "
            "str | None, torch.dtype, torch.dtype | None, Sequence[int] or Sequence[bool]."
        ) from None


def is_scalar_tensor(schema_type: str) -> bool:
    """Return whether the overload ``.scalar_tensor`` takes a 0-d tensor for such a parameter."""
    return schema_type == "float"


def schema_of(op: FusedOp) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return names and schema types of the forward's parameters and of the backward's, which are
    none if the operator has no gradient. Raises ContractError."""
    forward = [
        (name, schema_type(op.name, parameter))
        for name, parameter in op.signature.parameters.items()
    ]
    if not op.tensor_parameters:
        raise ContractError(f"{op.name}: the reference has no parameter annotated Tensor.")
    if op.gradient is None:
        return forward, []
    signature = inspect.signature(op.gradient.reference, eval_str=True)
    backward = [
        (name, schema_type(f"{op.name} (gradient.reference)", parameter))
        for name, parameter in signature.parameters.items()
    ]
    upstream = ("Tensor", "Tensor") if op.output_count == 1 else ("Sequence[Tensor]", "Tensor[]")
    if [kind for _, kind in backward[:2]] != ["bool[]", upstream[1]]:
        raise ContractError(
            f"{op.name}: gradient.reference must begin with (needs: Sequence[bool], "
            f"grad_output: {upstream[0]}, ...)."
        )
    known = range(len(op.tensor_parameters)), range(op.output_count)
    takes_sequences = any(kind == "Tensor[]" for _, kind in forward)
    for place, of_output in op.gradient.passed:
        if takes_sequences or place not in known[0] or of_output not in known[1]:
            raise ContractError(
                f"{op.name}: Gradient.passed has the pair {(place, of_output)}; they are a place "
                f"among its {len(known[0])} tensors, none of them in a sequence, and one among its "
                f"{len(known[1])} outputs."
            )
    first = {other for _, other in op.gradient.equal}
    for place, other in op.gradient.equal:
        if place in first or not {place, other} <= {*range(len(op.tensor_parameters))}:
            raise ContractError(
                f"{op.name}: Gradient.equal has the pair {(place, other)}; both are places among "
                f"its {len(op.tensor_parameters)} tensors, the second in no pair the first."
            )
    return forward, backward


def upstream_parameters(op: FusedOp) -> list[tuple[str, str]]:
    """Return names and schema types of the upstream gradients of the raw backward: one tensor per
    output, because PyTorch's batching of upstream gradients cannot see into a list."""
    if op.output_count == 1:
        return [("grad_output", "Tensor")]
    return [(f"grad_output_{place}", "Tensor") for place in range(op.output_count)]

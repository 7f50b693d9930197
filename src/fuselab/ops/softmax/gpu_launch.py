"""What both GPU launchers do around a launch: allocate, find the rows, cast, and write in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fuselab.ops.softmax.layout import Rows, neighbours, positive, rows_in_place_or_copied
from fuselab.ops.softmax.tensors import Form, cast, empty_gradient, empty_output, readable
from fuselab.runtime import tuning
from fuselab.runtime.grid import power_of_two
from fuselab.runtime.tuning import Config

# (step, form, rows, tensors): "forward" of (input, output), or "backward" of (grad_output, output,
# grad_input). ``rows`` says where the first tensor's rows lie, the others are contiguous.
Launch = Callable[[str, Form, Rows, tuple[Tensor, ...]], None]
# (step, bytes of the widest dtype, width, device): what tuning may choose from for rows that are
# contiguous in the output; of its columns there is nothing to choose.
Candidates = Callable[[str, int, int, torch.device], Sequence[Config]]


def forward(
    launch: Launch,
    input: Tensor,
    dim: int,
    dtype: torch.dtype | None,
    form: Form = "softmax",
) -> Tensor:
    """The forward, out of place."""
    output = empty_output(input, dtype)
    if output.numel():
        input, rows = rows_in_place_or_copied(readable(input, output.dtype), dim)
        launch("forward", form, rows, (input, output))
    return output


def forward_in_place(launch: Launch, input: Tensor, dim: int, form: Form = "softmax") -> None:
    """The forward over its input; one that is not contiguous takes a workspace of its size."""
    if not input.is_contiguous():
        input.copy_(forward(launch, input, dim, None, form))
    elif input.numel():
        input, rows = rows_in_place_or_copied(input, dim)
        launch("forward", form, rows, (input, input))


def backward(
    launch: Launch,
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor,
    dim: int,
    input_dtype: torch.dtype,
    form: Form = "softmax",
) -> tuple[Tensor | None, ...]:
    """The gradient, in the input's dtype."""
    if not needs[0]:
        return (None,)
    grad_input = empty_gradient(output, input_dtype)
    if grad_input.numel():
        grad_output, rows = rows_in_place_or_copied(grad_output, dim)
        launch("backward", form, rows, (grad_output, output.contiguous(), grad_input))
    return (cast(grad_input, input_dtype),)


def chosen(
    implementation: str,
    candidates: Candidates,
    step: str,
    form: Form,
    rows: Rows,
    tensors: tuple[Tensor, ...],
) -> Config:
    """How to launch on these rows; the in-place form goes by its sibling's choices. Rows as wide as
    the same power of two share one."""
    itemsize = max(tensor.element_size() for tensor in tensors)
    dtypes = tensors[0].dtype, tensors[-1].dtype
    return tuning.chosen(
        f"fuselab::{form}",
        implementation if step == "forward" else f"{implementation}_backward",
        (*dtypes, power_of_two(rows.width)),
        candidates(step, itemsize, rows.width, tensors[0].device),
    )


def forward_configs(
    candidates: Candidates, input: Tensor, dim: int, dtype: torch.dtype | None
) -> Sequence[Config]:
    """``FusedOp.configs``: what ``chosen`` offers for these arguments."""
    return _configs(candidates, "forward", input, dim, dtype or input.dtype)


def backward_configs(
    candidates: Candidates,
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor,
    dim: int,
    input_dtype: torch.dtype,
) -> Sequence[Config]:
    """The same of the backward's arguments."""
    return _configs(candidates, "backward", output, dim, input_dtype)


def _configs(
    candidates: Candidates, step: str, tensor: Tensor, dim: int, dtype: torch.dtype
) -> Sequence[Config]:
    if not tensor.numel() or neighbours(tensor, dim) > 1:
        return ()
    width = tensor.shape[positive(dim, tensor)] if tensor.dim() else 1
    itemsize = max(tensor.element_size(), dtype.itemsize)
    return candidates(step, itemsize, width, tensor.device)

"""The operands of a launch: allocated, laid out and cast, for every implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fuselab.ops.softmax.layout import (
    Form,
    Rows,
    cast,
    empty_gradient,
    empty_output,
    readable,
    rows_in_place_or_copied,
)

# A function of (step, form, rows, tensors). "forward" has the tensors (input, output), "backward"
# (grad_output, output, grad_input). ``rows`` is the layout of the first; the others are contiguous.
Launch = Callable[[str, Form, Rows, tuple[Tensor, ...]], None]


@dataclass(frozen=True)
class Launcher:
    """An implementation's forward and backward, around ``launch``, which starts its kernels.

    ``find_rows(tensor, dim)`` returns a tensor that the kernels can read, the one given or a copy,
    and its rows. ``casts`` says whether the kernels convert between the dtypes of input and output;
    if not, both are cast around the launch.
    """

    launch: Launch
    find_rows: Callable[[Tensor, int], tuple[Tensor, Rows]] = rows_in_place_or_copied
    casts: bool = True

    def forward(
        self, input: Tensor, dim: int, dtype: torch.dtype | None, form: Form = "softmax"
    ) -> Tensor:
        """Return a new tensor with the result, in ``dtype`` or the input's."""
        output = empty_output(input, dtype)
        if output.numel():
            read = readable(input, output.dtype) if self.casts else input.to(output.dtype)
            read, rows = self.find_rows(read, dim)
            self.launch("forward", form, rows, (read, output))
        return output

    def forward_in_place(self, input: Tensor, dim: int, form: Form = "softmax") -> None:
        """Write the result over ``input``; if that is not contiguous, a workspace of its size is
        needed."""
        if not input.is_contiguous():
            input.copy_(self.forward(input, dim, None, form))
        elif input.numel():
            _, rows = self.find_rows(input, dim)
            self.launch("forward", form, rows, (input, input))

    def backward(
        self,
        needs: Sequence[bool],
        grad_output: Tensor,
        output: Tensor,
        dim: int,
        input_dtype: torch.dtype,
        form: Form = "softmax",
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient, in the input's dtype."""
        if not needs[0]:
            return (None,)
        grad_input = empty_gradient(output, input_dtype if self.casts else output.dtype)
        if grad_input.numel():
            grad_output, rows = self.find_rows(grad_output, dim)
            tensors = (grad_output, output.contiguous(), grad_input)
            self.launch("backward", form, rows, tensors)
        return (cast(grad_input, input_dtype),)

"""The tensors and loop nests of act(input + scale * update + bias), for every implementation.

``update`` or ``bias`` may be None; ``bias_activation`` is the operator without an update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.dtypes import promoted
from fuselab.ops._shared.layout import MAX_RANK, Nest, is_dense, nest, row_strides
from fuselab.ops._shared.template_arguments import flags

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def empty_output(input: Tensor, update: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return a new, uninitialised output with the promoted dtype and the strides of
    ``torch.empty_like(input)``."""
    return torch.empty_like(input, dtype=promoted(input, update, bias))


@dataclass(frozen=True)
class Saved:
    """The values that ``save`` of the contract returns, in its order: the output or the terms of
    the pre-activation, and the values that are no tensors."""

    output: Tensor | None
    input: Tensor | None
    update: Tensor | None
    bias: Tensor | None
    scale: float | Tensor
    activation: str
    input_dtype: torch.dtype
    update_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None

    @cached_property
    def first(self) -> Tensor | None:
        """The tensor whose shape and strides the gradients take; None for identity."""
        return self.output if self.output is not None else self.input

    def empty_gradients(self, needs: Sequence[bool], grad_output: Tensor) -> Gradients:
        """Return new, uninitialised gradients of input, update and bias, None if not needed.

        The first two have the strides of ``torch.empty_like`` of the saved output, else of the
        saved input, else (identity saves neither) of the upstream gradient.
        """
        like = self.first if self.first is not None else grad_output
        columns = grad_output.shape[-1:]
        return (
            torch.empty_like(like, dtype=self.input_dtype) if needs[0] else None,
            torch.empty_like(like, dtype=self.update_dtype) if needs[1] else None,
            grad_output.new_empty(columns, dtype=self.bias_dtype) if needs[2] else None,
        )

    def is_single_row(self, grad_output: Tensor) -> bool:
        """Return whether there is one row and no update: the gradients of input and bias are the
        same numbers, in one dtype."""
        alone = self.update_dtype is None and self.bias_dtype == self.input_dtype
        return alone and grad_output.numel() == grad_output.shape[-1]


def saved_for(
    activation: str, dtype: torch.dtype, output: Tensor | None, preactivation: Tensor | None
) -> Saved:
    """Return what is saved of an activation alone, whose gradient and bias's gradient get
    ``dtype``."""
    terms = (output, preactivation, None, None)
    return Saved(*terms, 1.0, activation, dtype, None, dtype)


def preactivation_gradient(
    pull_back: Callable[[Sequence[bool], Tensor, Saved], Gradients],
    needs: tuple[bool, bool],
    grad_output: Tensor,
    output: Tensor | None,
    activation: str,
    recompute: Callable[[], Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradient of an activation's input and that of the bias in it, from one pass of a
    backward launcher; ``needs`` says which. Identity passes the upstream gradient on.
    ``recompute()`` returns the pre-activation, if the derivative needs it."""
    passes = needs[0] and activation != "identity"
    if not (passes or needs[1]):
        return grad_output, None
    from_operands = activation_named(activation).derivative_of == "preactivation"
    preactivation = recompute() if from_operands else None
    saved = saved_for(activation, grad_output.dtype, output, preactivation)
    total, _, grad_bias = pull_back((passes, False, needs[1]), grad_output, saved)
    return total if passes else grad_output, grad_bias


def broadcast_strides(bias: Tensor | None, rank: int) -> tuple[int, ...]:
    return (0,) * rank if bias is None else (0,) * (rank - 1) + bias.stride()


def overwrite(
    forward: Callable[..., Tensor],
    input: Tensor,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float | Tensor,
    activation: str,
) -> None:
    """Write the output of ``forward`` over ``input``.

    That is safe: a thread reads an element of the input before it writes that element, no other
    thread reads it, and an update or bias that shares memory with the input has been refused. The
    kernels write only dense tensors of the promoted dtype; any other input is written by a copy.
    """
    if is_dense(input) and promoted(input, update, bias) == input.dtype:
        forward(input, update, bias, scale, activation, output=input)
    else:
        input.copy_(forward(input, update, bias, scale, activation))


def forward_nest(
    output: Tensor, input: Tensor, update: Tensor | None, bias: Tensor | None
) -> tuple[Nest, Tensor, Tensor | None]:
    """Return the nest with operands input, update, bias, and input and update. If more than 5 loops
    would be needed, these two are copies with the output's layout."""
    first = update if update is not None else input
    strides = (input.stride(), first.stride(), broadcast_strides(bias, output.dim()))
    loops = nest(output, strides)
    if len(loops.sizes) <= MAX_RANK:
        return loops, input, update
    input = torch.empty_like(output, dtype=input.dtype).copy_(input)
    if update is not None:
        update = torch.empty_like(output, dtype=update.dtype).copy_(update)
    strides = (input.stride(), input.stride(), broadcast_strides(bias, output.dim()))
    return nest(output, strides), input, update


def run_forward(
    launch: Callable[[Nest, Operands, float | Tensor, str, Tensor], None],
    output: Tensor | None,
    input: Tensor,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float | Tensor,
    activation: str,
) -> Tensor:
    """Return the output, allocated if it is None, after ``launch(loops, operands, scale,
    activation, output)`` has filled it; ``operands`` are input, update and bias."""
    output = empty_output(input, update, bias) if output is None else output
    if output.numel():
        loops, input, update = forward_nest(output, input, update, bias)
        launch(loops, (input, update, bias), scale, activation, output)
    return output


Operands = Sequence[Tensor | None]
Elementwise = Callable[[Nest, Operands, Gradients], None]


def run_backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    saved: Saved,
    elementwise: Elementwise,
    with_bias: Callable[[Matrices], None],
) -> Gradients:
    """Allocate the gradients and fill them: by ``with_bias`` if the bias's is needed, else by
    ``elementwise`` over a nest of grad_output, first, update and bias."""
    grads = saved.empty_gradients(needs, grad_output)
    if grad_output.numel() == 0:
        return (*grads[:2], grads[2].zero_() if grads[2] is not None else None)
    written = grads
    if needs[2] and saved.is_single_row(grad_output):
        # The bias's gradient is that of the pre-activation, and takes the place of an update's.
        assert grads[2] is not None
        written = grads[0], grads[2].view(grad_output.shape), None
    elif needs[2]:
        matrices = Matrices(grad_output, saved, grads)
        with_bias(matrices)
        return matrices.finished()
    template = written[0] if written[0] is not None else written[1]
    if template is not None:
        operands: Operands = (grad_output, saved.first, saved.update, saved.bias)
        loops = _backward_nest(template, operands)
        if len(loops.sizes) > MAX_RANK:
            operands = _dense_operands(template, operands)
            loops = _backward_nest(template, operands)
        elementwise(loops, operands, written)
    return grads


def _backward_nest(template: Tensor, operands: Operands) -> Nest:
    """Return the nest with operands grad_output, first, update, bias. An operand that is None gets
    the strides of grad_output, so that it adds no loop."""
    *dense, bias = operands
    assert dense[0] is not None
    upstream = dense[0].stride()
    strides = [upstream if tensor is None else tensor.stride() for tensor in dense]
    strides.append(upstream if bias is None else broadcast_strides(bias, template.dim()))
    return nest(template, strides)


def _dense_operands(template: Tensor, operands: Operands) -> Operands:
    """Copy all operands but the last, the bias, to the template's layout."""
    *dense, bias = operands
    return [
        operand
        if operand is None
        else torch.empty_like(template, dtype=operand.dtype).copy_(operand)
        for operand in dense
    ] + [bias]


def kind_of(activation: str, *terms: Tensor | None) -> str:
    """Return the first template arguments of every kernel in C++ and CUDA C++; ``terms`` are update
    and bias."""
    given = flags(*(term is not None for term in terms))
    return f"{activation_named(activation).functor}, Terms<{given}>"


def backward_kind(saved: Saved) -> str:
    if saved.input is None:  # the terms are not read
        return f"{activation_named(saved.activation).functor}, Terms<true, true>"
    return kind_of(saved.activation, saved.update, saved.bias)


def forward_dtypes(output: Tensor, operands: Operands) -> list[torch.dtype]:
    """Return the dtypes of output, input, update and bias; for a missing term the input's."""
    input = operands[0]
    assert input is not None
    return [output.dtype, *((input if term is None else term).dtype for term in operands)]


def backward_dtypes(grad_output: Tensor, saved: Saved) -> list[torch.dtype]:
    """Return the dtypes of output, ``saved.first``, input, update and bias."""
    return [
        grad_output.dtype,
        saved.first.dtype if saved.first is not None else grad_output.dtype,
        saved.input_dtype,
        saved.update_dtype or saved.input_dtype,
        saved.bias_dtype or saved.input_dtype,
    ]


class Matrices:
    """The operands and the gradients of a backward with bias, as matrices (rows, columns)."""

    def __init__(self, grad_output: Tensor, saved: Saved, grads: Gradients) -> None:
        def matrix(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.reshape(-1, tensor.shape[-1])

        upstream = matrix(grad_output)
        assert upstream is not None and grads[2] is not None
        self.rows, self.columns = upstream.shape
        self.operands = (upstream, matrix(saved.first), matrix(saved.update))
        self.bias_stride = 0 if saved.bias is None else saved.bias.stride(0)
        self.grads, self.grad_bias = grads, grads[2]
        self.written = tuple(
            grad
            if grad is None or grad.is_contiguous()
            else torch.empty_like(grad, memory_format=torch.contiguous_format)
            for grad in grads
        )

    @property
    def strides(self) -> tuple[int, ...]:
        """The row and column stride of each operand, and the stride of the bias."""
        pairs = (
            (0, 0) if operand is None else row_strides(self.rows, self.columns, operand)
            for operand in self.operands
        )
        return (*(stride for pair in pairs for stride in pair), self.bias_stride)

    def needs_64_bit_offsets(self) -> bool:
        # The margin is needed because a tile's offsets are computed before they are masked.
        furthest = (
            (self.rows + 2048) * row + (self.columns + 2048) * column
            for row, column in (
                (self.columns, 1),
                (0, self.bias_stride),
                *zip(self.strides[:-1:2], self.strides[1::2], strict=True),
            )
        )
        # A row index is advanced by a step of all blocks' tiles before it is compared. A tile of
        # few rows has up to 8192 columns, which are compared before a stride multiplies them.
        return max(*furthest, self.rows + 2**24, self.columns + 2**24) > 2**31 - 1

    def empty_sums(self, blocks: int) -> Tensor:
        """Return a tensor for the blocks' column sums: the bias's gradient itself for one block."""
        if blocks == 1:
            return self.grad_bias
        return self.grad_bias.new_empty((blocks, self.columns), dtype=torch.float64)

    def finished(self) -> Gradients:
        """Return the gradients; those that were written to a contiguous copy are filled from it."""
        for grad, source in zip(self.grads, self.written, strict=True):
            if grad is not None and source is not None and grad is not source:
                grad.copy_(source)
        return self.grads


def flat_columns(
    loops: Nest, bias_place: int | None, read: Sequence[int]
) -> tuple[int, int] | None:
    """Return (columns, stride of the bias) if a flat kernel can walk the nest, else None.

    ``read`` are the positions of the operands that must have the output's memory order. The bias
    repeats every ``columns`` elements.
    """
    linear = [1] * len(loops.sizes)
    for dim in range(len(linear) - 1, 0, -1):
        linear[dim - 1] = linear[dim] * loops.sizes[dim]
    if any(loops.strides[place] != tuple(linear) for place in read):
        return None
    if bias_place is None:
        return 1, 0
    *outer, inner = loops.strides[bias_place]
    if any(outer):
        return None
    return loops.sizes[-1] if inner else 1, inner

"""Launchers of act(input + scale * update + bias): they allocate outputs and start kernels.

``update`` or ``bias`` may be None; ``bias_activation`` is the operator without update. Every
launcher takes the kernels' source first, so that a package passes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fuselab.ops.activations import activation as activation_named
from fuselab.ops.activations.layout import MAX_RANK, Nest, nest, promoted, row_strides
from fuselab.runtime.cpp_source import CppSource
from fuselab.runtime.parameters import Scalar, f32, f64, i64

_CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
}

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def empty_output(input: Tensor, update: Tensor | None, bias: Tensor | None) -> Tensor:
    """The output: type promotion's dtype and the strides of ``torch.empty_like(input)``."""
    return torch.empty_like(input, dtype=promoted(input, update, bias))


@dataclass(frozen=True)
class Saved:
    """What the forward left for the backward: the output, or what the pre-activation is made of."""

    activation: str
    scale: float | Tensor
    output: Tensor | None
    input: Tensor | None
    update: Tensor | None
    bias: Tensor | None
    input_dtype: torch.dtype
    update_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None

    @cached_property
    def first(self) -> Tensor | None:
        """The tensor whose shape and strides the gradients take; None for identity."""
        return self.output if self.output is not None else self.input

    def empty_gradients(self, needs: Sequence[bool], grad_output: Tensor) -> Gradients:
        """The gradients that are needed, of input, update and bias, not yet written.

        The first two have the strides of ``torch.empty_like`` of the output where that was saved,
        of the input where that was, and of the upstream gradient for identity, which saves nothing.
        """
        like = self.first if self.first is not None else grad_output
        columns = grad_output.shape[-1:]
        return (
            torch.empty_like(like, dtype=self.input_dtype) if needs[0] else None,
            torch.empty_like(like, dtype=self.update_dtype) if needs[1] else None,
            grad_output.new_empty(columns, dtype=self.bias_dtype) if needs[2] else None,
        )


def _broadcast(bias: Tensor | None, rank: int) -> tuple[int, ...]:
    return (0,) * rank if bias is None else (0,) * (rank - 1) + bias.stride()


def _forward_nest(
    output: Tensor, input: Tensor, update: Tensor | None, bias: Tensor | None
) -> tuple[Nest, Tensor, Tensor | None]:
    """The nest with operands input, update, bias; beyond rank 5, over copies laid out alike."""
    first = update if update is not None else input
    strides = (input.stride(), first.stride(), _broadcast(bias, output.dim()))
    loops = nest(output, strides)
    if len(loops.sizes) <= MAX_RANK:
        return loops, input, update
    input = torch.empty_like(output, dtype=input.dtype).copy_(input)
    if update is not None:
        update = torch.empty_like(output, dtype=update.dtype).copy_(update)
    strides = (input.stride(), input.stride(), _broadcast(bias, output.dim()))
    return nest(output, strides), input, update


def _terms(update: Tensor | None, bias: Tensor | None) -> str:
    return f"Terms<{str(update is not None).lower()}, {str(bias is not None).lower()}>"


def _numbers(*groups: Sequence[int]) -> list[Scalar]:
    return [i64(number) for group in groups for number in group]


def _cpp_scale(scale: float | Tensor, output_dtype: torch.dtype) -> Scalar:
    value = scale.item() if isinstance(scale, Tensor) else scale
    return f64(value) if output_dtype == torch.float64 else f32(value)


def forward_cpp(
    source: CppSource,
    input: Tensor,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float | Tensor,
    activation: str,
) -> Tensor:
    """One launch of ``forward`` in cpu_kernels.cpp."""
    output = empty_output(input, update, bias)
    if output.numel() == 0:
        return output
    loops, input, update = _forward_nest(output, input, update, bias)
    loops = loops.padded()
    types = ", ".join(
        _CPP_NAMES[(tensor if tensor is not None else input).dtype]
        for tensor in (output, input, update, bias)
    )
    functor = activation_named(activation).functor
    source.launch(
        f"forward<{functor}, {_terms(update, bias)}, {types}>",
        args=(
            input,
            update,
            bias,
            output,
            _cpp_scale(scale, output.dtype),
            *_numbers(loops.sizes, *loops.strides),
        ),
    )
    return output


def backward_cpp(
    source: CppSource, needs: Sequence[bool], grad_output: Tensor, saved: Saved
) -> Gradients:
    """One launch of ``backward``, or of ``backward_with_bias`` where the bias's gradient is needed.

    The latter's workspace is float64: the columns, and up to 64 partial rows of them (one for every
    1024 columns less). It writes row-major gradients, so a gradient whose strides are others is
    copied once more, and an operand whose rows have no common stride is copied first.
    """
    grads = saved.empty_gradients(needs, grad_output)
    if grad_output.numel() == 0:
        return (*grads[:2], grads[2].zero_() if grads[2] is not None else None)
    if needs[2]:
        return _backward_with_bias_cpp(source, grad_output, saved, grads)
    grad_input, grad_update, _ = grads
    template = grad_input if grad_input is not None else grad_update
    if template is None:
        return grads
    operands = [grad_output, saved.first, saved.update, saved.bias]
    loops = _backward_nest(template, operands)
    if len(loops.sizes) > MAX_RANK:
        operands[:3] = [
            operand if operand is None else torch.empty_like(template, dtype=operand.dtype)
            .copy_(operand)
            for operand in operands[:3]
        ]
        loops = _backward_nest(template, operands)
    loops = loops.padded()
    source.launch(
        f"backward<{_backward_types(grad_output, saved)}>",
        args=(
            *operands,
            grad_input,
            grad_update,
            _cpp_scale(saved.scale, grad_output.dtype),
            *_numbers(loops.sizes, *loops.strides),
        ),
    )
    return grads


def _backward_nest(template: Tensor, operands: Sequence[Tensor | None]) -> Nest:
    """The nest with operands grad_output, first, update, bias; one that is not read takes the
    strides of grad_output and so asks for no loop of its own."""
    *dense, bias = operands
    assert dense[0] is not None
    upstream = dense[0].stride()
    strides = [upstream if tensor is None else tensor.stride() for tensor in dense]
    strides.append(upstream if bias is None else _broadcast(bias, template.dim()))
    return nest(template, strides)


def _backward_types(grad_output: Tensor, saved: Saved) -> str:
    """Template arguments of the backward kernels of cpu_kernels.cpp."""
    functor = activation_named(saved.activation).functor
    first = saved.first.dtype if saved.first is not None else grad_output.dtype
    dtypes = (
        grad_output.dtype,
        first,
        saved.input_dtype,
        saved.update_dtype or saved.input_dtype,
        saved.bias_dtype or saved.input_dtype,
    )
    terms = _terms(saved.update, saved.bias) if saved.input is not None else "Terms<true, true>"
    return f"{functor}, {terms}, {', '.join(_CPP_NAMES[dtype] for dtype in dtypes)}"


def _matrix(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.reshape(-1, tensor.shape[-1])


def _backward_with_bias_cpp(
    source: CppSource, grad_output: Tensor, saved: Saved, grads: Gradients
) -> Gradients:
    written = [
        grad if grad is None or grad.is_contiguous() else torch.empty_like(
            grad, memory_format=torch.contiguous_format
        )
        for grad in grads
    ]
    upstream = _matrix(grad_output)
    assert upstream is not None
    rows, columns = upstream.shape
    operands = [upstream, _matrix(saved.first), _matrix(saved.update)]
    strides = [
        (0, 0) if operand is None else row_strides(rows, columns, operand) for operand in operands
    ]
    source.launch(
        f"backward_with_bias<{_backward_types(grad_output, saved)}>",
        args=(
            *operands,
            saved.bias,
            *written,
            _cpp_scale(saved.scale, grad_output.dtype),
            *_numbers((rows, columns), *strides),
            i64(0 if saved.bias is None else saved.bias.stride(0)),
        ),
    )
    return _copied(grads, written)


def _copied(grads: Gradients, written: Sequence[Tensor | None]) -> Gradients:
    """``grads``, filled from the tensors that were written in their place."""
    for grad, source in zip(grads, written, strict=True):
        if grad is not None and source is not None and grad is not source:
            grad.copy_(source)
    return grads

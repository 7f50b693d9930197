"""The autograd.Function of an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.runtime import launch_plans, rehearsal
from fuselab.runtime.dispatch.registration import Registration, has_scalar_tensor
from fuselab.runtime.dispatch.sequences import flat_of, nested
from fuselab.runtime.registered import REGISTERED


def autograd_function(registration: Registration) -> type[torch.autograd.Function]:
    """Return the autograd.Function of an operator: raw forward, raw backward, second derivative.

    Its methods close over the operator's name and look everything else up in ``REGISTERED``,
    because Dynamo can trace a global dictionary but no closure over an object of ours.
    """
    op_name = registration.name

    def raw_backward(
        name: str, needs: Sequence[bool], grad: Any, saved: Sequence[Any], fresh: bool = False
    ) -> Any:
        """Return the gradients; none is a view of an upstream one if ``fresh``. ``grad`` is the
        upstream gradient, or the tuple of several."""
        registration = REGISTERED[op_name]
        if not torch.compiler.is_compiling():
            arguments = (tuple(needs), grad, *saved)
            held = launch_plans.lookup(registration.backward_id, name, arguments, True, fresh)
            if held is None and not fresh:
                held = registration.gradient_by_reference(name, arguments)
            if held is not None:
                return held
        scalar_tensors = has_scalar_tensor(registration.schema[1][2:], saved)
        upstream = (grad,) if isinstance(grad, Tensor) else grad
        grads = registration.raw_backward(scalar_tensors, list(needs), *upstream, *saved, name)
        grads = (grads,) if isinstance(grads, Tensor) else grads
        return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))

    class Backward(torch.autograd.Function):
        """The backward as a differentiable step: its own derivative is gradient.reference's."""

        generate_vmap_rule = True

        @staticmethod
        def forward(
            name: str,
            needs: tuple[bool, ...],
            lengths: tuple[int | None, ...] | None,
            *flat: Any,
        ) -> Any:
            grad, *saved = nested(flat, lengths)
            grads = raw_backward(name, needs, grad, saved, fresh=True)
            return tuple(flat[0].new_empty(0) if value is None else value for value in grads)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            _, ctx.needs, ctx.lengths, *values = inputs
            _save(ctx, values)

        @staticmethod
        def backward(ctx: Any, *grad_grads: Tensor) -> Any:
            values = _saved(ctx)
            gradient = REGISTERED[op_name].op.gradient
            assert gradient is not None
            places = [
                place
                for place, value in enumerate(values)
                if isinstance(value, Tensor) and value.is_floating_point()
            ]

            def formula(*tensors: Tensor) -> tuple[Tensor, ...]:
                filled = list(values)
                for place, tensor in zip(places, tensors, strict=True):
                    filled[place] = tensor
                grads = gradient.reference(ctx.needs, *nested(filled, ctx.lengths))
                return tuple(grad for grad in grads if grad is not None)

            pullback = torch.func.vjp(formula, *(values[place] for place in places))[1]
            wanted = tuple(grad for grad, need in zip(grad_grads, ctx.needs, strict=True) if need)
            result: list[Tensor | None] = [None] * (3 + len(values))
            for place, grad in zip(places, pullback(wanted), strict=True):
                result[3 + place] = grad
            return tuple(result)

    def differentiable_backward(
        name: str, needs: Sequence[bool], grad: Any, saved: Sequence[Any]
    ) -> Any:
        """Return the gradients as a step that autograd records."""
        flat, lengths = flat_of((grad, *saved), REGISTERED[op_name].backward_sequences)
        return Backward.apply(name, tuple(needs), lengths, *flat)

    class Forward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            *flat, lengths, name = args
            arguments = nested(flat, lengths)
            registration = REGISTERED[op_name]
            scalar_tensors = has_scalar_tensor(registration.schema[0], arguments)
            if torch.compiler.is_compiling():
                return registration.raw_forward(scalar_tensors, *arguments, name)
            # Detached, because autograd attaches the gradient to this output.
            held = launch_plans.lookup(registration.forward_id, name, tuple(arguments), True, True)
            if held is not None:
                return held
            with rehearsal.expecting_backward():
                return registration.raw_forward(scalar_tensors, *arguments, name)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            *flat, ctx.lengths, ctx.implementation = inputs
            registration = REGISTERED[op_name]
            gradient = registration.op.gradient
            assert gradient is not None
            saved = gradient.save(output, *nested(flat, ctx.lengths))
            values, ctx.saved_lengths = flat_of(saved, registration.saved_sequences)
            ctx.equal = _equal_gradients(registration, flat)
            ctx.passed = _passed_gradients(registration, flat, output)
            _save(ctx, values)
            if registration.returned_count > 1:
                outputs = output[: registration.output_count]
                whole = [value for value in outputs if not value.is_floating_point()]
                residuals = output[registration.output_count :]
                ctx.mark_non_differentiable(*whole, *residuals)

        @staticmethod
        def past_plan(name: str, arguments: tuple[Any, ...]) -> Any:
            """Return the gradients if the backward has no plan, or is itself differentiated."""
            needs, grad, *saved = arguments
            if torch.is_grad_enabled():
                return differentiable_backward(name, needs, grad, saved)
            return raw_backward(name, needs, grad, saved)

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor) -> Any:
            registration = REGISTERED[op_name]
            saved = nested(_saved(ctx), ctx.saved_lengths)
            places = _flat_places(registration, ctx.lengths)
            needs = tuple(ctx.needs_input_grad[place] for place in places)
            # Behind the outputs' upstream gradients are those of the residuals, which have none.
            count = registration.output_count
            grad = upstream[0] if count == 1 else upstream[:count]
            asked = list(needs)
            for place, _ in ctx.passed:
                asked[place] = False
            for place, other in ctx.equal:
                asked[place] = asked[place] and not needs[other]
            grads: list[Tensor | None] = [None] * len(asked)
            if any(asked):
                twice = torch.is_grad_enabled() and not torch.compiler.is_compiling()
                step = differentiable_backward if twice else raw_backward
                grads = list(step(ctx.implementation, asked, grad, saved))
            for place, of_output in ctx.passed:
                grads[place] = upstream[of_output]
            for place, other in ctx.equal:
                grads[place] = grads[other] if needs[other] else grads[place]
            result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
            for place, need, value in zip(places, needs, grads, strict=True):
                result[place] = value if need else None
            return tuple(result)

    Forward.__name__ = Forward.__qualname__ = f"{registration.op.short_name}_autograd"
    Backward.__name__ = Backward.__qualname__ = f"{registration.op.short_name}_backward_autograd"
    return Forward


def _flat_places(registration: Registration, lengths: tuple[int | None, ...] | None) -> list[int]:
    """Return the places of the tensor parameters' tensors in the flat list of arguments."""
    if lengths is None:
        return list(registration.tensor_positions)
    found: list[int] = []
    begin = 0
    for is_tensor, length in zip(registration.is_tensor, lengths, strict=True):
        count = 1 if length is None else length
        if is_tensor:
            found.extend(range(begin, begin + count))
        begin += count
    return found


def _equal_gradients(
    registration: Registration, flat: Sequence[Any]
) -> tuple[tuple[int, int], ...]:
    """Return the pairs of ``Gradient.equal`` that hold for these arguments; none where a transform
    or a compiler sees the tensors, which may then have no strides, or one tensor too few."""
    gradient = registration.op.gradient
    assert gradient is not None
    if (
        not gradient.equal
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
    ):
        return ()
    tensors = [flat[place] for place in registration.tensor_positions]
    return tuple(pair for pair in gradient.equal if _are_alike(*(tensors[at] for at in pair)))


def _passed_gradients(
    registration: Registration, flat: Sequence[Any], output: Any
) -> tuple[tuple[int, int], ...]:
    """Return the pairs of ``Gradient.passed`` that hold for these arguments and their output."""
    gradient = registration.op.gradient
    assert gradient is not None
    outputs = output if isinstance(output, tuple) else (output,)
    pairs = ((flat[registration.tensor_positions[at]], outputs[of]) for at, of in gradient.passed)
    hold = [
        all(getattr(one, name) == getattr(other, name) for name in ("dtype", "device", "shape"))
        for one, other in pairs
    ]
    return tuple(pair for pair, holds in zip(gradient.passed, hold, strict=True) if holds)


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two arguments are tensors of one dtype, device, shape and strides."""
    are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return (
        are_tensors
        and all(getattr(one, name) == getattr(other, name) for name in ("dtype", "device", "shape"))
        and one.stride() == other.stride()
    )


class _Saved:
    """A marker in place of a tensor that is in ``ctx.saved_tensors``."""


def _save(ctx: Any, values: Sequence[Any]) -> None:
    """Save tensors by ``save_for_backward``, which detects in-place changes, and the rest in
    ``ctx.plain``."""
    tensors: list[Tensor] = []
    plain: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            plain.append(_Saved)
        else:
            plain.append(value)
    ctx.save_for_backward(*tensors)
    ctx.plain = plain


def _saved(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if value is _Saved else value for value in ctx.plain]

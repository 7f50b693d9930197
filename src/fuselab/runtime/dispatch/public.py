"""The public function of an operator, from a call to a launch plan or a raw operator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from fuselab.errors import ArgumentError, ArgumentTypeError, DifferentiationError, UnknownNameError
from fuselab.op import tensors_in
from fuselab.runtime import fallback, launch_plans, launch_recording
from fuselab.runtime.dispatch.arguments import check_types, with_host_floats, with_scalar_tensors
from fuselab.runtime.dispatch.autocast import has_autocast, without_autocast
from fuselab.runtime.dispatch.choice import choose_on, device_of
from fuselab.runtime.dispatch.overlap import lies_in_memory, refuse_overlap
from fuselab.runtime.dispatch.raw_operator import bump_versions
from fuselab.runtime.dispatch.registration import Registration, has_scalar_tensor
from fuselab.runtime.registered import REGISTERED


def public_function(registration: Registration) -> Callable[..., Any]:
    """Return the function that users call. It tries a launch plan first, then ``_call``."""
    names = tuple(registration.op.signature.parameters)
    defaults = {
        name: parameter.default
        for name, parameter in registration.op.signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    arity = len(names)
    # The defaults behind so many positional arguments, where all others have one.
    tails = {
        count: tuple(defaults[name] for name in names[count:])
        for count in range(arity)
        if all(name in defaults for name in names[count:])
    }
    short = registration.op.short_name
    forward_id = registration.forward_id
    has_residuals = registration.op.residual_count > 0

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if not kwargs and len(args) in tails:
            return args + tails[len(args)]
        if len(args) > arity:
            raise ArgumentTypeError(f"{short}: takes {arity} arguments, got {len(args)}.")
        bound = list(args)
        for name in names[len(args) :]:
            if name in kwargs:
                bound.append(kwargs.pop(name))
            elif name in defaults:
                bound.append(defaults[name])
            else:
                raise ArgumentTypeError(f"{short}: the argument '{name}' is missing.")
        if kwargs:
            raise ArgumentTypeError(f"{short}: unexpected argument '{next(iter(kwargs))}'.")
        return tuple(bound)

    def public(*args: Any, implementation: str = "auto", **kwargs: Any) -> Any:
        if kwargs or len(args) != arity:
            args = bind(args, kwargs)
        if not torch.compiler.is_compiling():
            held = launch_plans.lookup(forward_id, implementation, args)
            if held is not None:
                return registration.op.without_residuals(held) if has_residuals else held
        return _call(registration, args, implementation)

    def public_in_place(*args: Any, implementation: str = "auto", **kwargs: Any) -> Any:
        if kwargs or len(args) != arity:
            args = bind(args, kwargs)
        if not torch.compiler.is_compiling():
            # A plan's key has the strides, so no plan exists for a tensor that overlaps itself. But
            # it does not have the addresses of several tensors, so their overlap is checked here.
            # Under torch.func and modes they may have no address, and there is no plan.
            if several and not (
                torch._C._functorch.peek_interpreter_stack() or torch._C._len_torch_dispatch_stack()
            ):
                try:
                    refuse_overlap(registration.op, args)
                except (ArgumentError, RuntimeError):
                    if all(map(lies_in_memory, tensors_in(args))):
                        raise
            if launch_plans.lookup(forward_id, implementation, args) is not None:
                bump_versions(tensors_in([args[place] for place in written]))
                return args[first_written]
        _call(registration, args, implementation)
        return args[first_written]

    if registration.op.mutates:
        written = [names.index(name) for name in registration.op.mutates]
        first_written = written[0]
        several = len(registration.tensor_positions) > 1 or bool(registration.sequence_positions)
        public = public_in_place

    # Dynamo keeps what it compiles of a function beside its code, and refuses to compile one code
    # more than a few times: each operator has a copy of its own.
    public.__code__ = public.__code__.replace(co_name=short)
    public.__name__ = public.__qualname__ = short
    public.__doc__ = registration.op.reference.__doc__
    parameters = [*registration.op.signature.parameters.values()]
    public.__signature__ = registration.op.signature.replace(  # type: ignore[attr-defined]
        parameters=[
            *parameters,
            inspect.Parameter(
                "implementation", inspect.Parameter.KEYWORD_ONLY, default="auto", annotation=str
            ),
        ]
    )
    return public


def _needs_gradient(values: Iterable[Any]) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(values))


def _call(registration: Registration, args: tuple[Any, ...], implementation: str) -> Any:
    """Run the public function's path for a call without a launch plan."""
    op = registration.op
    compiling = torch.compiler.is_compiling()
    constant = registration.constant_positions
    if constant and not compiling and _needs_gradient(args[place] for place in constant):
        detached = registration.without_gradients(args)
        return registration.public(*detached, implementation=implementation)
    if not compiling and op.gradient is not None:
        # lookup found no plan. If there is one nevertheless, the call needs a gradient.
        output = registration.from_plan(args, implementation)
        if output is not None:
            return output
    if implementation not in ("auto", "reference", *op.implementations):
        raise UnknownNameError(
            "implementation", implementation, ["auto", "reference", *op.implementations]
        )
    if not compiling:
        check_types(registration, args)
    device = device_of(op, args)
    if op.autocast is not None and not op.mutates and has_autocast(device.type):
        args = tuple(op.autocast(torch.get_autocast_dtype(device.type), *args))
    if not (compiling or op.mutates):
        with launch_recording.ChoiceWatch() as choice:
            by_reference = (
                implementation == "reference"
                # Forward-mode differentiation takes the reference, which has every derivative.
                or forward_ad._current_level >= 0
                or (implementation == "auto" and choose_on(op, args, device) == "reference")
            )
            if by_reference and has_autocast(device.type):
                op.validate(*args)  # saves 5 us, for nothing is remembered under autocast
            elif by_reference:
                choice.validate(op.validate, args)
        if by_reference:
            if torch.is_grad_enabled():
                registration.refuse_frozen(args)
            if (
                choice.is_final
                and forward_ad._current_level < 0
                and not any(fallback.is_broken(op.name, name) for name in op.implementations)
            ):
                launch_plans.keep_reference(
                    registration.forward_id, implementation, args, op.reference
                )
            return without_autocast(op.reference, args)
    if compiling and op.supports is not None and implementation in ("auto", "reference"):
        is_taken = implementation == "auto" and op.supports(*args) is None
        if not is_taken and not op.mutates:
            return without_autocast(op.reference, args)
    if not compiling and device.type != "cpu":
        args = with_host_floats(registration, args)
    # A float in a GPU's memory stays there: reading it would synchronise and break a CUDA graph.
    # Dynamo in torch 2.11 cannot trace bool() of a tuple.
    scalar_tensors = len(registration.float_positions) > 0 and (
        compiling or (device.type != "cpu" and has_scalar_tensor(registration.schema[0], args))
    )
    if scalar_tensors:
        args = with_scalar_tensors(registration, args)
    if torch.is_grad_enabled() and _needs_gradient(args):
        if op.gradient is None:
            other = f"; {op.short_name[:-1]} has one" if f"{op.name[:-1]}" in REGISTERED else ""
            raise DifferentiationError(
                f"{op.short_name} defines no gradient{other}; detach its inputs or call it under "
                "torch.no_grad()."
            )
        if not compiling and choice.is_final:
            launch_plans.keep_differentiable(registration.forward_id, implementation, args)
        return op.without_residuals(registration.differentiable(*args, implementation))
    if not compiling and op.gradient is not None and torch._C._are_functorch_transforms_active():
        # A tensor of torch.func.vmap does not tell that it wraps one of torch.func.grad, and when
        # the batching rule finds out it is too late to apply an autograd.Function.
        return op.without_residuals(registration.differentiable(*args, implementation))
    return op.without_residuals(registration.raw_forward(scalar_tensors, *args, implementation))

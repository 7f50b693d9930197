"""The function of a package as an operator of PyTorch: the choice of kernels, and the gradient.

An operator has two raw operators of ``torch.library``, one for its forward and one for its
backward, with fake implementations for ``torch.compile``. An ``autograd.Function`` stands around
them, and the gradient's own derivative comes from PyTorch formulas.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fuselab.errors import BuildError
from fuselab.op import tensors_in
from fuselab.runtime import fallback
from fuselab.runtime.dispatch.autocast import has_autocast, without_autocast
from fuselab.runtime.dispatch.overlap import unshared

OPERATORS: dict[str, Operator] = {}  # Dynamo traces a global dictionary, but no closure over one
_NAMESPACE = "ejected_standalone"
_libraries: dict[str, torch.library.Library] = {}


@dataclass(frozen=True)
class Kernels:
    """The launchers of one language, and the type of device on which they run."""

    device: str
    forward: Callable[..., Any]
    backward: Callable[..., tuple[Tensor | None, ...]] | None = None


@dataclass(frozen=True)
class Differentiation:
    """The gradient of an operator.

    ``save(output, *args)`` gives what the backward reads, ``saved`` tensors. ``formulas`` and
    ``fake`` take ``(needs, grad_output, *saved)``, as a backward does. ``formulas`` computes in
    plain PyTorch, ``fake`` returns empty tensors. The gradient of an argument in ``frozen``, by its
    place, is refused with what to do instead. That of one in ``non_differentiable`` is None.
    """

    save: Callable[..., tuple[Tensor, ...]]
    formulas: Callable[..., tuple[Tensor | None, ...]]
    fake: Callable[..., tuple[Tensor | None, ...]]
    saved: int
    frozen: Mapping[int, str] = field(default_factory=dict)
    non_differentiable: Sequence[int] = ()


@dataclass(frozen=True)
class Operator:
    """A function with its kernels.

    ``name`` is what users call it, and ``module`` the name of the module that declares it.
    ``reference`` defines it in plain PyTorch, for ``parameters`` tensors, and returns a tensor, or
    a tuple of ``outputs`` tensors. ``supports(*args)`` is None where the kernels take the
    arguments, else the reason. ``autocast(dtype, *args)`` casts as ``torch.autocast`` does.
    ``residuals(*args)`` defines the ``kept`` tensors that kernels return behind the outputs, for
    the backward.
    """

    name: str
    module: str
    reference: Callable[..., Any]
    parameters: int
    outputs: int
    kernels: Mapping[str, Kernels]
    supports: Callable[..., str | None]
    gradient: Differentiation | None = None
    autocast: Callable[..., Sequence[Tensor]] | None = None
    residuals: Callable[..., tuple[Tensor, ...]] | None = None
    kept: int = 0

    @property
    def raw_forward(self) -> Any:
        """The raw operator of the forward."""
        return getattr(torch.ops.ejected_standalone, self.key).default

    @property
    def raw_backward(self) -> Any:
        """The raw operator of the backward."""
        return getattr(torch.ops.ejected_standalone, f"{self.key}_backward").default

    @property
    def key(self) -> str:
        """The name under which PyTorch knows the operator. It contains the module's, which keeps
        equal names of two packages apart."""
        return re.sub(r"\W", "_", f"{self.module}_{self.name}")

    def choose(self, implementation: str, args: Sequence[Tensor]) -> str:
        """Return the language of the kernels that compute a call, or ``"reference"``. Raises
        RuntimeError if kernels that the call names cannot compute it."""
        if implementation == "reference":
            return implementation
        devices = {arg.device.type for arg in args}
        reason = self.supports(*args)
        for name, kernels in self.kernels.items():
            if name == implementation and (reason or devices != {kernels.device}):
                why = reason or f"it runs on {kernels.device}"
                raise RuntimeError(f"{self.name}: '{name}' cannot run these inputs: {why}.")
            usable = implementation in ("auto", name) and not fallback.is_broken(self.name, name)
            if usable and reason is None and devices == {kernels.device}:
                return name
        return "reference"

    def for_users(self, returned: Any) -> Any:
        """Return what a forward ``returned``, without the tensors kept for the backward."""
        return _result(returned[: self.outputs]) if self.kept else returned


def public_function(op: Operator) -> Callable[..., Any]:
    """Return the function that users call, after registering the operator with PyTorch."""
    key = op.key
    _register(op, key)

    def public(*args: Any, implementation: str = "auto") -> Any:
        return _call(key, args, implementation)

    return public


# --- a call ---------------------------------------------------------------------------------------


def _call(key: str, args: tuple[Any, ...], implementation: str) -> Any:
    op = OPERATORS[key]
    name = op.name
    if len(args) != op.parameters or not all(isinstance(arg, Tensor) for arg in args):
        raise TypeError(f"{name} takes {op.parameters} tensors.")
    if implementation not in ("auto", "reference", *op.kernels):
        known = ", ".join(["auto", "reference", *op.kernels])
        raise ValueError(f"unknown implementation '{implementation}'; known: {known}.")
    device = args[0].device.type
    if op.autocast is not None and has_autocast(device):
        args = tuple(op.autocast(torch.get_autocast_dtype(device), *args))
    if op.gradient is not None and op.gradient.non_differentiable:
        places = op.gradient.non_differentiable
        args = tuple(arg.detach() if place in places else arg for place, arg in enumerate(args))
    needs_gradient = torch.is_grad_enabled() and any(arg.requires_grad for arg in args)
    if needs_gradient and op.gradient is not None:
        for place, advice in op.gradient.frozen.items():
            if args[place].requires_grad:
                raise RuntimeError(f"{name}: argument {place + 1} has no gradient; {advice}.")
    # Forward-mode differentiation takes the reference, which has every derivative.
    has_tangent = not torch.compiler.is_compiling() and any(
        forward_ad.unpack_dual(arg).tangent is not None for arg in args
    )
    if op.choose(implementation, args) == "reference" or has_tangent:
        return without_autocast(op.reference, args)
    if needs_gradient and op.gradient is None:
        raise RuntimeError(f"{name} was ejected without a backward; call it under torch.no_grad().")
    # A tensor of torch.func.vmap does not tell that it wraps one of torch.func.grad, so the
    # Function is applied wherever a gradient may be taken. Dynamo takes it for needed ones only.
    may_need = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if op.gradient is not None and (needs_gradient or may_need):
        return op.for_users(_Forward.apply(key, implementation, *args))
    return op.for_users(op.raw_forward(*args, implementation))


class _Forward(torch.autograd.Function):
    """The forward as a step that autograd records."""

    generate_vmap_rule = True

    @staticmethod
    def forward(key: str, implementation: str, *args: Tensor) -> Any:
        return OPERATORS[key].raw_forward(*args, implementation)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.key, ctx.implementation, *args = inputs
        op = OPERATORS[ctx.key]
        assert op.gradient is not None
        ctx.save_for_backward(*op.gradient.save(output, *args))
        if op.outputs + op.kept > 1:
            whole = (one for one in output[: op.outputs] if not one.is_floating_point())
            ctx.mark_non_differentiable(*whole, *output[op.outputs :])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        needs = tuple(ctx.needs_input_grad[2:])
        saved = ctx.saved_tensors
        upstream = upstream[: OPERATORS[ctx.key].outputs]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            found = _Backward.apply(ctx.key, ctx.implementation, needs, *upstream, *saved)
        else:
            op = OPERATORS[ctx.key]
            found = op.raw_backward(list(needs), *upstream, *saved, ctx.implementation)
        grads = (found,) if isinstance(found, Tensor) else found
        kept = (grad if need else None for grad, need in zip(grads, needs, strict=True))
        return (None, None, *kept)


class _Backward(torch.autograd.Function):
    """The backward as a differentiable step: its own derivative is that of the formulas."""

    generate_vmap_rule = True

    @staticmethod
    def forward(key: str, implementation: str, needs: tuple[bool, ...], *values: Tensor) -> Any:
        return OPERATORS[key].raw_backward(list(needs), *values, implementation)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.key, _, ctx.needs, *values = inputs
        ctx.save_for_backward(*values)

    @staticmethod
    def backward(ctx: Any, *grad_grads: Tensor) -> Any:
        op, values = OPERATORS[ctx.key], list(ctx.saved_tensors)
        assert op.gradient is not None
        formulas = op.gradient.formulas
        places = [place for place, value in enumerate(values) if value.is_floating_point()]

        def formula(*tensors: Tensor) -> tuple[Tensor, ...]:
            filled = list(values)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            grads = formulas(ctx.needs, *_upstream_and_saved(op, filled))
            return tuple(grad for grad in grads if grad is not None)

        pullback = torch.func.vjp(formula, *(values[place] for place in places))[1]
        wanted = tuple(grad for grad, need in zip(grad_grads, ctx.needs, strict=True) if need)
        result: list[Tensor | None] = [None] * (3 + len(values))
        for place, grad in zip(places, pullback(wanted), strict=True):
            result[3 + place] = grad
        return tuple(result)


def _upstream_and_saved(op: Operator, values: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the upstream gradient, or the tuple of those of several outputs, then what was
    saved."""
    upstream = values[0] if op.outputs == 1 else tuple(values[: op.outputs])
    return (upstream, *values[op.outputs :])


# --- the raw operators ----------------------------------------------------------------------------


def _register(op: Operator, key: str) -> None:
    """Define the raw operators of ``op``; those of an earlier import of its module are dropped."""
    _libraries.pop(key, None)
    library = _libraries[key] = torch.library.Library(_NAMESPACE, "FRAGMENT")
    OPERATORS[key] = op
    given = ", ".join(f"Tensor argument_{place}" for place in range(op.parameters))
    _define(
        library,
        f"{key}({given}, str implementation) -> {_tensors(op.outputs + op.kept)}",
        functools.partial(_forward, op),
        functools.partial(_fake_forward, op),
    )
    if op.gradient is not None:
        given = ", ".join(f"Tensor value_{at}" for at in range(op.outputs + op.gradient.saved))
        result = _tensors(op.parameters)
        _define(
            library,
            f"{key}_backward(bool[] needs, {given}, str implementation) -> {result}",
            functools.partial(_backward, op),
            functools.partial(_fake_backward, op),
        )


def _define(
    library: torch.library.Library,
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    name = schema.partition("(")[0]
    library.define(schema)
    for key in ("CPU", "CUDA"):
        library.impl(name, compute, key)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=library)


def _tensors(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _result(tensors: Sequence[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _by_reference(op: Operator, args: Sequence[Tensor]) -> Any:
    """Return what the reference computes, and what kernels keep for the backward, as tensors that
    share no memory with the arguments."""
    returned = tensors_in((without_autocast(op.reference, args),))
    if op.residuals is not None:
        returned += without_autocast(op.residuals, args)
    return _result(unshared(returned, args))


def _forward(op: Operator, *args: Any) -> Any:
    *tensors, implementation = args
    name = op.choose(implementation, tensors)
    if name != "reference":
        try:
            return op.kernels[name].forward(*tensors)
        except BuildError as error:
            fallback.note_failed_build(op.name, name, error)
    return _by_reference(op, tensors)


def _fake_forward(op: Operator, *args: Any) -> Any:
    return _by_reference(op, args[:-1])


def _backward(op: Operator, needs: Sequence[bool], *args: Any) -> Any:
    *values, implementation = args
    assert op.gradient is not None
    arguments = (tuple(needs), *_upstream_and_saved(op, values))
    for name, kernels in op.kernels.items():
        wanted = implementation in ("auto", name) and not fallback.is_broken(op.name, name)
        if wanted and kernels.backward and kernels.device == values[0].device.type:
            try:
                return _filled(kernels.backward(*arguments), values[0])
            except BuildError as error:
                fallback.note_failed_build(op.name, name, error)
    grads = without_autocast(op.gradient.formulas, arguments)
    return _filled(unshared(grads, values), values[0])


def _fake_backward(op: Operator, needs: Sequence[bool], *args: Any) -> Any:
    assert op.gradient is not None
    values = args[:-1]
    return _filled(op.gradient.fake(tuple(needs), *_upstream_and_saved(op, values)), values[0])


def _filled(grads: Sequence[Tensor | None], like: Tensor) -> Any:
    """Return one tensor for each gradient, an empty one for None, as the schema needs it."""
    return _result([like.new_empty(0) if grad is None else grad for grad in grads])

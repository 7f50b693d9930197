"""From a FusedOp to something PyTorch can call: raw operators, autograd, choice of implementation.

For an operator ``ns::name`` two raw operators are registered, ``ns::name`` and
``ns::name_backward``, each with a fake implementation and a vmap rule. The public function asks the
launcher for a held launch plan first (a whole 4 x 4 call is 1.7 us of host time on a CPU with one,
4.8 us on an H200); the launcher also knows the calls that are the reference's (add, 4 x 4: 0.9 us
over torch.add). Where a gradient is needed, a plan's output gets a node of ``autograd_node``
(add_mul_activation, 4 x 4, forward and backward on a CPU: 30 us against 44 by the Function). Past
that it calls the raw operator where no gradient is needed, else an ``autograd.Function`` over the
raw ones: ``torch.library.register_autograd`` would add 4.5 us to every call, and
``torch.func.grad`` refuses operators made with it (torch 2.11 and 2.13).

Floats: an opaque operator with a float argument recompiles once per value. Inside ``torch.compile``
the public function therefore turns floats into 0-d tensors on the inputs' device and calls the
overload ``.scalar_tensor``, whose kernels read the value through a pointer.

Sequences of tensors: autograd sees tensors only where they are arguments themselves, so the
``autograd.Function`` takes them laid out flat, with the length of every sequence beside them.
"""

from __future__ import annotations

import inspect
import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fuselab.errors import (
    ArgumentError,
    ArgumentTypeError,
    BuildError,
    ContractError,
    DeviceError,
    DifferentiationError,
    LayoutError,
    NumberRangeError,
    OperandError,
    OverlapError,
    UnknownNameError,
    UnsupportedError,
)
from fuselab.op import FusedOp, tensors_in
from fuselab.runtime import (
    autograd_node,
    cpu_choice,
    fallback,
    launcher,
    process_choice,
    rehearsal,
)

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

# What a value of a parameter may be, and how an error says it.
_VALUE_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
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
    _types, _words = _VALUE_TYPES[_annotation]
    _VALUE_TYPES[_annotation | None] = (*_types, type(None)), f"{_words} or None"

_registered: dict[str, _Registration] = {}
_libraries: dict[str, torch.library.Library] = {}


def registered() -> dict[str, FusedOp]:
    """Every operator registered in this process, by full name."""
    return {name: registration.op for name, registration in _registered.items()}


def operator(op: FusedOp) -> Callable[..., Tensor]:
    """Register ``op`` and return its public function.

    The function takes the reference's parameters and ``implementation="auto"`` (keyword only):
    ``"auto"``, ``"reference"`` or a key of ``op.implementations``. Registering the same operator
    again returns the same function; another operator of the same name and signature replaces the
    first one, and of another signature is refused.

    Raises:
        ContractError: the declaration cannot be registered; names what to change.
    """
    known = _registered.get(op.name)
    if known is None:
        known = _registered[op.name] = _Registration(op)
        # As namedtuple does: pickle finds a function by the module that binds it to its name.
        known.public.__module__ = sys._getframe(1).f_globals.get("__name__", __name__)
    elif known.op is not op:
        known.replace(op)
    return known.public


def choose(op: FusedOp, args: Sequence[Any]) -> str:
    """What ``implementation="auto"`` takes for these arguments: a key, or ``"reference"``."""
    return _choose(op, args, _device_of(op, args))


def _choose(op: FusedOp, args: Sequence[Any], device: torch.device) -> str:
    try:
        return _first_that_can(op, args, device)
    except Exception as error:
        raise _of_arguments(op, args, error) from None


def _of_arguments(op: FusedOp, args: Sequence[Any], error: Exception) -> Exception:
    """What to raise where a choice tripped over arguments that have not been validated yet (2 us
    less for those that are right): what is wrong with them, else ``error`` itself."""
    try:
        op.validate(*args)
    except Exception as refusal:
        return refusal
    return error


def _first_that_can(op: FusedOp, args: Sequence[Any], device: torch.device) -> str:
    for name in _order(op, args, device):
        if name == "reference":
            return name
        implementation = op.implementations[name]
        if (
            implementation.device == device.type
            and not fallback.is_broken(op.name, name)
            and implementation.supports(*args) is None
        ):
            return name
    return "reference"


def _order(op: FusedOp, args: Sequence[Any], device: torch.device) -> Sequence[str]:
    """Return the implementations that ``auto`` asks for these arguments, the first one first."""
    named = process_choice.named(op)
    if named is not None and not cpu_choice.is_forced():
        return (named,) if named in op.implementations else ()
    if device.type == "cpu":
        return cpu_choice.order(op, args)
    return op.prefer(*args) if op.prefer is not None else tuple(op.implementations)


def why_not(op: FusedOp, implementation: str, args: Sequence[Any]) -> str | None:
    """None when ``implementation`` can run ``args``, else the reason in a few words."""
    if implementation == "reference":
        return None
    device = _device_of(op, args)
    declared = op.implementations[implementation]
    if declared.device != device.type:
        return f"it runs on {declared.device}, the inputs are on {device.type}"
    try:
        return declared.supports(*args)
    except Exception as error:
        raise _of_arguments(op, args, error) from None


def _device_of(op: FusedOp, args: Sequence[Any]) -> torch.device:
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


def _schema_type(op_name: str, parameter: inspect.Parameter) -> str:
    try:
        return _SCHEMA_TYPES[parameter.annotation]
    except (KeyError, TypeError):
        raise ContractError(
            f"{op_name}: parameter '{parameter.name}' is annotated {parameter.annotation!r}; use "
            "Tensor, Tensor | None, Sequence[Tensor], float, int, int | None, bool, str, "
            "str | None, torch.dtype, torch.dtype | None, Sequence[int] or Sequence[bool]."
        ) from None


def _is_scalar_tensor(schema_type: str) -> bool:
    return schema_type == "float"


class _Raw:
    """One raw operator with its two overloads (floats as floats, floats as 0-d tensors).

    It returns ``result``, and writes over the parameters in ``mutates``.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, str]],
        result: str,
        kernel: Callable[..., Any],
        fake: Callable[..., Any],
        differentiate: Callable[..., Any] | None = None,
        mutates: Sequence[str] = (),
    ) -> None:
        namespace, short = name.split("::")
        library = _libraries.get(namespace)
        if library is None:
            library = _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        aliases = {mutated: f"Tensor(a{place}!)" for place, mutated in enumerate(mutates)}
        has_float = any(_is_scalar_tensor(kind) for _, kind in parameters)
        self.overloads: list[Any] = []
        for suffix in ("", ".scalar_tensor") if has_float else ("",):
            kinds = (
                "Tensor" if suffix and _is_scalar_tensor(kind) else kind for _, kind in parameters
            )
            listed = ", ".join(
                f"{kind.replace('Tensor', aliases.get(parameter, 'Tensor'))} {parameter}"
                for (parameter, _), kind in zip(parameters, kinds, strict=True)
            )
            library.define(f"{short}{suffix}({listed}, str implementation) -> {result}")
            packet = getattr(getattr(torch.ops, namespace), short)
            overload = getattr(packet, suffix[1:] or "default")
            for key in ("CPU", "CUDA"):
                library.impl(f"{short}{suffix}", kernel, key)
            library.impl(
                f"{short}{suffix}",
                _autograd_kernel(overload, parameters, differentiate),
                "Autograd",
            )
            if mutates:
                places = [place for place, (known, _) in enumerate(parameters) if known in mutates]
                bumping = _version_kernel(overload, places)
                library.impl(f"{short}{suffix}", bumping, "ADInplaceOrView")
            torch.library.register_fake(f"{name}{suffix}", fake, lib=library)
            rule = _refuse_vmap(short) if mutates else _loop_over_batch(overload)
            torch.library.register_vmap(f"{name}{suffix}", rule, lib=library)
            if result == "Tensor[]":
                library.impl(f"{short}{suffix}", _refuse_batched_gradients(short), "Batched")
            self.overloads.append(overload)

    def __call__(self, scalar_tensors: bool, *args: Any) -> Any:
        return self.overloads[1 if scalar_tensors else 0](*args)


def _autograd_kernel(
    overload: Any,
    parameters: Sequence[tuple[str, str]],
    differentiate: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """The Autograd kernel of a raw operator: passes on where nothing is differentiated.

    An exported program calls raw operators with parameters that want gradients: there
    ``differentiate`` takes over. A gradient that nothing defines is refused, never dropped.
    """
    tensors = tuple(kind in ("Tensor", "Tensor?", "Tensor[]") for _, kind in parameters)

    def kernel(*args: Any) -> Any:
        grad_enabled = torch.is_grad_enabled()
        wanted = False
        for place, given in enumerate(args):
            for value in tensors_in((given,)):
                needs_grad = grad_enabled and value.requires_grad
                wanted |= needs_grad
                if forward_ad.unpack_dual(value).tangent is not None or (
                    needs_grad and (differentiate is None or not tensors[place])
                ):
                    raise DifferentiationError(
                        f"the raw operator {overload} carries no gradient of "
                        f"'{parameters[place][0]}'; call the public function, detach the tensor, "
                        "or use torch.no_grad()."
                    )
        if wanted and differentiate is not None:
            return differentiate(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    return kernel


def _version_kernel(overload: Any, mutated: Sequence[int]) -> Callable[..., Any]:
    """The ADInplaceOrView kernel of an operator that writes over arguments: autograd then sees that
    a tensor it saved has changed."""

    def kernel(*args: Any) -> Any:
        _bump_versions(tensors_in(args[place] for place in mutated))
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload(*args)

    return kernel


def _bump_versions(tensors: Sequence[Tensor]) -> None:
    torch.autograd.graph.increment_version(
        [tensor for tensor in tensors if not tensor.is_inference()]
    )


def _refuse_vmap(short: str) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        raise UnsupportedError(
            f"{short}: it writes over its arguments, which torch.func.vmap cannot follow; use the "
            "operator that returns a new tensor."
        )

    return rule


def _refuse_batched_gradients(short: str) -> Callable[..., Any]:
    """PyTorch loops over what is_grads_batched=True gives, but for operators that return lists."""

    def kernel(*args: Any) -> Any:
        raise UnsupportedError(
            f"{short}: torch.autograd.grad(..., is_grads_batched=True) cannot follow the gradients "
            "of a list of tensors; use torch.func.vmap over torch.func.vjp, or one call per "
            "upstream gradient."
        )

    return kernel


def _select(value: Any, dim: Any, index: int) -> Any:
    """One sample of a value with its vmap dimension, or of each tensor of a sequence."""
    if isinstance(dim, (list, tuple)):
        return [_select(item, of_item, index) for item, of_item in zip(value, dim, strict=True)]
    return value.select(dim, index) if isinstance(dim, int) else value


def _one_of_zeros(value: Any, dim: Any) -> Any:
    """``value`` with one sample of zeros in place of none."""
    if isinstance(dim, (list, tuple)):
        return [_one_of_zeros(item, of_item) for item, of_item in zip(value, dim, strict=True)]
    if not isinstance(dim, int):
        return value
    return value.new_zeros((*value.shape[:dim], 1, *value.shape[dim + 1 :]))


def _loop_over_batch(overload: Any) -> Callable[..., Any]:
    """A vmap rule for any raw operator: one call per sample, results stacked.

    Right for every operator because it assumes nothing; an operator with leading batch dimensions
    is faster called with them than under vmap.
    """

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        if info.batch_size == 0:  # one sample of zeros says what shape each would have
            args = tuple(map(_one_of_zeros, args, in_dims))
        samples = [
            overload(
                *(_select(value, dim, index) for value, dim in zip(args, in_dims, strict=True))
            )
            for index in range(max(info.batch_size, 1))
        ]
        if isinstance(samples[0], (list, tuple)):
            kind = type(samples[0])
            stacked = kind(
                torch.stack(column)[: info.batch_size] for column in zip(*samples, strict=True)
            )
            return stacked, kind([0] * len(stacked))
        return torch.stack(samples)[: info.batch_size], 0

    return rule


class _Registration:
    """Everything that exists once per operator name: raw operators, autograd, public function."""

    def __init__(self, op: FusedOp) -> None:
        self.op = op
        self.schema = self._schema(op)
        forward_parameters, backward_parameters = self.schema
        self.forward_id = launcher.register(op.name)
        self.tensor_positions = tuple(
            index
            for index, name in enumerate(op.signature.parameters)
            if name in op.tensor_parameters
        )
        self.is_tensor = tuple(name in op.tensor_parameters for name in op.signature.parameters)
        self.is_sequence = tuple(kind == "Tensor[]" for _, kind in forward_parameters)
        self.sequence_positions = tuple(
            index for index, (_, kind) in enumerate(forward_parameters) if kind == "Tensor[]"
        )
        self.saved_sequences = tuple(
            index for index, (_, kind) in enumerate(backward_parameters[2:]) if kind == "Tensor[]"
        )
        self.float_positions = tuple(
            index
            for index, name in enumerate(op.signature.parameters)
            if name in op.float_parameters
        )
        self.accepted = tuple(
            (name, *_VALUE_TYPES[parameter.annotation])
            for name, parameter in op.signature.parameters.items()
        )
        self.raw_forward = _Raw(
            op.name,
            forward_parameters,
            "()" if op.mutates else "Tensor",
            self._forward,
            self._fake_forward,
            None if op.gradient is None else self.differentiable,
            op.mutates,
        )
        if backward_parameters:
            self.backward_id = launcher.register(f"{op.name}_backward")
            self.raw_backward = _Raw(
                f"{op.name}_backward",
                backward_parameters,
                "Tensor[]"
                if self.sequence_positions
                else "Tensor"
                if len(self.tensor_positions) == 1
                else f"({', '.join(['Tensor'] * len(self.tensor_positions))})",
                self._backward,
                self._fake_backward,
            )
            self.function: Any = _autograd_function(self)
            # Past Function.apply, which asks for forward's signature in every call (13 us of host
            # time on a CPU of 2.6 GHz); torch.compile and torch.func need that one.
            plain: Any = super(torch.autograd.Function, self.function)
            self.apply_plainly = plain.apply
            self.rules: dict[str, tuple[Any, ...]] = {}  # of autograd_node, by implementation
        self.public = _public_function(self)

    @staticmethod
    def _schema(op: FusedOp) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        forward = [
            (name, _schema_type(op.name, parameter))
            for name, parameter in op.signature.parameters.items()
        ]
        if not op.tensor_parameters:
            raise ContractError(f"{op.name}: the reference has no parameter annotated Tensor.")
        if op.gradient is None:
            return forward, []
        signature = inspect.signature(op.gradient.reference, eval_str=True)
        backward = [
            (name, _schema_type(f"{op.name} (gradient.reference)", parameter))
            for name, parameter in signature.parameters.items()
        ]
        if [kind for _, kind in backward[:2]] != ["bool[]", "Tensor"]:
            raise ContractError(
                f"{op.name}: gradient.reference must begin with (needs: Sequence[bool], "
                "grad_output: Tensor, ...)."
            )
        return forward, backward

    def differentiable(self, *args: Any) -> Tensor:
        """The operator as a step that autograd knows; ``args`` end with the implementation."""
        *values, implementation = args
        self.refuse_frozen(values)
        # From bools: ints that an object holds are dynamic to Dynamo, and equal to no constant.
        sequences = [place for place, is_sequence in enumerate(self.is_sequence) if is_sequence]
        flat, lengths = _flat(values, sequences)
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return self.function.apply(*flat, lengths, implementation)
        return self.apply_plainly(*flat, lengths, implementation)

    def from_plan(self, args: tuple[Any, ...], implementation: str) -> Tensor | None:
        """The operator as a step that autograd knows, from a plan; None where there is none, or
        where no call of the kind has needed a gradient yet."""
        if not torch.is_grad_enabled() or any(
            isinstance(args[place], Tensor) for place in self.float_positions
        ):
            return None  # a float given as a tensor may need a gradient, which is refused
        # The node sees tensors only where they are values themselves.
        sequences = self.sequence_positions or self.saved_sequences
        attach = None if sequences else autograd_node.attach()
        if attach is None:
            is_planned = launcher.planned(self.forward_id, implementation, args)
            return self.differentiable(*args, implementation) if is_planned else None
        output = launcher.lookup(self.forward_id, implementation, args, True, True)
        if output is None:
            return None
        self.refuse_frozen(args)
        torch._C._set_grad_enabled(False)  # as a Function has it; torch.no_grad() takes 1 us
        try:
            saved = self.op.gradient.save(output, *args)  # type: ignore[union-attr]
        finally:
            torch._C._set_grad_enabled(True)
        rule = self.rules.get(implementation)
        if rule is None:
            name = self.function.__name__
            step = (launcher.lookup, self.backward_id, implementation, self.function.past_plan)
            rule = self.rules[implementation] = (name, *step)
        return attach(output, [args[place] for place in self.tensor_positions], saved, rule)

    def refuse_frozen(self, values: Sequence[Any]) -> None:
        """Raise DifferentiationError where the gradient of a frozen argument is asked for."""
        frozen = self.op.gradient.frozen if self.op.gradient is not None else {}
        for name in frozen:
            value = values[list(self.op.signature.parameters).index(name)]
            if any(tensor.requires_grad for tensor in tensors_in((value,))):
                raise DifferentiationError(
                    f"{self.op.short_name}: '{name}' has no gradient; {frozen[name]}."
                )

    def replace(self, op: FusedOp) -> None:
        """Take ``op`` in place of the operator registered under the same name."""
        if self._schema(op) != self.schema:
            raise ContractError(
                f"{op.name} is registered with another signature in this process; choose another "
                "name, or start a new process."
            )
        self.op = op
        launcher.forget(self.forward_id)
        if op.gradient is not None:
            launcher.forget(self.backward_id)

    # The forward, from the raw operator's kernel down.

    def _forward(self, *args: Any) -> Tensor | None:
        *arguments, name = args
        arguments = _with_tuples(arguments, self.sequence_positions)
        op = self.op
        if op.mutates:
            self._write_over(arguments, name)
            return None
        held = launcher.lookup(self.forward_id, name, tuple(arguments), False)
        if held is not None:
            return held
        # Choosing and validating are recorded too: where they look at a float, so does the plan.
        with launcher.recording(self.forward_id, name, tuple(arguments)) as recording:
            chosen = self._resolve(name, recording.args)
            op.validate(*recording.args)
            if chosen != "reference":
                try:
                    with rehearsal.Forward(op, chosen, arguments):
                        output = op.implementations[chosen].forward(*recording.args)
                    recording.finish(output)
                    return output
                except BuildError as error:
                    fallback.note_failed_build(op.name, chosen, error)
        return _not_aliased(_without_autocast(op.reference, arguments), arguments)

    def _write_over(self, arguments: list[Any], name: str) -> None:
        op = self.op
        refuse_overlap(op, arguments)
        if launcher.lookup(self.forward_id, name, tuple(arguments), False) is not None:
            return
        # A choice on a CPU looks at no values, so it need not be recorded, and the reference, which
        # has no plan, is not watched: that takes 100 us.
        on_cpu = tensors_in(arguments)[0].is_cpu
        chosen = self._resolve(name, arguments) if on_cpu or name == "reference" else None
        if chosen == "reference":
            op.validate(*arguments)
        else:
            with launcher.recording(self.forward_id, name, tuple(arguments)) as recording:
                chosen = chosen or self._resolve(name, recording.args)
                op.validate(*recording.args)
                if chosen != "reference":
                    try:
                        with rehearsal.Forward(op, chosen, arguments):
                            op.implementations[chosen].forward(*recording.args)
                        recording.finish(())
                        return
                    except BuildError as error:
                        fallback.note_failed_build(op.name, chosen, error)
        values = _without_autocast(op.reference, arguments)
        for tensor, value in zip(op.mutated(arguments), tensors_in((values,)), strict=True):
            tensor.copy_(value)

    def _resolve(self, name: str, arguments: Sequence[Any]) -> str:
        op = self.op
        if name == "auto":
            return choose(op, arguments)
        reason = why_not(op, name, arguments)
        if reason is not None:
            op.validate(*arguments)  # what is wrong goes before what one kernel cannot do
            raise UnsupportedError(
                f"{op.short_name}: implementation '{name}' cannot run these inputs: {reason}; "
                "use implementation='auto'."
            )
        if fallback.is_broken(op.name, name):
            return "reference"
        return name

    def _fake_forward(self, *args: Any) -> Tensor | None:
        *arguments, _ = args
        arguments = _with_tuples(arguments, self.sequence_positions)
        self.op.validate(*arguments)
        if self.op.mutates:
            return None
        if self.op.fake is not None:
            return self.op.fake(*arguments)
        return _not_aliased(self.op.reference(*arguments), arguments)

    # The backward likewise; gradients that are not needed leave the raw operator as empty tensors.

    def _backward(self, *args: Any) -> Any:
        needs, grad_output, *saved_and_name = args
        *saved, name = saved_and_name
        arguments = (tuple(needs), grad_output, *_with_tuples(saved, self.saved_sequences))
        grads = launcher.lookup(self.backward_id, name, arguments, False)
        if grads is None:
            grads = self._run_backward(name, arguments)
        return self._filled(grads, grad_output)

    def _filled(self, grads: Sequence[Tensor | None], like: Tensor) -> Any:
        """One tensor per gradient, an empty one for None, as the raw operator's schema wants it."""
        filled = [like.new_empty(0) if grad is None else grad for grad in grads]
        if self.sequence_positions:
            return filled
        return filled[0] if len(filled) == 1 else tuple(filled)

    def _run_backward(self, name: str, arguments: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        op = self.op
        assert op.gradient is not None
        for candidate in self._with_backward(name, arguments):
            implementation = op.implementations[candidate]
            assert implementation.backward is not None
            if (
                fallback.is_broken(op.name, candidate)
                or implementation.supports_backward(*arguments) is not None
            ):
                continue
            try:
                with (
                    launcher.recording(self.backward_id, name, arguments) as recording,
                    rehearsal.Backward(op, candidate, arguments),
                ):
                    grads = implementation.backward(*recording.args)
                    recording.finish(grads)
                return grads
            except BuildError as error:
                fallback.note_failed_build(op.name, candidate, error)
        return _unshared(_without_autocast(op.gradient.reference, arguments), arguments)

    def _with_backward(self, name: str, arguments: tuple[Any, ...]) -> list[str]:
        """The implementations to ask for a backward, in order; none where it is the reference's."""
        op, device = self.op, arguments[1].device.type
        assert op.gradient is not None
        if name == "auto" and not cpu_choice.is_forced():
            name = process_choice.named(op) or name
        # Without the forward's, where another operator has taken the name since, the reference's.
        names = [known for known in op.implementations if name in ("auto", known)]
        if name == "auto" and op.gradient.prefer is not None:
            names = list(op.gradient.prefer(*arguments))
        if "reference" in names:
            names = names[: names.index("reference")]
        known = ((candidate, op.implementations[candidate]) for candidate in names)
        return [name for name, one in known if one.backward is not None and one.device == device]

    def gradient_by_reference(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """The gradients by the contract's formula where no implementation is to be asked, else
        None. They may be views of the upstream gradient, which autograd allows (a sum's are that
        gradient: copied, a backward of 262144 x 1024 took twice as long on an H200)."""
        needs, *rest = arguments
        with launcher.Choice() as choice:
            if any(self.changed(needs, rest)) and self._with_backward(name, arguments):
                return None
        reference = self.op.gradient.reference  # type: ignore[union-attr]
        if choice.is_final:
            launcher.keep_reference(self.backward_id, name, arguments, reference)
        return _without_autocast(reference, arguments)

    def changed(self, needs: Sequence[bool], arguments: Sequence[Any]) -> tuple[bool, ...]:
        """``needs`` without the gradients that are the upstream one itself."""
        unchanged = self.op.gradient.unchanged  # type: ignore[union-attr]
        if unchanged is None:
            return tuple(needs)
        pairs = zip(needs, unchanged(*arguments), strict=True)
        return tuple(need and not is_unchanged for need, is_unchanged in pairs)

    def _fake_backward(self, *args: Any) -> Any:
        needs, grad_output, *saved_and_name = args
        saved = _with_tuples(saved_and_name[:-1], self.saved_sequences)
        gradient = self.op.gradient
        assert gradient is not None
        grads = (gradient.fake or gradient.reference)(needs, grad_output, *saved)
        return self._filled(_unshared(grads, (grad_output, *saved)), grad_output)


def _with_tuples(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """``values`` with tuples at ``places``, where the dispatcher hands over lists."""
    return [tuple(value) if place in places else value for place, value in enumerate(values)]


def _flat(
    values: Sequence[Any], places: Sequence[int]
) -> tuple[list[Any], tuple[int | None, ...] | None]:
    """``values`` with the sequences at ``places`` laid out flat, and how long each was (None for
    what is no sequence; None for all where there is none)."""
    if not places:
        return list(values), None
    lengths = tuple(len(value) if place in places else None for place, value in enumerate(values))
    flat: list[Any] = []
    for value, length in zip(values, lengths, strict=True):
        flat.extend((value,) if length is None else value)
    return flat, lengths


def _nested(flat: Sequence[Any], lengths: tuple[int | None, ...] | None) -> list[Any]:
    """What ``_flat`` laid out."""
    if lengths is None:
        return list(flat)
    values: list[Any] = []
    begin = 0
    for length in lengths:
        if length is None:
            values.append(flat[begin])
            begin += 1
        else:
            values.append(tuple(flat[begin : begin + length]))
            begin += length
    return values


def _flat_places(registration: _Registration, lengths: tuple[int | None, ...] | None) -> list[int]:
    """Where the tensors of the tensor parameters lie once laid out flat."""
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


def refuse_overlap(op: FusedOp, args: Sequence[Any]) -> None:
    """Raise where an argument to be written over shares memory with itself or another tensor.

    Two tensors are taken to overlap where the ranges of their addresses do.

    Raises:
        ArgumentError: names the operator and says what to do.
    """
    mutated = op.mutated(args)
    for tensor in mutated:
        if not tensor.is_contiguous() and any(
            stride == 0 and size > 1
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise OverlapError(
                f"{op.short_name}: it cannot write over a tensor whose elements share memory "
                f"(shape {tuple(tensor.shape)}, strides {tensor.stride()}); clone it first."
            )
    written = set(map(id, mutated))
    ranges = [
        (tensor.data_ptr(), id(tensor) in written, _span(tensor))
        for tensor in tensors_in(args)
        if tensor.numel()
    ]
    ranges.sort()
    end, end_written = 0, 0  # of all ranges so far, and of those that are written
    for begin, is_written, span in ranges:
        if begin < (end if is_written else end_written):
            raise OverlapError(
                f"{op.short_name}: it cannot write over memory that another of its arguments "
                "lies in; clone one of them first."
            )
        end = max(end, begin + span)
        if is_written:
            end_written = max(end_written, begin + span)


def _lies_in_memory(tensor: Tensor) -> bool:
    """Whether address and strides say which bytes a tensor has: not of sparse, nested, meta or
    fake ones, for which no plan is held."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested)
    )


def _span(tensor: Tensor) -> int:
    """Bytes from the first to the last element."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _not_aliased(output: Tensor, arguments: Sequence[Any]) -> Tensor:
    """``output``, copied where it is a view of an argument: raw operators return fresh tensors."""
    for value in arguments:
        if isinstance(value, Tensor) and (
            output is value or (output._is_view() and output._base is value)
        ):
            return output.clone()
    return output


def _unshared(
    grads: Sequence[Tensor | None], arguments: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """``grads``, copied where one lies in the memory of an argument or of another gradient."""
    taken = {tensor.untyped_storage()._cdata for tensor in tensors_in(arguments)}
    fresh: list[Tensor | None] = []
    for grad in grads:
        if grad is not None and grad.untyped_storage()._cdata in taken:
            grad = grad.clone()
        if grad is not None:
            taken.add(grad.untyped_storage()._cdata)
        fresh.append(grad)
    return tuple(fresh)


def _has_autocast(device: str) -> bool:
    """Whether autocast is on for this type of device; meta has none, and asking raises."""
    return device != "meta" and torch.is_autocast_enabled(device)


def _without_autocast(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    device = tensors_in(arguments)[0].device.type
    if _has_autocast(device):
        with torch.autocast(device, enabled=False):
            return function(*arguments)
    return function(*arguments)


def _autograd_function(registration: _Registration) -> type[torch.autograd.Function]:
    """The autograd.Function of an operator: raw forward, raw backward, and a second derivative.

    Its methods close over the operator's name and look the rest up in ``_registered``: Dynamo can
    trace a global dictionary, but no closure over an object of ours.
    """
    op_name = registration.op.name

    def raw_backward(
        name: str, needs: Sequence[bool], grad: Tensor, saved: Sequence[Any], fresh: bool = False
    ) -> Any:
        """The gradients, ``fresh`` if none may be a view of the upstream one."""
        registration = _registered[op_name]
        if not torch.compiler.is_compiling():
            arguments = (tuple(needs), grad, *saved)
            held = launcher.lookup(registration.backward_id, name, arguments, True, fresh)
            if held is None and not fresh:
                held = registration.gradient_by_reference(name, arguments)
            if held is not None:
                return held
        asked = tuple(needs) if fresh else registration.changed(needs, (grad, *saved))
        if asked != tuple(needs):
            grads = raw_backward(name, asked, grad, saved) if any(asked) else (None,) * len(asked)
            return tuple(
                grad if need and not ask else found
                for need, ask, found in zip(needs, asked, grads, strict=True)
            )
        scalar_tensors = _has_scalar_tensor(registration.schema[1][2:], saved)
        grads = registration.raw_backward(scalar_tensors, list(needs), grad, *saved, name)
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
            grad: Tensor,
            *saved: Any,
        ) -> Any:
            grads = raw_backward(name, needs, grad, _nested(saved, lengths), fresh=True)
            return tuple(grad.new_empty(0) if value is None else value for value in grads)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            _, ctx.needs, ctx.lengths, *values = inputs
            _save(ctx, values)

        @staticmethod
        def backward(ctx: Any, *grad_grads: Tensor) -> Any:
            values = _saved(ctx)
            gradient = _registered[op_name].op.gradient
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
                grad, *saved = filled
                grads = gradient.reference(ctx.needs, grad, *_nested(saved, ctx.lengths))
                return tuple(grad for grad in grads if grad is not None)

            pullback = torch.func.vjp(formula, *(values[place] for place in places))[1]
            wanted = tuple(grad for grad, need in zip(grad_grads, ctx.needs, strict=True) if need)
            result: list[Tensor | None] = [None] * (3 + len(values))
            for place, grad in zip(places, pullback(wanted), strict=True):
                result[3 + place] = grad
            return tuple(result)

    class Forward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Tensor:
            *flat, lengths, name = args
            arguments = _nested(flat, lengths)
            registration = _registered[op_name]
            scalar_tensors = _has_scalar_tensor(registration.schema[0], arguments)
            if torch.compiler.is_compiling():
                return registration.raw_forward(scalar_tensors, *arguments, name)
            # Detached: autograd gives this output its gradient.
            held = launcher.lookup(registration.forward_id, name, tuple(arguments), True, True)
            if held is not None:
                return held
            with rehearsal.expecting_backward():
                return registration.raw_forward(scalar_tensors, *arguments, name)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            *flat, ctx.lengths, ctx.implementation = inputs
            registration = _registered[op_name]
            gradient = registration.op.gradient
            assert gradient is not None
            saved = gradient.save(output, *_nested(flat, ctx.lengths))
            values, ctx.saved_lengths = _flat(saved, registration.saved_sequences)
            _save(ctx, values)

        @staticmethod
        def past_plan(name: str, arguments: tuple[Any, ...]) -> Any:
            """The gradients where the backward has no plan, or is itself differentiated."""
            needs, grad, *saved = arguments
            if torch.is_grad_enabled():
                return Backward.apply(name, needs, None, grad, *saved)
            return raw_backward(name, needs, grad, saved)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            saved = _saved(ctx)
            places = _flat_places(_registered[op_name], ctx.lengths)
            needs = tuple(ctx.needs_input_grad[place] for place in places)
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                grads = Backward.apply(ctx.implementation, needs, ctx.saved_lengths, grad, *saved)
            else:
                grads = raw_backward(
                    ctx.implementation, needs, grad, _nested(saved, ctx.saved_lengths)
                )
            result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
            for place, need, value in zip(places, needs, grads, strict=True):
                result[place] = value if need else None
            return tuple(result)

    Forward.__name__ = Forward.__qualname__ = f"{registration.op.short_name}_autograd"
    Backward.__name__ = Backward.__qualname__ = f"{registration.op.short_name}_backward_autograd"
    return Forward


class _Saved:
    """Stands, itself, for a tensor that lies in ``ctx.saved_tensors``."""


def _save(ctx: Any, values: Sequence[Any]) -> None:
    """Tensors through ``save_for_backward``, which sees in-place changes, the rest beside them."""
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


def _has_scalar_tensor(parameters: Sequence[tuple[str, str]], values: Sequence[Any]) -> bool:
    """Whether a value of a float parameter is a 0-d tensor, as it is inside torch.compile."""
    return any(
        _is_scalar_tensor(kind) and isinstance(value, Tensor)
        for (_, kind), value in zip(parameters, values, strict=False)
    )


def _public_function(registration: _Registration) -> Callable[..., Tensor]:
    names = tuple(registration.op.signature.parameters)
    defaults = {
        name: parameter.default
        for name, parameter in registration.op.signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    arity = len(names)
    short = registration.op.short_name
    forward_id = registration.forward_id

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
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

    def public(*args: Any, implementation: str = "auto", **kwargs: Any) -> Tensor:
        if kwargs or len(args) != arity:
            args = bind(args, kwargs)
        if not torch.compiler.is_compiling():
            held = launcher.lookup(forward_id, implementation, args)
            if held is not None:
                return held
        return _call(registration, args, implementation)

    def public_in_place(*args: Any, implementation: str = "auto", **kwargs: Any) -> Any:
        if kwargs or len(args) != arity:
            args = bind(args, kwargs)
        if not torch.compiler.is_compiling():
            # A plan's key has the strides, so there is none for a tensor that overlaps itself; but
            # of several tensors it does not know where they lie. Under torch.func and modes they
            # may have no address, and there is no plan.
            if several and not (
                torch._C._functorch.peek_interpreter_stack() or torch._C._len_torch_dispatch_stack()
            ):
                try:
                    refuse_overlap(registration.op, args)
                except (ArgumentError, RuntimeError):
                    if all(map(_lies_in_memory, tensors_in(args))):
                        raise
            if launcher.lookup(forward_id, implementation, args) is not None:
                _bump_versions(tensors_in([args[place] for place in written]))
                return args[first_written]
        _call(registration, args, implementation)
        return args[first_written]

    if registration.op.mutates:
        written = [names.index(name) for name in registration.op.mutates]
        first_written = written[0]
        several = len(registration.tensor_positions) > 1 or bool(registration.sequence_positions)
        public = public_in_place

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


def _call(registration: _Registration, args: tuple[Any, ...], implementation: str) -> Tensor:
    """The public function past a missed launch plan."""
    op = registration.op
    compiling = torch.compiler.is_compiling()
    if not compiling and op.gradient is not None:
        # lookup has found no plan. If there is one, a gradient is needed.
        output = registration.from_plan(args, implementation)
        if output is not None:
            return output
    if implementation not in ("auto", "reference", *op.implementations):
        raise UnknownNameError(
            "implementation", implementation, ["auto", "reference", *op.implementations]
        )
    if not compiling:
        check_types(op, args)
    device = _device_of(op, args)
    if op.autocast is not None and not op.mutates and _has_autocast(device.type):
        args = tuple(op.autocast(torch.get_autocast_dtype(device.type), *args))
    if not (compiling or op.mutates):
        with launcher.Choice() as choice:
            by_reference = (
                implementation == "reference"
                # Forward-mode differentiation goes through the reference: it has every derivative.
                or forward_ad._current_level >= 0
                or (implementation == "auto" and _choose(op, args, device) == "reference")
            )
            if by_reference and _has_autocast(device.type):
                op.validate(*args)  # 5 us less, and nothing is remembered
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
                launcher.keep_reference(registration.forward_id, implementation, args, op.reference)
            return _without_autocast(op.reference, args)
    if not compiling and device.type != "cpu":
        args = _with_host_floats(registration, args)
    # A float in a GPU's memory stays there: reading it would synchronise, and break a CUDA graph.
    # Dynamo in torch 2.11 cannot trace bool() of a tuple.
    scalar_tensors = len(registration.float_positions) > 0 and (
        compiling or (device.type != "cpu" and _has_scalar_tensor(registration.schema[0], args))
    )
    if scalar_tensors:
        args = _with_scalar_tensors(registration, args)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(args)):
        if op.gradient is None:
            other = f"; {op.short_name[:-1]} has one" if f"{op.name[:-1]}" in _registered else ""
            raise DifferentiationError(
                f"{op.short_name} defines no gradient{other}; detach its inputs or call it under "
                "torch.no_grad()."
            )
        if not compiling and choice.is_final:
            launcher.keep_differentiable(registration.forward_id, implementation, args)
        return registration.differentiable(*args, implementation)
    if not compiling and op.gradient is not None and torch._C._are_functorch_transforms_active():
        # A tensor of torch.func.vmap does not say that one of torch.func.grad lies within it, and
        # an autograd.Function cannot be applied any more where the batching rule finds out.
        return registration.differentiable(*args, implementation)
    return registration.raw_forward(scalar_tensors, *args, implementation)


def check_types(op: FusedOp, args: Sequence[Any]) -> None:
    """Raise for a value that is not of its parameter's type, 1 us; contracts may then rely on
    types. A float may be a 0-d tensor, but not one whose gradient would be dropped."""
    registration, short = _registered[op.name], op.short_name
    for value, (name, types, words) in zip(args, registration.accepted, strict=True):
        if not isinstance(value, types):
            raise ArgumentTypeError(
                f"{short}: '{name}' must be {words}, got {type(value).__name__}."
            )
    for place in registration.sequence_positions:
        wrong = next((item for item in args[place] if not isinstance(item, Tensor)), None)
        if wrong is not None:
            name, _, words = registration.accepted[place]
            raise ArgumentTypeError(
                f"{short}: '{name}' must be {words}, got a {type(wrong).__name__} in it."
            )
    if op.mutates and any(tensor.is_neg() for tensor in tensors_in(args)):
        raise ArgumentError(
            f"{short}: it writes over its arguments, and one of them is a lazy negation "
            "(torch.Tensor.is_neg); resolve_neg() gives an ordinary tensor."
        )
    for place in registration.float_positions:
        value, name = args[place], registration.accepted[place][0]
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise NumberRangeError(f"{short}: '{name}' must be a number that a float can hold.")
        if isinstance(value, Tensor):
            if value.is_complex():
                raise OperandError(f"{short}: '{name}' must be a real number, got {value.dtype}.")
            if value.dim() != 0:
                raise ArgumentTypeError(
                    f"{short}: '{name}' must be a number, got a Tensor of shape "
                    f"{tuple(value.shape)}."
                )
            if value.requires_grad and torch.is_grad_enabled():
                raise DifferentiationError(
                    f"{short}: '{name}' has no gradient; detach it, or spell the expression in "
                    "plain PyTorch."
                )


def _with_host_floats(registration: _Registration, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Floats that are tensors in the host's memory as numbers, as PyTorch takes them: their copy to
    a GPU would be refused while a CUDA graph is captured."""
    if torch._C._are_functorch_transforms_active():
        return args  # vmap has no single number
    read = list(args)
    for place in registration.float_positions:
        if type(args[place]) is Tensor and args[place].is_cpu:
            read[place] = args[place].item()
    return tuple(read)


def _with_scalar_tensors(registration: _Registration, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Floats as 0-d tensors on the inputs' device: Dynamo keeps a multiplication symbolic."""
    first = tensors_in(args)[0]
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    converted = list(args)
    for place in registration.float_positions:
        value = args[place]
        converted[place] = (
            value.to(first.device, dtype, non_blocking=first.is_cuda)
            if isinstance(value, Tensor)
            else torch.ones((), dtype=dtype, device=first.device) * value
        )
    return tuple(converted)

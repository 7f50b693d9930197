"""The registration of an operator: one per name, with its raw operators and their kernels."""

from __future__ import annotations

import functools
import inspect
import operator as operators
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import BuildError, ContractError, DifferentiationError, UnsupportedError
from fuselab.op import FusedOp, tensors_in
from fuselab.runtime import (
    autograd_node,
    cpu_choice,
    fallback,
    launch_plans,
    launch_recording,
    process_choice,
    rehearsal,
)
from fuselab.runtime.dispatch.autocast import without_autocast
from fuselab.runtime.dispatch.choice import choose, why_not
from fuselab.runtime.dispatch.overlap import refuse_overlap, unlike, unshared
from fuselab.runtime.dispatch.raw_operator import RawOperator
from fuselab.runtime.dispatch.schema import (
    VALUE_TYPES,
    is_scalar_tensor,
    schema_of,
    upstream_parameters,
)
from fuselab.runtime.dispatch.sequences import flat_of, with_tuples


class Registration:
    """The state of one operator: its raw operators, autograd.Function and public function.

    ``name`` is what PyTorch calls it, the operator's own unless another one had that before.
    """

    def __init__(self, op: FusedOp, name: str) -> None:
        self.op = op
        self.name = name
        self.schema = schema_of(op)
        forward_parameters, backward_parameters = self.schema
        self.forward_id = launch_plans.register(name)
        self.is_tensor = tuple(name in op.tensor_parameters for name in op.signature.parameters)
        self.is_sequence = tuple(kind == "Tensor[]" for _, kind in forward_parameters)
        self.tensor_positions = _positions(self.is_tensor)
        self.sequence_positions = _positions(self.is_sequence)
        self.output_count = op.output_count
        self.returned_count = op.output_count + op.residual_count
        self.saved_sequences = _positions(kind == "Tensor[]" for _, kind in backward_parameters[2:])
        # Of (grad_output, *saved).
        self.backward_sequences = _positions(
            kind == "Tensor[]" for _, kind in backward_parameters[1:]
        )
        self.float_positions = _positions(
            name in op.float_parameters for name in op.signature.parameters
        )
        constant = () if op.gradient is None else op.gradient.non_differentiable
        self.constant_positions = _positions(name in constant for name in op.signature.parameters)
        self.accepted = tuple(
            (name, *VALUE_TYPES[parameter.annotation])
            for name, parameter in op.signature.parameters.items()
        )
        self.raw_forward = RawOperator(
            name,
            forward_parameters,
            "()" if op.mutates else _result_type(self.returned_count),
            self._forward,
            self._fake_forward,
            None if op.gradient is None else self.differentiable,
            op.mutates,
        )
        if backward_parameters:
            self.backward_id = launch_plans.register(f"{name}_backward")
            self.raw_backward = RawOperator(
                f"{name}_backward",
                [backward_parameters[0], *upstream_parameters(op), *backward_parameters[2:]],
                "Tensor[]" if self.sequence_positions else _result_type(len(self.tensor_positions)),
                self._backward,
                self._fake_backward,
            )
            self.rules: dict[str, tuple[Any, ...]] = {}  # of autograd_node, by implementation
        self.public: Callable[..., Any]  # given by `operator`

    def differentiate_by(self, function: Any) -> None:
        """Use ``function`` as the operator's autograd.Function."""
        self.function = function
        # This skips Function.apply, which inspects forward's signature in every call (13 us of host
        # time on a CPU of 2.6 GHz). torch.compile and torch.func need Function.apply.
        plain: Any = super(torch.autograd.Function, function)
        self.apply_plainly = plain.apply

    def differentiable(self, *args: Any) -> Any:
        """Call the operator as a step that autograd records; ``args`` end with the
        implementation. Return the residuals too."""
        *values, implementation = args
        self.refuse_frozen(values)
        values = self.without_gradients(values)
        # From bools, because Dynamo treats ints that an object holds as dynamic.
        sequences = [place for place, is_sequence in enumerate(self.is_sequence) if is_sequence]
        flat, lengths = flat_of(values, sequences)
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return self.function.apply(*flat, lengths, implementation)
        return self.apply_plainly(*flat, lengths, implementation)

    def from_plan(self, args: tuple[Any, ...], implementation: str) -> Any:
        """Call the operator from a plan, as a step that autograd records. Return None if there is
        no plan, or if no call of this kind has needed a gradient yet."""
        if not torch.is_grad_enabled() or any(
            isinstance(args[place], Tensor) for place in self.float_positions
        ):
            return None  # a float given as a tensor may need a gradient, which is refused
        # The node takes only tensors that are arguments themselves, not those in sequences.
        sequences = self.sequence_positions or self.saved_sequences
        attach = None if sequences else autograd_node.attach()
        if attach is None:
            is_planned = launch_plans.planned(self.forward_id, implementation, args)
            if not is_planned:
                return None
            return self.op.without_residuals(self.differentiable(*args, implementation))
        output = launch_plans.lookup(self.forward_id, implementation, args, True, True)
        if output is None:
            return None
        self.refuse_frozen(args)
        torch._C._set_grad_enabled(False)  # as inside a Function; torch.no_grad() would take 1 us
        try:
            saved = self.op.gradient.save(output, *args)  # type: ignore[union-attr]
        finally:
            torch._C._set_grad_enabled(True)
        rule = self.rules.get(implementation)
        if rule is None:
            name = self.function.__name__
            step = (launch_plans.lookup, self.backward_id, implementation, self.function.past_plan)
            gradient: Any = self.op.gradient
            pairs = tuple(gradient.equal), tuple(gradient.passed)
            rule = self.rules[implementation] = (name, *step, *pairs)
        outputs = output[: self.output_count] if self.returned_count > 1 else (output,)
        tensors = [args[place] for place in self.tensor_positions]
        attach(outputs, tensors, saved, rule)
        return self.op.without_residuals(output)

    def refuse_frozen(self, values: Sequence[Any]) -> None:
        """Raise DifferentiationError if the gradient of a frozen argument is asked for."""
        frozen = self.op.gradient.frozen if self.op.gradient is not None else {}
        for name in frozen:
            value = values[list(self.op.signature.parameters).index(name)]
            if any(tensor.requires_grad for tensor in tensors_in((value,))):
                raise DifferentiationError(
                    f"{self.op.short_name}: '{name}' has no gradient; {frozen[name]}."
                )

    def without_gradients(self, values: Sequence[Any]) -> list[Any]:
        """Return the arguments; those that are not differentiable, detached."""
        found = list(values)
        for place in self.constant_positions:
            value = found[place]
            if isinstance(value, Tensor):
                found[place] = value.detach()
            elif value is not None:
                found[place] = tuple(one.detach() for one in value)
        return found

    def is_replaced_by(self, op: FusedOp) -> bool:
        """Return whether ``op`` is a new declaration of this operator: its reference is defined in
        the same place, and PyTorch is told the same about both."""
        known = self.op
        if op.name != known.name or not _same_definition(op.reference, known.reference):
            return False
        if (op.signature, op.mutates) != (known.signature, known.mutates):
            return False
        constant = [one.gradient and one.gradient.non_differentiable for one in (op, known)]
        returned_count = op.output_count + op.residual_count
        counts = op.output_count, returned_count
        is_same = (schema_of(op), *counts) == (self.schema, self.output_count, self.returned_count)
        return is_same and constant[0] == constant[1]

    def replace(self, op: FusedOp) -> None:
        """Replace the operator by ``op``, a new declaration of it."""
        self.op = op
        launch_plans.forget(self.forward_id)
        if op.gradient is not None:
            launch_plans.forget(self.backward_id)
            self.rules.clear()

    # The forward, from the raw operator's kernel on.

    def _forward(self, *args: Any) -> Any:
        *arguments, name = args
        arguments = with_tuples(arguments, self.sequence_positions)
        op = self.op
        if op.mutates:
            self._write_over(arguments, name)
            return None
        held = launch_plans.lookup(self.forward_id, name, tuple(arguments), False)
        if held is not None:
            return held
        # Choosing and validating are recorded too: if they look at a float, so does the plan.
        with launch_recording.record(self.forward_id, name, tuple(arguments)) as recording:
            chosen = self._resolve(name, recording.args)
            op.validate(*recording.args)
            if chosen != "reference":
                try:
                    with rehearsal.Forward(op, chosen, arguments):
                        forward = op.implementations[chosen].forward
                        returned = without_autocast(forward, op.arranged(recording.args))
                    outputs = op.returned_by_forward(returned)
                    recording.finish(_single_or_tuple(outputs))
                    return _single_or_tuple(unlike(outputs, arguments))
                except BuildError as error:
                    fallback.note_failed_build(op.name, chosen, error)
        returned = without_autocast(self._by_reference, arguments)
        return self._fresh_output(returned, arguments)

    def _by_reference(self, *arguments: Any) -> Any:
        """Return what the raw operator returns, computed in plain PyTorch."""
        return self.op.with_residuals(self.op.reference(*arguments), arguments)

    def _fresh_output(self, returned: Any, arguments: Sequence[Any]) -> Any:
        """Return the reference's result, with residuals, as new tensors, laid out as the
        operator's are."""
        outputs = unshared(self.op.returned_by_forward(returned), arguments)
        return _single_or_tuple(self.op.arranged(outputs))

    def _write_over(self, arguments: list[Any], name: str) -> None:
        op = self.op
        refuse_overlap(op, arguments)
        if launch_plans.lookup(self.forward_id, name, tuple(arguments), False) is not None:
            return
        # A choice on a CPU looks at no values, so it need not be recorded. The reference has no
        # plan, so it is not recorded either, which would take 100 us.
        on_cpu = tensors_in(arguments)[0].is_cpu
        chosen = self._resolve(name, arguments) if on_cpu or name == "reference" else None
        if chosen == "reference":
            op.validate(*arguments)
        else:
            with launch_recording.record(self.forward_id, name, tuple(arguments)) as recording:
                chosen = chosen or self._resolve(name, recording.args)
                op.validate(*recording.args)
                if chosen != "reference":
                    try:
                        with rehearsal.Forward(op, chosen, arguments):
                            without_autocast(op.implementations[chosen].forward, recording.args)
                        recording.finish(())
                        return
                    except BuildError as error:
                        fallback.note_failed_build(op.name, chosen, error)
        values = without_autocast(op.reference, arguments)
        for tensor, value in zip(op.mutated(arguments), tensors_in((values,)), strict=True):
            tensor.copy_(value)

    def _resolve(self, name: str, arguments: Sequence[Any]) -> str:
        op = self.op
        if name == "auto":
            return choose(op, arguments)
        reason = why_not(op, name, arguments)
        if reason is not None:
            op.validate(*arguments)  # an invalid argument is reported before a kernel's limit
            raise UnsupportedError(
                f"{op.short_name}: implementation '{name}' cannot run these inputs: {reason}; "
                "use implementation='auto'."
            )
        if fallback.is_broken(op.name, name):
            return "reference"
        return name

    def _fake_forward(self, *args: Any) -> Any:
        *arguments, _ = args
        arguments = with_tuples(arguments, self.sequence_positions)
        self.op.validate(*arguments)
        if self.op.mutates:
            return None
        if self.op.fake is not None:
            returned = self.op.with_residuals(self.op.fake(*arguments), arguments)
            return _single_or_tuple(self.op.returned_by_forward(returned))
        return self._fresh_output(self._by_reference(*arguments), arguments)

    # The backward, likewise. The raw operator returns empty tensors for gradients not needed.

    def _backward(self, *args: Any) -> Any:
        *values, name = args
        arguments = self._backward_arguments(values)
        grads = launch_plans.lookup(self.backward_id, name, arguments, False)
        if grads is None:
            grads = self._run_backward(name, arguments)
        return self._filled(grads, values[1])

    def _backward_arguments(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the contract's arguments of a backward, (needs, grad_output, *saved), from those
        of the raw operator, which takes one upstream gradient per output."""
        end = 1 + self.output_count
        upstream = _single_or_tuple(tuple(values[1:end]))
        return (tuple(values[0]), upstream, *with_tuples(values[end:], self.saved_sequences))

    def _filled(self, grads: Sequence[Tensor | None], like: Tensor) -> Any:
        """Return one tensor per gradient, an empty one for None, as the raw schema needs it."""
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
                    launch_recording.record(self.backward_id, name, arguments) as recording,
                    rehearsal.Backward(op, candidate, arguments),
                ):
                    grads = without_autocast(implementation.backward, op.arranged(recording.args))
                    self._refuse_other_counts(f"the backward of {candidate}", grads, arguments)
                    recording.finish(grads)
                return unlike(grads, arguments)
            except BuildError as error:
                fallback.note_failed_build(op.name, candidate, error)
        grads = without_autocast(op.gradient.reference, arguments)
        self._refuse_other_counts("Gradient.reference", grads, arguments)
        return op.arranged(unshared(grads, arguments))

    def _refuse_other_counts(self, what: str, grads: Any, arguments: tuple[Any, ...]) -> None:
        """Raise ContractError where a backward returns no tuple of one gradient per tensor."""
        count = len(arguments[0])  # of ``needs``
        if isinstance(grads, (tuple, list)) and len(grads) == count:
            return
        returned = f"{len(grads)}" if isinstance(grads, (tuple, list)) else type(grads).__name__
        names = ", ".join(self.op.tensor_parameters)
        raise ContractError(
            f"{self.op.name}: {what} returns {returned}; it returns a tuple of {count}, one "
            f"gradient or None for each tensor of {names}, also for integers."
        )

    def _with_backward(self, name: str, arguments: tuple[Any, ...]) -> list[str]:
        """Return the implementations to try for a backward, in order; none if the reference is
        first."""
        op, device = self.op, tensors_in(arguments)[0].device.type
        assert op.gradient is not None
        if name == "auto" and not cpu_choice.is_forced():
            name = process_choice.named(op) or name
        # If another operator has taken the name since and lacks the forward's implementation, the
        # reference computes the backward.
        names = [known for known in op.implementations if name in ("auto", known)]
        if name == "auto" and op.gradient.prefer is not None:
            names = list(op.gradient.prefer(*arguments))
        if "reference" in names:
            names = names[: names.index("reference")]
        known = ((candidate, op.implementations[candidate]) for candidate in names)
        return [name for name, one in known if one.backward is not None and one.device == device]

    def gradient_by_reference(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Return the gradients by the contract's formula if no implementation is to be tried, else
        None. They may be views of the upstream gradient, which autograd allows: a sum's gradients
        are the upstream one, and copying it doubled the time of a backward of 262144 x 1024 on an
        H200."""
        with launch_recording.ChoiceWatch() as choice:
            if self._with_backward(name, arguments):
                return None
        reference = self.op.gradient.reference  # type: ignore[union-attr]
        if choice.is_final:
            launch_plans.keep_reference(self.backward_id, name, arguments, reference)
        return without_autocast(reference, arguments)

    def _fake_backward(self, *args: Any) -> Any:
        gradient = self.op.gradient
        assert gradient is not None
        arguments = self._backward_arguments(args[:-1])
        grads = (gradient.fake or gradient.reference)(*arguments)
        what = "Gradient.reference" if gradient.fake is None else "Gradient.fake"
        self._refuse_other_counts(what, grads, arguments)
        grads = self.op.arranged(unshared(grads, arguments))
        return self._filled(grads, args[1])


def _same_definition(one: Any, other: Any) -> bool:
    """Return whether two functions were defined by one ``def``, with the same objects around it.

    In a notebook that is a ``def`` of the same name, as every cell is a file of its own.
    """
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        same_arguments = (one.args, one.keywords) == (other.args, other.keywords)
        return same_arguments and _same_definition(one.func, other.func)
    if not (inspect.isfunction(one) and inspect.isfunction(other)):
        return one is other
    around = [[*map(_content, function.__closure__ or ())] for function in (one, other)]
    if len(around[0]) != len(around[1]) or any(map(operators.is_not, *around)):
        return False
    if (one.__module__, one.__qualname__) != (other.__module__, other.__qualname__):
        return False
    in_one_file = one.__code__.co_filename == other.__code__.co_filename
    return in_one_file or one.__module__ == "__main__"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _single_or_tuple(outputs: tuple[Tensor, ...]) -> Any:
    """Return one tensor itself, and several as a tuple."""
    return outputs[0] if len(outputs) == 1 else outputs


def _result_type(count: int) -> str:
    """Return the schema's type of a result of ``count`` tensors."""
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _positions(flags: Iterable[bool]) -> tuple[int, ...]:
    return tuple(place for place, flag in enumerate(flags) if flag)


def has_scalar_tensor(parameters: Sequence[tuple[str, str]], values: Sequence[Any]) -> bool:
    """Return whether the value of a float parameter is a 0-d tensor, as inside torch.compile."""
    return any(
        is_scalar_tensor(kind) and isinstance(value, Tensor)
        for (_, kind), value in zip(parameters, values, strict=False)
    )

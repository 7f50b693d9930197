"""Checks of an operator inside PyTorch: opcheck, compile, autocast, torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuselab.op import tensors_in
from fuselab.prove import asked_inputs
from fuselab.prove.accuracy import Bar
from fuselab.prove.arguments import at, differentiable, filled, mapped, tensor_names
from fuselab.prove.asked_calls import (
    gradients_under_autocast,
    under_autocast,
    under_determinism,
)
from fuselab.prove.asked_torch import (
    TRANSFORMS,
    compiled_graphs,
    compiled_results,
    opcheck_problem,
    transformed,
    when_compiled,
)
from fuselab.prove.check_memory import same_bits
from fuselab.prove.draw import LAYOUTS
from fuselab.prove.held import CandidateError, RemoteError, kinds_of, said
from fuselab.prove.outputs import floating, output_names
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, call_bar, has_gradient, judged


def raw_operators_are_sound(subject: Subject, trial: Trial) -> Outcome:
    """Run torch.library.opcheck on the raw forward, and on the raw backward with its saved
    values."""
    if any(value.shape.count(0) > 1 for value in tensors_in(trial.args)):
        return Outcome(refused="opcheck of any operator fails on tensors with two empty dimensions")
    if any(bool(output.isnan().any()) for output in floating(subject.expected(*trial.args))):
        return Outcome(
            refused="opcheck takes NaN, here the mean of nothing or its like, for a fault"
        )
    if subject.op.residual_count and any(value.numel() == 0 for value in tensors_in(trial.args)):
        return Outcome(
            refused="what is kept of an empty row is NaN, which opcheck takes for a fault"
        )
    scalar_dtype = torch.float64 if subject.dtype == torch.float64 else torch.float32
    upstream = None if subject.op.gradient is None else subject.upstream(trial)
    found = subject.candidate.ask(opcheck_problem, list(trial.args), scalar_dtype, upstream)
    if found is None:
        return Outcome()
    overload, problem = found
    return Outcome(f"{problem} {_float_hint(subject)}" if overload == "scalar_tensor" else problem)


def _float_hint(subject: Subject) -> str:
    """Return the sentence that explains an error of a call whose floats are tensors."""
    names = ", ".join(subject.op.float_parameters)
    return (
        f"Inside torch.compile a float ({names}) arrives as a 0-d tensor, in the reference as in "
        "the kernels' launchers; docs/contract.md says how a kernel takes it."
    )


def _explaining_floats(
    trial_of: Callable[[Subject, Trial], Outcome],
) -> Callable[[Subject, Trial], Outcome]:
    """Return the check with the reason added where Dynamo meets a float that it cannot know."""

    @functools.wraps(trial_of)
    def explained(subject: Subject, trial: Trial) -> Outcome:
        try:
            return trial_of(subject, trial)
        except Exception as error:
            # Dynamo's own class would take a second to import.
            if not subject.op.float_parameters or "UserError" not in kinds_of(error):
                raise
            return Outcome(f"raised {said(error, 120)}. {_float_hint(subject)}")

    return explained


def _structure(args: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the facts that torch.compile may specialise on.

    Returns None if a size is 0 or 1, because torch.compile always specialises on those.
    """
    tensors = tensors_in(args)
    sizes = [size for tensor in tensors for size in tensor.shape]
    if any(size < 2 for size in sizes):
        return None
    equal = tuple(sizes.index(size) for size in sizes)
    plain = mapped(
        lambda value: (
            (value.ndim, value.dtype, value.is_contiguous())
            if isinstance(value, Tensor)
            else None
            if isinstance(value, float)
            else value
        ),
        args,
    )
    return (*plain, equal)


def _of_one_structure(subject: Subject, trial: Trial, wanted: int) -> list[tuple[Any, ...]]:
    """Return up to ``wanted`` argument lists that differ only in sizes, so that one dynamic graph
    must serve all of them."""
    groups: dict[Any, dict[Any, tuple[Any, ...]]] = {}
    start = trial.draw.below(1 << 16)
    for index in range(start, start + 400):
        drawn = subject.draw("sizes", index, ("contiguous",), ("normal",), max_numel=2048)
        if drawn is None:
            continue
        structure = _structure(drawn.args)
        if structure is None:
            continue
        group = groups.setdefault(structure, {})
        group[tuple(value.shape for value in tensors_in(drawn.args))] = drawn.args
        if len(group) == wanted:
            return list(group.values())
    return list(max(groups.values(), key=len).values()) if groups else []


def _with_other_floats(args: Sequence[Any], number: int) -> tuple[Any, ...]:
    return tuple(
        value * 1.5 + 0.25 * number if isinstance(value, float) else value for value in args
    )


@_explaining_floats
def one_graph_serves_all(subject: Subject, trial: Trial) -> Outcome:
    """Check that one graph serves every size and every float value, with fullgraph and dynamic.

    Where the reference itself needs more graphs for the same arguments, an operator may need as
    many: PyTorch decides by sizes that are computed, such as the one channel of a group.
    """
    listed = _of_one_structure(subject, trial, 4)
    if not listed:
        return Outcome(refused="no two draws of the operator differ in size alone")
    # Either backend counts graphs. Inductor takes seconds, so only one row of a full check uses it.
    backend = "inductor" if subject.first and not subject.quick else "aot_eager"
    floats = [_with_other_floats(listed[0], number) for number in range(1, 4)]
    has_floats = any(isinstance(value, float) for value in listed[0])
    several = [*listed, *floats] if has_floats else listed
    found = subject.candidate.ask(compiled_results, backend, [list(args) for args in several])
    outcome = Outcome()
    for args, outputs in zip(several, found["outputs"], strict=True):
        outcome = judged(subject.bar(args), outputs, "compiled ")
        if outcome.problem is not None:
            return outcome
    for kind, count in (("sizes", len(listed)), ("values of a float", len(several))):
        graphs = found["graphs"][count - 1]
        tried = [list(args) for args in several[:count]]
        if graphs > 1 and graphs > subject.reference.ask(compiled_graphs, tried):
            made = count if kind == "sizes" else len(floats)
            return Outcome(f"{made} {kind} made torch.compile build {graphs} graphs")
    return outcome


@_explaining_floats
def compiled_gradients_are_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge forward and backward of a compiled function, in one graph each."""
    bar, asked = call_bar(subject, trial)
    return judged(bar, subject.candidate.ask(when_compiled, *asked), "compiled ")


_MIXED_HINT = (
    "; where the arguments' dtypes are mixed, give the dtype that the reference gives, or refuse "
    "them by FusedOp.validate (docs/contract.md, Dtypes)"
)
_AUTOCAST_HINT = (
    "; FusedOp.autocast says what autocast makes of the arguments on this device "
    "(docs/contract.md, Dtypes)"
)


def autocast_like_the_reference(subject: Subject, trial: Trial) -> Outcome:
    """Judge dtype and values under torch.autocast, also where the inputs' dtypes are mixed.

    An implementation that does not support the inputs after autocast is not judged on them.
    """
    device, op = subject.device.type, subject.op
    outcome, refused = None, None
    floating = differentiable(op, trial.args)
    for dtype in (torch.bfloat16, torch.float16):
        # the interpreter rounds bfloat16 wrongly
        unjudged = subject.interpreted and dtype == torch.bfloat16
        narrowed = [tensor.to(dtype) for tensor in at(trial.args, floating[:1])]
        for given in (trial.args, filled(trial.args, floating[:1], narrowed)):
            args = list(given)
            if unjudged and (op.autocast or given is not trial.args):
                continue
            if subject.reference.ask(asked_inputs.refusal_of, args) is not None:
                continue  # the operator refuses this mixture of dtypes
            # PyTorch's in-place operators do not autocast: the dtype of what is written stays.
            options = (device, dtype, not op.mutates)
            try:
                names = subject.bar(args).names
                bar = subject.bar_for(args, names, under_autocast, *options)
            except (RemoteError, RuntimeError, TypeError, ValueError):
                continue  # the reference does not take it
            under = f"under autocast({device}, {dtype})"
            reason = subject.reference.ask(
                asked_inputs.autocast_refusal, subject.implementation, dtype, args
            )
            if reason is not None:
                refused = f"refuses inputs {under}: {reason}"
                continue
            ours = subject.candidate.ask(under_autocast, device, dtype, True, args)
            outcome = judged(bar, ours, after=f" {under}")
            if outcome.problem is None and given is trial.args:
                outcome = _gradients_within(subject, trial, bar, dtype, under)
            if outcome.problem is not None:
                is_mixed = len({tensor.dtype for tensor in at(args, floating)}) > 1
                hint = _MIXED_HINT if is_mixed else _AUTOCAST_HINT
                problem = f"{outcome.problem}{hint}"
                return replace(outcome, problem=problem, args=args)
    return outcome or Outcome(refused=refused)


def _gradients_within(
    subject: Subject, trial: Trial, forward: Bar, dtype: torch.dtype, under: str
) -> Outcome:
    """Judge the gradients of a backward that runs within autocast, as the forward does.

    ``forward`` is the bar of the outputs, whose dtypes the upstream gradients have.
    """
    places = subject.differentiable(trial.args)
    outputs = [output for output in forward.eager if output is not None]
    if subject.op.gradient is None or not places:
        return Outcome()
    upstream = tuple(
        trial.draw.gradient(*output.shape, dtype=output.dtype) for output in floating(outputs)
    )
    names = tensor_names(subject.op, trial.args)
    labels = [*output_names(subject.op), *(f"gradient of {names[place]}" for place in places)]
    # Where autocast casts, the arithmetic has 16 bits, and so has the bar.
    narrowed = bool(subject.op.autocast)
    options = (gradients_under_autocast, subject.device.type, dtype, narrowed, places)
    values = [*trial.args, upstream]
    try:
        bar = subject.bar_for(values, labels, *options)
    except (RemoteError, RuntimeError, TypeError, ValueError):
        return Outcome()  # the reference has no backward there
    return judged(bar, subject.candidate.ask(*options, values), after=f" of a backward {under}")


def transforms_like_the_reference(subject: Subject, trial: Trial) -> Outcome:
    """Judge torch.func.grad, vmap and vmap of grad; jvp must be right or refused."""
    args = trial.args
    places = subject.differentiable(args) or list(range(len(tensors_in(args))))
    outcome = Outcome()
    for name in TRANSFORMS:
        if subject.op.gradient is None and name != "vmap":
            continue
        values = list(args)
        if name.startswith("vmap"):
            values = filled(args, places, [_batch_of_three(tensor) for tensor in at(args, places)])
        bar = subject.bar_for(values, [], transformed, name, places)
        try:
            ours = subject.candidate.ask(transformed, name, places, values)
        except CandidateError:
            raise
        except Exception as error:
            if name == "jvp":
                continue
            return Outcome(f"torch.func.{name} raised {said(error, 200)}")
        bar.names = [f"torch.func.{name} result {place}" for place in range(len(ours))]
        outcome = judged(bar, ours)
        if outcome.problem is not None:
            return outcome
    return outcome


def _batch_of_three(tensor: Tensor) -> Tensor:
    """Stack three samples for vmap, which differ if the tensor is floating."""
    if not tensor.is_floating_point():
        return torch.stack([tensor] * 3)
    return torch.stack([tensor, tensor * 0.5, tensor - 1])


def deterministic_mode_repeats(subject: Subject, trial: Trial) -> Outcome:
    """Check that forward and backward are right and repeat their bits under
    torch.use_deterministic_algorithms(True), or refuse it by an error that names it, as PyTorch's
    own operators do."""
    bar, asked = call_bar(subject, trial)
    try:
        first, *others = subject.candidate.ask(under_determinism, 3, *asked)
    except CandidateError:
        raise
    except Exception as error:
        if subject.op.nondeterministic is None or "deterministic" not in str(error):
            raise
        return Outcome(refused=f"refuses: {said(error, 100)}")
    if not all(same_bits(first, again) for again in others):
        return Outcome(
            "two runs differ under torch.use_deterministic_algorithms(True), where an "
            "implementation adds in a fixed order, or raises an error that names the mode"
        )
    return judged(bar, first, after=" under torch.use_deterministic_algorithms(True)")


def _narrow(subject: Subject) -> tuple[Verdict, str] | None:
    """Return None unless autocast leaves this dtype unchanged, as it does float64 and integers."""
    if subject.dtype == torch.float64 or not subject.dtype.is_floating_point:
        return Verdict.SKIPPED, f"autocast leaves {subject.dtype_name} alone"
    return None


def _returns_new(subject: Subject) -> tuple[Verdict, str] | None:
    if subject.op.mutates:
        return Verdict.SKIPPED, "no transform of torch.func follows what is written over"
    return None


CHECKS = (
    # The raw operators under torch.library.opcheck.
    Check(
        "operator",
        raw_operators_are_sound,
        quick=1,
        full=4,
        max_numel=256,
        shrink_tries=0,
        once=True,
    ),
    # One graph for all sizes and float values.
    Check(
        "compile", one_graph_serves_all, quick=1, full=2, max_numel=512, shrink_tries=0, once=True
    ),
    # Gradients of a compiled function.
    Check(
        "compiled gradients",
        compiled_gradients_are_right,
        quick=1,
        full=3,
        max_numel=512,
        applies=has_gradient,
        shrink_tries=0,
        once=True,
    ),
    # Dtype and values under torch.autocast.
    Check(
        "autocast", autocast_like_the_reference, quick=4, full=12, max_numel=512, applies=_narrow
    ),
    # Grad, vmap and their composition; jvp.
    Check(
        "torch.func",
        transforms_like_the_reference,
        quick=2,
        full=8,
        max_numel=256,
        applies=_returns_new,
        shrink_tries=20,
        once=True,
    ),
    # Right, and the same bits, under use_deterministic_algorithms.
    Check(
        "deterministic mode",
        deterministic_mode_repeats,
        layouts=LAYOUTS,
        quick=2,
        full=8,
        max_numel=2048,
        once=True,
        non_empty=True,
    ),
)

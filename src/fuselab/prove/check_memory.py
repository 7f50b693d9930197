"""Checks of what a call does to memory: outputs written, inputs left alone, nothing remembered."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuselab.prove.accuracy import Bar
from fuselab.prove.draw import LAYOUTS, VALUES, make_values
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, gradient_bar, judged, with_gradients

_EMPTIES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class PoisonedAllocations(TorchDispatchMode):
    """Fills what ``torch.empty`` and its kin return, so that an element left unwritten shows."""

    def __init__(self, poison: float) -> None:
        super().__init__()
        self.poison = poison

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTIES:
            result.fill_(self.poison if result.is_floating_point() else 1)
        return result


@contextlib.contextmanager
def filled_by_torch() -> Iterator[None]:
    """torch's own means: in deterministic mode it fills every empty tensor, C++ callers' too."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module whose attribute is a setting
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


def leave_poison_behind(like: Tensor, poison: float) -> None:
    """Free blocks of ``like``'s size that hold ``poison``: the allocator hands them out next."""
    blocks = [torch.full_like(like, poison) for _ in range(4)]
    del blocks


def output_is_written(subject: Subject, trial: Trial) -> Outcome:
    bar = Bar(lambda values: [subject.op.reference(*values)], trial.args, ["output"])
    eager = bar.eager[0]
    assert eager is not None
    implementation = subject.op.implementations[subject.implementation]
    worst = Outcome()
    for poison in (math.nan, 7.0):
        with PoisonedAllocations(poison):
            output = implementation.forward(*trial.args)
        worst = judged(bar.judge([output]), ["output (in memory poisoned before)"])
        if worst.problem is not None:
            return worst
        # Twice through the public function: the second call may run a held launch plan.
        for _ in range(2):
            leave_poison_behind(eager, poison)
            outcome = judged(bar.judge([subject.call(*trial.args)]), ["output (in reused memory)"])
            if outcome.problem is not None:
                return outcome
    with filled_by_torch():
        output = subject.call(*trial.args)
    return judged(bar.judge([output]), ["output (in memory that torch filled)"])


def gradients_are_written(subject: Subject, trial: Trial) -> Outcome:
    bar, names, places, upstream = gradient_bar(subject, trial)
    for _ in range(2):
        for grad in bar.eager:
            if grad is not None:
                leave_poison_behind(grad, math.nan)
        results = with_gradients(subject.call, places, [*trial.args, upstream])
        outcome = judged(bar.judge(results), [f"{name} (in reused memory)" for name in names])
        if outcome.problem is not None:
            return outcome
    with filled_by_torch():
        results = with_gradients(subject.call, places, [*trial.args, upstream])
    return judged(bar.judge(results), [f"{name} (in memory that torch filled)" for name in names])


def storage_bytes(tensor: Tensor) -> Tensor:
    """A copy of a tensor's whole storage, what lies around and between its elements included."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole.clone()


class Snapshot:
    """Bytes, version, shape and strides of some tensors, to be compared later."""

    def __init__(self, tensors: Sequence[tuple[str, Any]]) -> None:
        self.entries = [
            (name, tensor, storage_bytes(tensor), tensor._version, tensor.shape, tensor.stride())
            for name, tensor in tensors
            if isinstance(tensor, Tensor)
        ]

    def changed(self) -> str | None:
        """What changed since, or None."""
        for name, tensor, before, version, shape, stride in self.entries:
            if tensor.shape != shape or tensor.stride() != stride:
                return f"{name} changed its shape or strides"
            if not torch.equal(storage_bytes(tensor), before):
                return f"{name} was written to"
            if tensor._version != version:
                return f"{name} was written to (its version counter moved)"
        return None


def inputs_stay_as_they_are(subject: Subject, trial: Trial) -> Outcome:
    names = list(subject.op.signature.parameters)
    before = Snapshot(list(zip(names, trial.args, strict=True)))
    for _ in range(2):
        subject.call(*trial.args)
    problem = before.changed()
    if problem is not None or subject.op.gradient is None:
        return Outcome(problem)
    places = subject.differentiable(trial.args)
    output = subject.op.reference(*trial.args)
    upstream = trial.draw.gradient(*output.shape, dtype=output.dtype)
    before = Snapshot([*zip(names, trial.args, strict=True), ("the upstream gradient", upstream)])
    with_gradients(subject.call, places, [*trial.args, upstream])
    changed = before.changed()
    return Outcome(None if changed is None else f"{changed} by the backward")


def repeated_calls_agree(subject: Subject, trial: Trial) -> Outcome:
    first = storage_like(subject.call(*trial.args))
    for number in range(2, 5):
        again = storage_like(subject.call(*trial.args))
        if not torch.equal(first, again):
            return Outcome(f"call {number} on the same inputs gives other bits than the first")
    return Outcome()


def storage_like(tensor: Tensor) -> Tensor:
    """The elements of a tensor as bytes, so that NaN equals NaN and -0.0 differs from 0.0."""
    # A tensor of one element counts as contiguous whatever its stride, and cannot be viewed so.
    return (
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        .copy_(tensor.detach())
        .reshape(-1)
        .as_strided((tensor.numel(),), (1,))
        .view(torch.uint8)
    )


def fresh_values_count(subject: Subject, trial: Trial) -> Outcome:
    """New values in the same buffers; written through ``.data``, which moves no version counter."""
    places = subject.differentiable(trial.args)
    differentiates = subject.op.gradient is not None
    output = subject.op.reference(*trial.args)
    upstream = trial.draw.gradient(*output.shape, dtype=output.dtype)
    names = ["output"] + [f"gradient {place}" for place in places]
    reference = subject.op.reference
    for attempt in range(4):
        if differentiates:
            bar = Bar(
                lambda values: with_gradients(reference, places, values),
                [*trial.args, upstream],
                names,
            )
            results = with_gradients(subject.call, places, [*trial.args, upstream])
        else:
            bar = Bar(lambda values: [reference(*values)], trial.args, ["output"])
            results = [subject.call(*trial.args)]
        outcome = judged(bar.judge(results), bar.names)
        if outcome.problem is None:
            plain = Bar(lambda values: [reference(*values)], trial.args, ["output"])
            outcome = judged(plain.judge([subject.call(*trial.args)]), ["output"])
        if outcome.problem is not None:
            seen = "" if attempt == 0 else " (new values in the same memory)"
            return Outcome(f"{outcome.problem}{seen}", outcome.ours_ulp, outcome.eager_ulp)
        for place in places:
            _refill(trial.args[place], trial.draw.below(1 << 16), one_element=attempt == 2)
    return outcome


def _refill(tensor: Tensor, seed: int, one_element: bool) -> None:
    """Other values in a tensor's memory; with ``one_element``, one element somewhere inside."""
    if tensor.numel() == 0:
        return
    values = make_values("normal", tensor.shape, tensor.dtype, seed).to(tensor.device)
    if one_element:
        kept = tensor.detach().clone()
        place = seed % tensor.numel()
        kept.view(-1)[place] = values.view(-1)[place] + 3
        values = kept
    tensor.data.copy_(values)


def outputs_are_fresh(subject: Subject, trial: Trial) -> Outcome:
    first = subject.call(*trial.args)
    for name, value in zip(subject.op.signature.parameters, trial.args, strict=True):
        if isinstance(value, Tensor) and _overlap(first, value):
            return Outcome(f"the output shares its memory with {name}")
    held = storage_like(first)
    for place in subject.differentiable(trial.args):
        _refill(trial.args[place], trial.draw.below(1 << 16), one_element=False)
    second = subject.call(*trial.args)
    if _overlap(first, second):
        return Outcome("two calls return the same memory")
    if not torch.equal(held, storage_like(first)):
        return Outcome("a second call changed the first call's output")
    return Outcome()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share a storage; empty storages never do."""
    first, second = one.untyped_storage(), other.untyped_storage()
    return first.nbytes() > 0 and second.nbytes() > 0 and first.data_ptr() == second.data_ptr()


_TINY = torch.tensor([1e-310], dtype=torch.float64)

# What a kernel's launcher must leave as it found it. The functions are those that measure and
# judge: an implementation that replaces one of them is not to be trusted with the others.
_STATE: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("the random number generator", lambda: torch.get_rng_state().tolist()),
    ("the number of threads", torch.get_num_threads),
    ("the default dtype", torch.get_default_dtype),
    ("grad mode", torch.is_grad_enabled),
    ("deterministic mode", torch.are_deterministic_algorithms_enabled),
    ("float32 matmul precision", torch.get_float32_matmul_precision),
    ("flush-to-zero of subnormals", lambda: _TINY.mul(1.0).view(torch.int64).item()),
    ("the CUDA stream", lambda: torch.cuda.current_stream() if torch.cuda.is_available() else None),
    ("the CUDA device", lambda: torch.cuda.current_device() if torch.cuda.is_available() else None),
    ("time.perf_counter", lambda: time.perf_counter),
    ("torch.equal", lambda: torch.equal),
    ("torch.isfinite", lambda: torch.isfinite),
    ("torch.autograd.grad", lambda: torch.autograd.grad),
    ("torch.cuda.synchronize", lambda: torch.cuda.synchronize),
    ("torch.cuda.Event", lambda: torch.cuda.Event),
)


def nothing_else_changes(subject: Subject, trial: Trial) -> Outcome:
    before = [read() for _, read in _STATE]
    subject.call(*trial.args)
    for (name, read), value in zip(_STATE, before, strict=True):
        if read() != value:
            return Outcome(f"a call changes {name}")
    return Outcome()


def _deterministic(subject: Subject) -> tuple[Verdict, str] | None:
    if subject.op.nondeterministic is None:
        return None
    return Verdict.SKIPPED, f"the operator says: {subject.op.nondeterministic}"


def _has_gradient(subject: Subject) -> tuple[Verdict, str] | None:
    return None if subject.op.gradient is not None else (Verdict.SKIPPED, "it declares no gradient")


STATE_CHECKS = (
    Check("global state", "a call changes nothing outside", nothing_else_changes, quick=2, full=4),
)

CHECKS = (
    Check(
        "written",
        "every element of the output is written",
        output_is_written,
        full=16,
        max_numel=4096,
    ),
    Check(
        "gradients written",
        "every element of every gradient is written",
        gradients_are_written,
        quick=4,
        full=12,
        max_numel=4096,
        applies=_has_gradient,
    ),
    Check(
        "inputs unchanged",
        "forward and backward write to no input",
        inputs_stay_as_they_are,
        layouts=LAYOUTS,
        values=VALUES,
        quick=8,
        max_numel=4096,
    ),
    Check(
        "repeated",
        "the same inputs give the same bits",
        repeated_calls_agree,
        quick=4,
        full=12,
        applies=_deterministic,
    ),
    Check(
        "fresh values",
        "nothing is remembered from an earlier call",
        fresh_values_count,
        quick=4,
        full=12,
        max_numel=4096,
    ),
    Check(
        "fresh outputs",
        "outputs share no memory with inputs or earlier outputs",
        outputs_are_fresh,
        quick=4,
        full=12,
        max_numel=4096,
    ),
)

"""Checks of what a call returns: the type of its tensors, their strides, how long they live."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuselab.op import tensors_in
from fuselab.prove.arguments import mapped, needed, tensor_names
from fuselab.prove.draw import LAYOUTS
from fuselab.prove.outputs import as_declared, output_names, outputs_in
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, with_gradients
from fuselab.runtime.dispatch.overlap import overlaps_itself

HELD = 128  # calls whose results are alive at once
_SPAN = 128  # calls over which the memory in use must not grow
_LEAK_BYTES = 96  # per call; a kept tensor of one element takes 200 and more
_SLACK_BYTES = 1 << 16  # of a storage beyond the elements that a result needs


def results_are_as_declared(subject: Subject, trial: Trial) -> Outcome:
    """Check the type, the strides and the storage of every output and every gradient.

    What torch.compile compiles around the operator relies on the strides that its fake promises.
    """
    args = trial.args
    raw = getattr(torch.ops, subject.op.namespace)
    forward = getattr(raw, subject.op.short_name).default
    values = (*args, subject.implementation)
    promised = _promised(forward, values)
    names = [f"the {name}" for name in output_names(subject.op)]
    for how, call in (
        ("", lambda: forward(*values)),
        # The second call of the public function may run a launch plan.
        ("", lambda: subject.call(*args)),
        (" of the second call", lambda: subject.call(*args)),
    ):
        problem = _first_problem(names, outputs_in(call()), promised)
        if problem is not None:
            return Outcome(problem + how)
    if subject.op.gradient is None:
        return Outcome()
    problem = _gradient_problem(subject, trial, raw)
    if problem is None:
        places = subject.differentiable(args)
        results = with_gradients(subject.call, places, [*args, subject.upstream(trial)])
        labels = [
            *names,
            *(f"the gradient of {tensor_names(subject.op, args)[at]}" for at in places),
        ]
        problem = _first_problem(labels, results)
    return Outcome(problem)


def _gradient_problem(subject: Subject, trial: Trial, raw: Any) -> str | None:
    """Return what is wrong with the gradients that the raw backward returns, or None."""
    op = subject.op
    assert op.gradient is not None
    output = subject.call(*trial.args)
    upstream = as_declared(op, outputs_in(output), subject.upstream(trial))
    saved = op.gradient.save(output, *trial.args)
    backward = getattr(raw, f"{op.short_name}_backward").default
    needs = needed(op, trial.args)
    values = (needs, *tensors_in((upstream,)), *saved, subject.implementation)
    given, promised = backward(*values), _promised(backward, values)
    count = len(outputs_in(given))
    return _first_problem(
        [f"gradient {place}" for place in range(count)], outputs_in(given), promised
    )


def _promised(overload: Any, values: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return what the fake implementation of a raw operator gives for these values."""
    with FakeTensorMode() as mode:
        faked = mapped(
            lambda value: mode.from_tensor(value) if isinstance(value, Tensor) else value, values
        )
        return outputs_in(overload(*faked))


def _first_problem(
    names: Sequence[str],
    results: Sequence[Tensor | None],
    promised: Sequence[Tensor] | None = None,
) -> str | None:
    """Return the first fault in type, storage or strides, or None."""
    for place, (name, result) in enumerate(zip(names, results, strict=True)):
        if result is None:
            continue
        if type(result) is not Tensor:
            return f"{name} is a {type(result).__name__}, which is no plain torch.Tensor"
        if overlaps_itself(result):
            return f"{name} has elements that share memory (strides {result.stride()})"
        if promised is None:
            continue
        problem = _unlike(result, promised[place])
        if problem is not None:
            return f"{name} {problem}"
        excess = result.untyped_storage().nbytes() - _extent(result) * result.element_size()
        if excess > _SLACK_BYTES + result.nbytes:
            return f"{name} of {result.nbytes} bytes keeps {excess} more bytes alive"
    return None


def _extent(tensor: Tensor) -> int:
    """Return how many elements of memory a tensor spans."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _unlike(result: Tensor, promised: Tensor) -> str | None:
    """Return how a result differs from what ``fake`` promises, or None."""
    if result.shape != promised.shape or result.dtype != promised.dtype:
        return (
            f"is {result.dtype} of shape {list(result.shape)}, where fake promises "
            f"{promised.dtype} of shape {list(promised.shape)}"
        )
    if result.numel() < 2:
        return None
    dims = [dim for dim, size in enumerate(result.shape) if size > 1]
    if [result.stride(dim) for dim in dims] != [promised.stride(dim) for dim in dims]:
        return (
            f"has strides {tuple(result.stride())}, where fake promises "
            f"{tuple(promised.stride())}: torch.compile relies on them. FusedOp.fake says which "
            "strides the implementations give (docs/contract.md)"
        )
    return None


def results_do_not_share_memory(subject: Subject, trial: Trial) -> Outcome:
    """Check that the results of many calls, all of them alive, lie in memory of their own."""
    for make, count, what in _calls(subject, trial, HELD):
        held: list[Tensor] = []
        begins: dict[int, int] = {}
        for number in range(count):
            for result in make():
                storage = result.untyped_storage()
                if storage.nbytes() == 0:
                    continue
                earlier = begins.setdefault(storage.data_ptr(), number)
                if earlier != number:
                    return Outcome(
                        f"call {number + 1} returns {what} in memory of call {earlier + 1}, whose "
                        "result is still alive"
                    )
                held.append(result)
    return Outcome()


def memory_does_not_grow(subject: Subject, trial: Trial) -> Outcome:
    """Check that a call keeps nothing: once its results are gone, no memory is in use that was not
    before.

    Memory that is taken once, as by a cache, does not count; the calls of two spans must each take
    more.
    """
    in_use = memory_in_use(subject.device)
    if in_use is None:
        return Outcome(
            not_judged="this machine's C library does not tell how much memory is in use"
        )
    for make, count, what in _calls(subject, trial, _SPAN):
        # A collection of Python's cycles takes 50 ms, so it is made where memory seems to grow.
        growth = min(_growth(make, count, in_use, collect=False))
        if growth > _LEAK_BYTES * count:
            growth = min(_growth(make, count, in_use, collect=True))
        if growth > _LEAK_BYTES * count:
            return Outcome(
                f"{count} calls that return {what} keep {growth} bytes after their results are "
                "gone, and the next ones as many again"
            )
    return Outcome()


def _growth(
    make: Callable[[], Any], count: int, in_use: Callable[[], int], collect: bool
) -> list[int]:
    """Return by how many bytes the memory in use grows over each of two spans of ``count`` calls,
    after a shorter span that fills caches."""
    readings = []
    for calls in (count // 4, count, count):
        for _ in range(calls):
            make()
        if collect:
            gc.collect()
        readings.append(in_use())
    return [later - earlier for earlier, later in itertools.pairwise(readings)]


def _calls(
    subject: Subject, trial: Trial, count: int
) -> Iterator[tuple[Callable[[], list[Tensor]], int, str]]:
    """Yield functions that make a call and return its new tensors, each with how often to call it
    and what it returns."""
    if subject.interpreted:
        count //= 16
    yield lambda: subject.results(*trial.args), count, "a result"
    if subject.op.gradient is not None:
        places, upstream = subject.differentiable(trial.args), subject.upstream(trial)

        def gradients() -> list[Tensor]:
            values = [*trial.args, upstream]
            results = with_gradients(subject.call, places, values)
            # A gradient may be the upstream gradient itself, which lives in the judge.
            given = {one.untyped_storage().data_ptr() for one in upstream}
            return [
                result
                for result in results
                if result is not None and result.untyped_storage().data_ptr() not in given
            ]

        yield gradients, count // 2, "gradients"


class _MallocInfo(ctypes.Structure):
    """The struct mallinfo2 of the GNU C library, whose fields are sizes in bytes or counts."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@functools.cache
def _mallinfo() -> Callable[[], _MallocInfo] | None:
    """Return the C library's mallinfo2, or None where it has none (other than glibc 2.33)."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallocInfo
    return function


def memory_in_use(device: torch.device) -> Callable[[], int] | None:
    """Return a function that counts the bytes in use on ``device``, by PyTorch's caching allocator
    or the C library's; None where nothing counts them."""
    if device.type == "cuda":
        return lambda: torch.cuda.memory_allocated(device)
    mallinfo = _mallinfo()
    if mallinfo is None:
        return None

    def in_use() -> int:
        found = mallinfo()
        return int(found.uordblks) + int(found.hblkhd)

    return in_use


def _returns_new(subject: Subject) -> tuple[Verdict, str] | None:
    return (Verdict.SKIPPED, "it writes over arguments") if subject.op.mutates else None


CHECKS = (
    # Plain tensors in the strides that fake promises.
    Check(
        "outputs",
        results_are_as_declared,
        layouts=LAYOUTS,
        quick=16,
        full=64,
        max_numel=1024,
        turns=True,
        applies=_returns_new,
    ),
    # Many results alive at once.
    Check(
        "held outputs",
        results_do_not_share_memory,
        quick=1,
        full=4,
        max_numel=256,
        applies=_returns_new,
        non_empty=True,
        shrink_tries=8,
    ),
    # Nothing stays when the results are gone.
    Check(
        "leaks",
        memory_does_not_grow,
        quick=1,
        full=2,
        max_numel=256,
        non_empty=True,
        shrink_tries=4,
    ),
)

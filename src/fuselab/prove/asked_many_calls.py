"""Procedures for a candidate's process: many calls, from several threads, in every grad mode.

They return the results of all calls, stacked, so that the judge compares the bits.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler, profiler_legacy

from fuselab.op import tensors_in
from fuselab.prove.arguments import filled, mapped
from fuselab.prove.asked_calls import with_gradients
from fuselab.prove.held import results
from fuselab.prove.process_state import quick_thread_switches

Function = Callable[..., Any]
Results = list[Tensor | None]
Stacks = list[Tensor | None]  # one per result, of the results of several calls


def call(
    function: Function,
    places: Sequence[int] | None,
    args: Sequence[Any],
    upstream: Sequence[Tensor] | None,
) -> Results:
    """Return the results of a call, with the gradients of the tensors at ``places`` unless that is
    None."""
    if places is None:
        return [*results(function, *args)]
    return with_gradients(function, places, [*args, tuple(upstream or ())])


def in_turns(
    function: Function,
    several: Sequence[Sequence[Any]],
    turns: Sequence[int],
    places: Sequence[int] | None,
    upstream: Sequence[Tensor] | None,
    patience_s: float,
) -> dict[str, Any]:
    """Call once on each of ``several`` lists of arguments, then on that which ``turns`` names for
    each further call.

    Returns the stacked results of each list (``stacks``), how many of the turns were made within
    ``patience_s`` seconds (``made``), and whether results came and went (``uneven``).
    """
    kept = [[call(function, places, args, upstream)] for args in several]
    begin, made = time.monotonic(), 0
    for turn in turns:
        kept[turn].append(call(function, places, several[turn], upstream))
        made += 1
        if made % 64 == 0 and time.monotonic() - begin > patience_s:
            break
    stacks = [_stacked(one) for one in kept]
    return {
        "stacks": [one or [] for one in stacks],
        "made": made,
        "uneven": any(one is None for one in stacks),
    }


def _stacked(runs: Sequence[Results]) -> Stacks | None:
    """Return the results of equal calls, stacked; None where one is missing in some of them, or has
    another shape or dtype."""
    stacks: Stacks = []
    for column in zip(*runs, strict=True):
        given = [one.detach() for one in column if one is not None]
        if len(given) not in (0, len(column)) or len({(x.shape, x.dtype) for x in given}) > 1:
            return None
        stacks.append(torch.stack(given) if given else None)
    return stacks


def on_slices(
    function: Function,
    several: Sequence[Sequence[Any]],
    places: Sequence[int] | None,
    upstream: Sequence[Tensor] | None,
) -> list[Results]:
    """Return the results of a call on each of ``several`` lists of arguments, whose tensors are the
    slices of one tensor: of equal strides, in one storage, at offsets of their own."""
    columns = zip(*map(tensors_in, several), strict=True)
    bases = [torch.stack([one.detach() for one in column]) for column in columns]
    found: list[Results] = []
    for number, args in enumerate(several):
        slices = [base[number] for base in bases]
        given = call(function, places, filled(args, range(len(slices)), slices), upstream)
        found.append([None if one is None else one.detach().clone() for one in given])
    return found


def from_threads(
    function: Function,
    several: Sequence[Sequence[Any]],
    count: int,
    places: Sequence[int] | None,
    upstream: Sequence[Tensor] | None,
) -> list[Stacks | None]:
    """Call on each of ``several`` lists of arguments once alone, then ``count`` times from a thread
    for each; return the stacked results of each list, None where they came and went.

    Raises the first error of a thread.
    """
    found = [[call(function, places, args, upstream)] for args in several]
    errors: list[Exception] = []
    start = threading.Barrier(len(several))

    def work(place: int) -> None:
        try:
            start.wait()
            for _ in range(count):
                found[place].append(call(function, places, several[place], upstream))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(several))]
    with quick_thread_switches():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return [_stacked(runs) for runs in found]


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        (gc.enable if before else gc.disable)()


@contextlib.contextmanager
def _profiler() -> Iterator[None]:
    """Turn the oldest of PyTorch's profilers on, which starts in 0.1 ms: the others take 0.8 s the
    first time, and write to standard error. Each tells whoever asks that one is on."""
    with profiler_legacy.profile():
        profiler._run_on_profiler_start()
        try:
            yield
        finally:
            profiler._run_on_profiler_stop()


@contextlib.contextmanager
def _trace_function() -> Iterator[None]:
    """Trace Python's calls, as a debugger and a measure of coverage do."""
    before = sys.gettrace()
    sys.settrace(lambda *event: None)
    try:
        yield
    finally:
        sys.settrace(before)


# Every small number, those of small and of large machines, whatever this one has.
THREADS = (*range(1, 9), 12, 16, 24, 32, 64)
_MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "torch.no_grad()": torch.no_grad,
    "torch.inference_mode()": torch.inference_mode,
    "torch.enable_grad()": torch.enable_grad,
    "torch.set_default_dtype(torch.float64)": lambda: _default_dtype(torch.float64),
    "gc.disable()": _without_collector,
    "a profiler": _profiler,
    "sys.settrace": _trace_function,
    "torch.autograd.set_detect_anomaly(True)": lambda: torch.autograd.set_detect_anomaly(
        True, check_nan=False
    ),
}


def under_mode(
    function: Function, mode: str, made_in_inference: bool, args: Sequence[Any]
) -> list[Results]:
    """Return the results of two calls under a mode of PyTorch, the second of which may run a launch
    plan; with ``made_in_inference`` of arguments that were made in inference mode."""
    if made_in_inference:
        with torch.inference_mode():
            args = mapped(_made_here, args)
    found: list[Results] = []
    for _ in range(2):
        with _MODES[mode]():
            found.append([one.clone() for one in results(function, *args)])
    return found


def under_threads(
    function: Function, counts: Sequence[int], procedure: Callable[..., Any], *args: Any
) -> list[Results]:
    """Return what a procedure gives with each number of PyTorch's threads."""
    found: list[Results] = []
    for count in counts:
        with _threads(count):
            found.append(list(procedure(function, *args)))
    return found


def gradients_under_mode(
    function: Function, mode: str, places: Sequence[int], values: Sequence[Any]
) -> Results:
    """Return the outputs and gradients of a call and its backward under a mode of PyTorch."""
    with _MODES[mode]():
        return with_gradients(function, places, values)


def _made_here(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value) if 0 not in value.stride() else value.clone()

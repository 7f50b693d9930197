"""One step of a training or serving loop as a timed call: forward, or forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fuselab import structures
from fuselab.measure.interleave import Candidate, Decided, Samples, interleave
from fuselab.measure.verdict import FEWEST_ROUNDS

CALLS_PER_SYNC = 20  # enough that one cudaDeviceSynchronize (about 10 us) does not matter


def step(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parameters: Sequence[Tensor],
    *,
    backward: bool,
) -> Callable[[], Any]:
    """Return a call of ``function`` as one step of a loop makes it; the call returns the output.

    Without ``backward`` it runs the forward without gradients. With ``backward`` it also computes,
    from an upstream gradient of ones, the gradients of every argument and parameter that requires
    one.
    """
    if not backward:

        def forward() -> Any:
            with torch.no_grad():
                return function(*args, **kwargs)

        return forward
    given = [*structures.tensors((args, dict(kwargs))), *parameters]
    wanted = [value for value in given if value.requires_grad]

    def forward_and_backward() -> Any:
        output = function(*args, **kwargs)
        roots = [value for value in structures.tensors(output) if value.requires_grad]
        if roots and wanted:
            ones = [torch.ones_like(root) for root in roots]
            torch.autograd.grad(roots, wanted, ones, allow_unused=True)
        return output

    return forward_and_backward


def steady(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], Any], int]:
    """Return a call to time by the wall clock as a loop would run it, and its number of calls.

    On a GPU it makes many calls in a row and waits once, so that host and device overlap as they do
    in the loop.
    """
    if device.type != "cuda":
        return call, 1

    def many() -> None:
        for _ in range(CALLS_PER_SYNC):
            call()
        torch.cuda.synchronize(device)

    return many, CALLS_PER_SYNC


def time_steps(
    steps: Mapping[str, Callable[[], Any]],
    device: torch.device,
    budget_s: float,
    decided: Decided = lambda times: False,
) -> dict[str, Samples]:
    """Time steps by the wall clock as a loop would run them, interleaved; samples are per call.

    ``decided`` and ``budget_s`` end it as they end ``interleave``, but not before a verdict has the
    rounds that it needs.
    """
    ready = {name: steady(call, device) for name, call in steps.items()}
    timed = interleave(
        [Candidate(name, call) for name, (call, _) in ready.items()],
        torch.device("cpu"),
        cold=False,
        budget_s=budget_s,
        fewest=FEWEST_ROUNDS,
        decided=decided,
    )
    for name, (_, calls) in ready.items():
        timed[name].times_us = [us / calls for us in timed[name].times_us]
    return timed


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call, the device's work included."""
    start = perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start

"""Procedures for a candidate's process with a GPU: calls on a stream, and CUDA graphs of them.

What they measure there, such as how long a call held the host, is that process's own word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import summary
from fuselab.measure.cuda_graph import captured
from fuselab.op import tensors_in
from fuselab.prove.held import Held

_DELAY_MATMULS = 40  # products of 4096 x 4096 in float32, about 100 ms on an H200


def _delay(square: Tensor, times: int) -> None:
    """Keep the current stream busy with ``times`` matrix products."""
    for _ in range(times):
        torch.mm(square, square)


def behind_a_producer(
    held: Held, places: Sequence[int], procedure: Callable[..., Any], *args: Any
) -> dict[str, Any]:
    """Run a procedure on a stream that still waits for the values of the tensors at ``places``.

    Returns what the stream's next operation sees (``results``), what the procedure gives when the
    stream is idle (``again``), for how long it held the host and for how long the stream was busy
    (``held_ms``, ``busy_ms``), and whether it left another stream current (``leaves``).
    """
    tensors = [tensors_in(_flat(args))[place] for place in places]
    device = tensors_in(_flat(args))[0].device
    truth = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.fill_(float("nan"))
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        square = torch.zeros(4096, 4096, device=device)
        _delay(square, 2)
        # Builds everything and fills the stream's memory with NaN, so that below only launches
        # remain.
        warm = [None if value is None else value.clone() for value in procedure(held, *args)]
        del warm
        if torch.cuda.current_stream(device) != stream:
            return {"leaves": True, "results": [], "again": [], "held_ms": 0.0, "busy_ms": 0.0}
    begin = time.perf_counter()
    with torch.cuda.stream(stream):
        _delay(square, _DELAY_MATMULS)
        for tensor, values in zip(tensors, truth, strict=True):
            tensor.copy_(values)
        launched = time.perf_counter()
        found = procedure(held, *args)
        held_s = time.perf_counter() - launched
        copies = [None if value is None else value.clone() for value in found]
    torch.cuda.synchronize(device)
    busy_s = time.perf_counter() - begin
    again = procedure(held, *args)
    torch.cuda.synchronize(device)
    return {
        "leaves": False,
        "results": copies,
        "again": list(again),
        "held_ms": held_s * 1e3,
        "busy_ms": busy_s * 1e3,
    }


def _flat(args: Sequence[Any]) -> list[Any]:
    """Return the arguments of a procedure with lists of arguments taken apart, so that places
    count the arguments' tensors first."""
    flat: list[Any] = []
    for value in args:
        flat += value if isinstance(value, list) else [value]
    return flat


def replayed(
    held: Held,
    steps: Sequence[Sequence[Tensor]],
    places: Sequence[int],
    procedure: Callable[..., Any],
    *args: Any,
) -> dict[str, Any]:
    """Capture a procedure in a CUDA graph, and return what it gives after each of ``steps``, which
    writes new values into the memory of the tensors at ``places``; or why it cannot be captured."""
    tensors = [tensors_in(_flat(args))[place] for place in places]
    device = tensors_in(_flat(args))[0].device
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            procedure(held, *args)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    try:
        graph, results = captured(lambda: procedure(held, *args), device)
    except RuntimeError as error:
        return {"refused": summary(error, 200), "results": []}
    found = []
    for step in steps:
        for tensor, values in zip(tensors, step, strict=True):
            tensor.copy_(values)
        graph.replay()
        torch.cuda.synchronize(device)
        found.append([None if value is None else value.detach().clone() for value in results])
    return {"refused": None, "results": found}


def released(held: Held) -> None:
    """Give unused GPU memory back."""
    torch.cuda.empty_cache()

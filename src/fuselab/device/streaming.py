"""Kernels that only move bytes: the ceiling of a memory-bound operator of the same traffic."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from fuselab.errors import BuildError, MissingDependencyError
from fuselab.runtime.cpp_source import CppSource
from fuselab.runtime.cuda_source import CudaSource, i64

CUDA_SOURCE = CudaSource(Path(__file__).with_name("streaming.cu"))
CPP_SOURCE = CppSource(Path(__file__).with_name("streaming.cpp"))

MOST_STREAMS = 4
LINE_BYTES = {"cuda": 16, "cpu": 64}
BLOCK_THREADS = 256
CUDA_VARIANTS = tuple((words, evict) for words in (1, 2, 4) for evict in (False, True))
CUDA_EXPRESSIONS = tuple(
    f"stream<{reads}, {writes}, {words}, {str(evict).lower()}>"
    for reads, writes in ((1, 1), (2, 1), (1, 0), (0, 1))
    for words, evict in CUDA_VARIANTS
)


@dataclass(frozen=True)
class Streams:
    """Traffic as streams: ``reads`` of ``read_lines`` lines each, ``writes`` of ``write_lines``."""

    reads: int
    writes: int
    read_lines: int
    write_lines: int
    line_bytes: int

    @staticmethod
    def of(bytes_read: int, bytes_written: int, line_bytes: int) -> Streams:
        """Return the fewest streams, at most 4 each way, whose numbers have the ratio of the bytes.

        The numbers of bytes are met to within a line per stream.
        """
        if bytes_written == 0 or bytes_read == 0:
            reads, writes = min(bytes_read, 1), min(bytes_written, 1)
        else:
            ratio = Fraction(bytes_read, bytes_written).limit_denominator(MOST_STREAMS)
            reads = min(max(ratio.numerator, 1), MOST_STREAMS)
            writes = min(ratio.denominator, MOST_STREAMS)
        return Streams(
            reads,
            writes,
            ceil(bytes_read / (line_bytes * max(reads, 1))),
            ceil(bytes_written / (line_bytes * max(writes, 1))),
            line_bytes,
        )

    @property
    def bytes_moved(self) -> int:
        return self.line_bytes * (self.reads * self.read_lines + self.writes * self.write_lines)


@dataclass(frozen=True)
class Streaming:
    """One way to move the bytes: ``call()`` reads ``inputs`` and overwrites ``outputs``."""

    name: str
    call: Callable[[], object]
    inputs: Tensor
    outputs: Tensor


def variants(bytes_read: int, bytes_written: int, device: torch.device) -> list[Streaming]:
    """Return every known way to move these bytes on ``device``; all share one pair of buffers.

    Ours come first (16-byte accesses on CUDA, OpenMP with and without non-temporal stores on the
    CPU), then PyTorch's copy, add and fill if they have that traffic. Without a compiler only
    PyTorch's remain; if none of them fits, the only way is a copy of half the bytes each way.
    """
    streams = Streams.of(bytes_read, bytes_written, LINE_BYTES[device.type])
    lanes = streams.line_bytes // 4
    # One line more than needed, so that the kernels' address of a stream is never past the end.
    inputs = torch.ones(
        (streams.reads * streams.read_lines + 1) * lanes, dtype=torch.int32, device=device
    )
    outputs = torch.ones(
        (streams.writes * streams.write_lines + 1) * lanes, dtype=torch.int32, device=device
    )
    ways = [*_torch_calls(streams, inputs, outputs)]
    try:
        ours = _cuda_calls if device.type == "cuda" else _cpp_calls
        ways = [*ours(streams, inputs, outputs), *ways]
    except (BuildError, MissingDependencyError):
        if not ways:
            half = torch.ones(streams.bytes_moved // 8, dtype=torch.int32, device=device)
            target = torch.empty_like(half)
            ways = [("torch copy", partial(target.copy_, half))]
    return [Streaming(name, call, inputs, outputs) for name, call in ways]


Ways = Iterator[tuple[str, Callable[[], object]]]


def _cuda_calls(streams: Streams, inputs: Tensor, outputs: Tensor) -> Ways:
    args = (inputs, outputs, i64(streams.read_lines), i64(streams.write_lines))
    lines = max(streams.read_lines, streams.write_lines)
    for words, evict in CUDA_VARIANTS:
        expression = f"stream<{streams.reads}, {streams.writes}, {words}, {str(evict).lower()}>"
        launch = partial(
            CUDA_SOURCE.launch,
            expression,
            grid=(ceil(lines / (BLOCK_THREADS * words)), 1, 1),
            block=(BLOCK_THREADS, 1, 1),
            args=args,
        )
        launch()  # a failing build must fail here
        hint = ", evict first" if evict else ""
        yield f"stream {words} x 16 B{hint}", launch


def _cpp_calls(streams: Streams, inputs: Tensor, outputs: Tensor) -> Ways:
    args = (inputs, outputs, i64(streams.read_lines), i64(streams.write_lines))
    can_bypass_cache = platform.machine() == "x86_64" and streams.writes > 0
    for non_temporal in (False, True) if can_bypass_cache else (False,):
        expression = f"stream<{streams.reads}, {streams.writes}, {str(non_temporal).lower()}>"
        launch = partial(CPP_SOURCE.launch, expression, args=args)
        launch()
        yield f"stream{', non-temporal' if non_temporal else ''}", launch


def _torch_calls(streams: Streams, inputs: Tensor, outputs: Tensor) -> Ways:
    lanes = streams.line_bytes // 4
    read, write = streams.read_lines * lanes, streams.write_lines * lanes
    mix = streams.reads, streams.writes
    if mix == (1, 1) and read == write:
        yield "torch copy", partial(outputs[:write].copy_, inputs[:read])
    elif mix == (2, 1) and read == write:
        first, second = inputs[:read], inputs[read : 2 * read]
        yield "torch add", partial(torch.add, first, second, out=outputs[:write])
    elif mix == (0, 1):
        yield "torch fill", partial(outputs[:write].fill_, 1)

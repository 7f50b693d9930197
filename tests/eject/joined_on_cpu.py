"""Run a package's Triton kernels, interpreted, as a GPU with many multiprocessors would: rows are
shared by several programs, and a launch joins what each sweep leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from fuselab.prove.load import load_op
from fuselab.runtime import gpu_limits, triton_sweep


@contextlib.contextmanager
def _joining() -> Iterator[mock.Mock]:
    """Let every kernel join that can, and yield the mock that its launches go through."""
    with (
        mock.patch.object(gpu_limits, "multiprocessors", lambda device: 132),
        mock.patch.object(triton_sweep, "MOST_READ_BYTES", 0),
        mock.patch.object(triton_sweep, "launch", wraps=triton_sweep.launch) as launch,
    ):
        yield launch


def gradients(folder: str, upstream: Tensor, *args: Tensor) -> tuple[Any, Any, list[int]]:
    """Return the output, the gradients, and the number of each launch that is of one sweep."""
    op = load_op(folder)
    triton = op.implementations["triton"]
    with _joining() as launch:
        output = triton.forward(*args)
        saved = op.gradient.save(output, *args)
        grads = triton.backward((True,) * len(args), upstream, *saved)
    sweeps = [call.kwargs.get("SWEEP", 0) for call in launch.call_args_list]
    return output, grads, [sweep for sweep in sweeps if sweep]

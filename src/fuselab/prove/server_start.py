"""Starts the process that workers fork from, without the CUDA driver.

A process that has counted its GPUs through the CUDA driver cannot use them in a process that is
forked from it, and importing torch's compiler counts them (``torch._inductor.runtime.benchmarking``
of torch 2.11). So whoever starts this says how many there are, and the driver is not asked until
all is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_COUNT = "_cuda_getDeviceCount"  # not there in a build of torch without CUDA


@contextmanager
def driver_not_asked(gpus: int) -> Iterator[None]:
    """Let torch take ``gpus`` for the number of GPUs, without asking the driver."""
    count: Callable[[], int] | None = getattr(torch._C, _COUNT, None)
    if count is None:
        yield
        return
    setattr(torch._C, _COUNT, lambda: gpus)
    try:
        yield
    finally:
        setattr(torch._C, _COUNT, count)


def main(descriptor: int, gpus: int) -> None:
    """Serve on the control socket with this descriptor."""
    with driver_not_asked(gpus):
        from fuselab.prove import worker_server

    worker_server.main(descriptor)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

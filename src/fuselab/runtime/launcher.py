"""The one host path to a kernel: every launch goes through here, and so do launch plans."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fuselab.errors import LaunchError
from fuselab.runtime import cuda_driver

_SCALARS = {
    "i": ctypes.c_int32,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


def launch_cuda(
    function: int,
    device_index: int,
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    codes: str,
    values: Sequence[Any],
) -> None:
    """Launch a CUfunction on the device's current stream. Raises LaunchError."""
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    cuda_driver.launch(function, device_index, stream, grid, block, shared_bytes, codes, values)


def launch_cpu(entry: int, codes: str, values: Sequence[Any]) -> None:
    """Call ``const char* entry(void** arguments)``. Raises LaunchError with the kernel's text."""
    torch.get_num_threads()  # sets OpenMP's thread count in a thread that has not used torch yet
    held: list[Any] = []
    for code, value in zip(codes, values, strict=True):
        if code == "t":
            held.append(ctypes.c_void_p(value.data_ptr()))
        elif code == "n":
            held.append(ctypes.c_void_p(0))
        else:
            held.append(_SCALARS[code](value))
    pointers = (ctypes.c_void_p * max(1, len(held)))(*(ctypes.addressof(item) for item in held))
    kernel = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(entry)
    if message := kernel(pointers):
        raise LaunchError(f"a CPU kernel failed: {message.decode()}.")


def register(name: str) -> int:
    """An id for the operator ``name``, for ``lookup`` and ``recording``."""
    return 0


def lookup(op_id: int, implementation: str, args: tuple[Any, ...]) -> Any:
    """The operator's output from a kept plan, or None when there is none for these arguments."""
    return None


class Recording:
    """What an implementation launches for one set of arguments."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args

    def finish(self, outputs: Any) -> None:
        """The implementation returned ``outputs``: keep a plan, if it can be one."""


@contextmanager
def recording(op_id: int, implementation: str, args: tuple[Any, ...]) -> Iterator[Recording]:
    """Watch the launches of an implementation; ``finish`` keeps the plan."""
    yield Recording(args)

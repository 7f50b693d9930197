"""A run's memory: freed memory stays with the process, and too little memory is one clear error."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from fuselab.errors import DeviceError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Make this process keep freed memory from here on.

    glibc maps tensors above 128 KiB afresh, and the page faults of a step on the CPU take longer
    than its arithmetic. ``fuselab.measure.fresh`` does the same for child processes.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGEST)


@contextlib.contextmanager
def enough_memory(less: str) -> Iterator[None]:
    """Raise DeviceError if the block's tensors do not fit; ``less`` says what needs less memory."""
    try:
        yield
    except RuntimeError as error:  # the CPU allocator's error has no class of its own
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise DeviceError(f"this takes more memory than there is; {less}.") from error

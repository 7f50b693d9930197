"""A run's memory: what is freed stays with the process, and too little is one sentence."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from fuselab.errors import DeviceError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """From here on. glibc maps tensors above 128 KiB afresh, and the page faults of a step on the
    CPU take longer than its arithmetic: see ``fuselab.measure.fresh``, which does the same to child
    processes."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGEST)


@contextlib.contextmanager
def enough_memory(less: str) -> Iterator[None]:
    """Raises DeviceError where the block's tensors do not fit; ``less`` says what takes less."""
    try:
        yield
    except RuntimeError as error:  # a CPU's has no class of its own
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise DeviceError(f"this takes more memory than there is; {less}.") from error

"""Freed memory stays with the process, where the C library can be told so."""

from __future__ import annotations

import contextlib
import ctypes

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

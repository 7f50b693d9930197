"""Compiled code (``loading.cpp``) that reads rows and orders windows in one call, without the GIL.

In numpy either task is dozens of short operations, and a dozen threads that need the GIL for each
of them wait for each other: on an H200's 16 cores a loader gave 51 million rows a second in numpy
and 91 million compiled. Without a C++ compiler the numpy code runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from fuselab.errors import BuildError
from fuselab.runtime.cpp_source import CppSource, i32, i64

SOURCE = CppSource(Path(__file__).with_name("loading.cpp"))
NONE, ENDS_EARLY, ERRNO, WRONG_ROW = range(4)  # Problem in loading.cpp


@functools.cache
def compiled() -> bool:
    """Return whether there is compiled code; the first call builds it, or finds it on disk."""
    try:
        SOURCE.prebuild(("read_rows", "order_rows"))
    except BuildError:
        return False
    return True


def read_rows(file: int, offset: int, out: Any, largest: Any) -> tuple[int, int]:
    """Fill ``out``, records [n], from byte ``offset`` on of an open file.

    Returns the problem, and errno if that is ERRNO. WRONG_ROW means that all rows were read, but a
    word is above its bound in ``largest``, uint32 [40], or a label is not 0 or 1.
    """
    found = numpy.zeros(2, numpy.int64)
    args = (i32(file), i64(offset), i64(len(out)), _words(out), _words(largest))
    SOURCE.launch("read_rows", (*args, torch.from_numpy(found)))
    return int(found[0]), int(found[1])


def order_rows(rows: int, bits: int, secrets: Any) -> Any:
    """Return the order of ``shuffle.permutation``, int32 [rows]; ``secrets`` is uint32 [2 *
    rounds]."""
    order = numpy.empty(rows, numpy.int32)
    words = _words(secrets)
    args: Sequence[Any] = (i64(rows), i32(bits), words, i32(len(secrets) // 2), _words(order))
    SOURCE.launch("order_rows", args)
    return order


def _words(array: Any) -> Tensor:
    return torch.from_numpy(array.view(numpy.int32))

"""Reading rows and ordering windows as compiled code (``loading.cpp``): one call, no Python lock.

In numpy either is dozens of short operations, and a dozen threads that want Python's lock for each
of them wait for each other: on an H200's 16 cores a loader gave 51 million rows a second where the
same reads alone made 148; compiled it gives 91 of 167. Without a C++ compiler numpy it is.
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
NONE, ENDS_EARLY, ERRNO, WRONG_ROW = range(4)  # loading.cpp: Problem


@functools.cache
def compiled() -> bool:
    """Whether there is compiled code; the first call builds it, or finds it on disk."""
    try:
        SOURCE.prebuild(("read_rows", "order_rows"))
    except BuildError:
        return False
    return True


def read_rows(file: int, offset: int, out: Any, largest: Any) -> tuple[int, int]:
    """Fills ``out``, records [n], from ``offset`` bytes on of an open file. What went wrong, and
    errno where that is ERRNO; WRONG_ROW: a word above its ``largest``, uint32 [40], or a label
    that is not 0 or 1, and all rows are read."""
    found = numpy.zeros(2, numpy.int64)
    args = (i32(file), i64(offset), i64(len(out)), _words(out), _words(largest))
    SOURCE.launch("read_rows", (*args, torch.from_numpy(found)))
    return int(found[0]), int(found[1])


def order_rows(rows: int, bits: int, secrets: Any) -> Any:
    """``shuffle.permutation``'s order, int32 [rows]; ``secrets`` uint32 [2 * rounds]."""
    order = numpy.empty(rows, numpy.int32)
    words = _words(secrets)
    args: Sequence[Any] = (i64(rows), i32(bits), words, i32(len(secrets) // 2), _words(order))
    SOURCE.launch("order_rows", args)
    return order


def _words(array: Any) -> Tensor:
    return torch.from_numpy(array.view(numpy.int32))

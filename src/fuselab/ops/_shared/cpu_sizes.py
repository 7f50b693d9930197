"""Sizes at which operators are timed on a CPU, to decide what ``auto`` takes there.

Every operator with a C++ kernel gives twelve ``row`` cases from 64 kB to 200 MB, odd widths among
them, and smaller ones in every dtype for each of its regimes.
"""

from __future__ import annotations

# (rows, columns) of float32, whose input and output are together 64 kB to 200 MB.
MATRICES = (
    (64, 128),
    (127, 257),
    (256, 1024),
    (1000, 367),
    (65536, 10),
    (512, 4096),
    (2048, 1025),
    (4096, 1024),
    (65536, 64),
    (16384, 511),
    (8192, 1500),
    (24000, 1001),
)
# From a call that is all overhead to one that is not.
EVERY_DTYPE = ((4, 4), (33, 64), (129, 255), (1024, 1023), (4096, 1536))
ROW = frozenset({"row"})
DTYPES = frozenset({"dtypes"})

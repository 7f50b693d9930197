"""Sizes at which operators are timed on a CPU, to decide what ``auto`` takes there.

Every operator with a C++ kernel has twelve cases tagged ``row``, from 64 kB to 200 MB and with odd
widths among them, and smaller cases in every dtype (tagged ``dtypes``) for each of its code paths.
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
# From a call whose time is all overhead to one whose time is all arithmetic and memory.
EVERY_DTYPE = ((4, 4), (33, 64), (129, 255), (1024, 1023), (4096, 1536))
ROW = frozenset({"row"})
DTYPES = frozenset({"dtypes"})

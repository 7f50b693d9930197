"""A keyed permutation of n rows as pure arithmetic: the same on every machine, nothing to store.

``Generator.permutation`` may change with numpy's version, and a run resumed by another one would
see other rows. It also takes several times as long (this code takes 2 ms of one core for a million
rows). Each round multiplies by an odd number, adds, and xors the upper bits into the lower, all
modulo 2^k, so each can be undone and the whole is one-to-one. A result of n or above is permuted
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import numpy.typing

from fuselab.data import loading
from fuselab.errors import ArgumentError

_ROUNDS = 4
_PIECE = 32_768  # words per pass; two arrays of them stay in the first two caches
Words = numpy.typing.NDArray[numpy.uint32]


def permutation(rows: int, key: Sequence[int]) -> numpy.typing.NDArray[numpy.int32]:
    """Return the numbers 0 to ``rows`` - 1, each once, in an order that ``key`` decides.

    The result is int32. ``key`` is any sequence of integers from 0 up (seed, epoch, window). Raises
    ArgumentError from 2^31 rows.
    """
    return permutations([rows], key)[0]


def permutations(
    rows: Sequence[int], key: Sequence[int]
) -> list[numpy.typing.NDArray[numpy.int32]]:
    """Return a permutation of each of these numbers of rows, all different; ``key`` decides them.

    Raises ArgumentError from 2^31 rows.
    """
    if max(rows, default=0) >= 2**31:
        raise ArgumentError(f"a shuffle window of {max(rows)} rows; expected fewer than 2^31.")
    # A seed sequence promises the same words in every version of numpy.
    words = numpy.random.SeedSequence(key).generate_state(2 * _ROUNDS * len(rows), numpy.uint32)
    return [
        _permutation(count, secrets)
        for count, secrets in zip(rows, words.reshape(len(rows), -1), strict=True)
    ]


def _permutation(
    rows: int, secrets: numpy.typing.NDArray[Any]
) -> numpy.typing.NDArray[numpy.int32]:
    if rows == 0:
        return numpy.empty(0, numpy.int32)
    bits = max(1, (rows - 1).bit_length())
    if loading.compiled():
        ordered: numpy.typing.NDArray[numpy.int32] = loading.order_rows(rows, bits, secrets)
        return ordered
    order = numpy.arange(rows, dtype=numpy.uint32)
    for start in range(0, rows, _PIECE):
        piece = order[start : start + _PIECE]
        _scramble(piece, bits, secrets)
        outside = numpy.flatnonzero(piece >= rows)
        while len(outside):
            again = piece[outside]
            _scramble(again, bits, secrets)
            piece[outside] = again
            outside = outside[again >= rows]
    return order.view(numpy.int32)


def _scramble(words: Words, bits: int, secrets: numpy.typing.NDArray[Any]) -> None:
    """Permute the numbers in [0, 2^bits), in place."""
    mask, half = numpy.uint32((1 << bits) - 1), numpy.uint32((bits + 1) // 2)
    upper = numpy.empty_like(words)
    for factor, addend in secrets.reshape(-1, 2):
        words *= factor | numpy.uint32(1)
        words += addend
        words &= mask
        numpy.right_shift(words, half, out=upper)
        words ^= upper

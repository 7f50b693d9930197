"""The masks of dropouts in Triton kernels, which are those of ``dropout.dropout_mask``."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept(seed, position, number: tl.constexpr, last_dropped: tl.constexpr):
    """Return whether the elements at ``position`` are kept by the dropout ``number`` of a seed: by
    the words of Philox-4x32-10 that are above ``last_dropped``. Four elements in a row have the
    words of one counter."""
    group = (position >> 2).to(tl.uint32)
    high = (position.to(tl.int64) >> 34).to(tl.uint32)
    third = tl.full((), number, tl.uint32)
    fourth = tl.full((), 0, tl.uint32)
    first_word, second_word, third_word, fourth_word = tl.philox(seed, group, high, third, fourth)
    is_odd = (position & 1) == 1
    lower = tl.where(is_odd, second_word, first_word)
    upper = tl.where(is_odd, fourth_word, third_word)
    word = tl.where((position & 2) == 2, upper, lower)
    return word.to(tl.int64) > last_dropped

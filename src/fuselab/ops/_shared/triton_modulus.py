"""Python's modulus of ids, for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def modulus(ids, cardinalities):
    """In [0, cardinality): the remainder has the sign of the id, as in C."""
    remainders = ids % cardinalities
    return tl.where(remainders < 0, remainders + cardinalities, remainders)

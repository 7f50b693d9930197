"""Python's modulus of ids, for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def modulus(ids, cardinalities):
    """Return ids mod cardinalities, in [0, cardinality). ``%`` alone has the sign of the id, as in
    C."""
    remainders = ids % cardinalities
    return tl.where(remainders < 0, remainders + cardinalities, remainders)

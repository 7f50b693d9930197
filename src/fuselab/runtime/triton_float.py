"""The value of an operator's float argument inside a Triton kernel."""

import triton
import triton.language as tl


@triton.jit
def float_value(pointer, number, DTYPE: tl.constexpr):
    """Return the float in ``DTYPE``, given as the two arguments that ``triton_float`` makes: loaded
    from ``pointer`` or, where that is None, ``number``."""
    if pointer is not None:
        return tl.load(pointer).to(DTYPE)
    else:
        return tl.full((), number, DTYPE)

"""act(input + bias) in Triton: the kernels of add_mul_activation with ``update`` None, which Triton
leaves out of what it compiles."""

from fuselab.ops.add_mul_activation.triton_kernels import (
    backward,
    backward_strided,
    backward_with_bias,
    column_sums,
    forward,
    forward_strided,
)

__all__ = [
    "backward",
    "backward_strided",
    "backward_with_bias",
    "column_sums",
    "forward",
    "forward_strided",
]

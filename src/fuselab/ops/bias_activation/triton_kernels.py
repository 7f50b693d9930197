"""act(input + bias) in Triton: the kernels of add_mul_activation, compiled with ``update`` None."""

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

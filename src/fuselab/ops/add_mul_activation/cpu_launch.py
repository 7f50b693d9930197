"""Launchers of the C++ kernels of act(input + scale * update + bias).

Every launcher takes the kernels' source as its first argument, so that each package passes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fuselab.ops._shared.dtypes import cpp_types
from fuselab.ops._shared.layout import Nest
from fuselab.ops._shared.template_arguments import cpp_float, numbers
from fuselab.ops.add_mul_activation.layout import (
    Gradients,
    Matrices,
    Operands,
    Saved,
    backward_dtypes,
    backward_kind,
    forward_dtypes,
    kind_of,
    run_backward,
    run_forward,
)
from fuselab.runtime.cpp_source import CppSource


def forward(source: CppSource, *args: Any, output: Tensor | None = None) -> Tensor:
    """Compute the output by one launch of ``forward`` in cpu_kernels.cpp."""

    def launch(
        loops: Nest, operands: Operands, scale: float | Tensor, activation: str, output: Tensor
    ) -> None:
        loops = loops.padded()
        shape = numbers(loops.sizes, *loops.strides)
        types = cpp_types(forward_dtypes(output, operands))
        source.launch(
            f"forward<{kind_of(activation, *operands[1:])}, {types}>",
            args=(*operands, output, cpp_float(scale, output.dtype), *shape),
        )

    return run_forward(launch, output, *args)


def backward(
    source: CppSource, needs: Sequence[bool], grad_output: Tensor, saved: Saved
) -> Gradients:
    """Compute the gradients by one launch: of ``backward``, or of ``backward_with_bias`` if the
    bias's gradient is needed.

    The workspace of ``backward_with_bias`` is float64: one row, and up to 64 partial rows (one
    fewer for every 1024 columns). It writes row-major gradients, so a gradient with other strides
    is copied once more, and an operand whose rows have no common stride is copied first.
    """
    kind = f"{backward_kind(saved)}, {cpp_types(backward_dtypes(grad_output, saved))}"
    scale = cpp_float(saved.scale, grad_output.dtype)

    def elementwise(loops: Nest, operands: Operands, grads: Gradients) -> None:
        loops = loops.padded()
        shape = numbers(loops.sizes, *loops.strides)
        source.launch(f"backward<{kind}>", args=(*operands, *grads[:2], scale, *shape))

    def with_bias(matrices: Matrices) -> None:
        source.launch(
            f"backward_with_bias<{kind}>",
            args=(
                *matrices.operands,
                saved.bias,
                *matrices.written,
                scale,
                *numbers((matrices.rows, matrices.columns), matrices.strides),
            ),
        )

    return run_backward(needs, grad_output, saved, elementwise, with_bias)

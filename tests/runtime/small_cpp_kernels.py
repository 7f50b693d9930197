"""Functions of the tests that launch the C++ kernels of ``kernels.cpp``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fuselab.runtime.cpp_source import CppSource, f32, i64

SOURCE = CppSource(Path(__file__).with_name("kernels.cpp"))


def scaled_relu(value: Tensor, scale: float, name: str = "relu") -> Tensor:
    output = torch.empty_like(value)
    args = (value, output, i64(value.numel()), f32(scale))
    SOURCE.launch("scaled_relu<float, float>", args)
    return output


def add(left: Tensor, right: Tensor) -> Tensor:
    output = torch.empty_like(left)
    SOURCE.launch("add<float>", (left, right, output, i64(left.numel())))
    return output


def mul_backward(
    needs: tuple[bool, bool], grad: Tensor, left: Tensor, right: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    grads = tuple(torch.empty_like(grad) if need else None for need in needs)
    SOURCE.launch("mul_backward<float>", (grad, left, right, *grads, i64(grad.numel())))
    return grads  # type: ignore[return-value]


# Several launches, and workspaces between them.


def in_a_workspace(value: Tensor, scale: float) -> Tensor:
    """2 relu(scale value), by way of a workspace twice as large as need be."""
    workspace = torch.empty(2 * value.numel()).view(2, -1)[1]
    args = (value, workspace, i64(value.numel()), f32(scale))
    SOURCE.launch("scaled_relu<float, float>", args)
    output = torch.empty_like(value)
    SOURCE.launch("add<float>", (workspace, workspace, output, i64(value.numel())))
    return output

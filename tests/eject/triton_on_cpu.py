"""Compile the launches of Triton kernels for an H100, and run elementary functions interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fuselab.runtime import gpu_limits, triton_math, triton_sweep

_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Launch:
    """A launch that a package would make: the kernel, the grid, and what it is called with."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def compiled(self) -> Any:
        """Return Triton's CompiledKernel for sm_90."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature: dict[str, Any] = {}
        constants: dict[Any, Any] = {}
        attributes: dict[Any, Any] = {}

        def kind(value: Any, path: tuple[int, ...]) -> Any:
            if isinstance(value, tuple):
                return tuple(kind(item, (*path, place)) for place, item in enumerate(value))
            if isinstance(value, Tensor):
                attributes[path] = _ALIGNED
                return _TYPES[value.dtype]
            if isinstance(value, int) and not isinstance(value, bool) and value != 1:
                if value % 16 == 0:
                    attributes[path] = _ALIGNED
                return "i32" if -(2**31) <= value < 2**31 else "i64"
            constants[path] = value
            return "constexpr"

        options = {name: self.keywords[name] for name in ("num_warps",)}
        named = {name: value for name, value in self.keywords.items() if name not in options}
        for place, name in enumerate(self.kernel.arg_names):
            if place < len(self.args):
                signature[name] = kind(self.args[place], (place,))
            else:
                signature[name] = "constexpr"
                constants[place,] = named[name]
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def launches(
    monkeypatch: pytest.MonkeyPatch, op: ModuleType, args: Sequence[Tensor], backward: bool = False
) -> list[Launch]:
    """Return the launches of a package's forward, or of its backward, for tensors like ``args``
    on a GPU with 132 multiprocessors."""
    found: list[Launch] = []

    def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **keywords: Any) -> None:
        found.append(Launch(kernel, grid, given, keywords))

    monkeypatch.setattr(triton_sweep, "launch", launch)
    monkeypatch.setattr(gpu_limits, "multiprocessors", lambda device: 132)
    on_meta = [arg.to("meta") for arg in args]
    forward: Callable[..., Tensor] = op.forward_triton
    output = forward(*on_meta)
    if not backward:
        return found
    found.clear()
    saved = op.OP.gradient.save(output, *on_meta)
    upstream = torch.empty_like(op.OP.without_residuals(output))
    op.backward_triton((True,) * len(args), upstream, *saved)
    return found


# The functions of ``triton_math.py``, each with PyTorch's.
MATH: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": torch.erf,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@triton.jit
def _apply(x_pointer, output_pointer, numel, function: tl.constexpr, ROUNDED: tl.constexpr):
    element = tl.arange(0, 8192)
    x = tl.load(x_pointer + element, element < numel, 1.0)
    tl.store(output_pointer + element, function(x, ROUNDED), element < numel)


def elementary(name: str, x: Tensor, rounded: bool) -> Tensor:
    """Return a function of ``triton_math.py`` at up to 8192 values; runs interpreted."""
    output = torch.empty_like(x)
    _apply[(1,)](x, output, x.numel(), getattr(triton_math, name), rounded)
    return output

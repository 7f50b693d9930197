"""Operators at shapes that no launch rule was tuned on: `auto` beside eager and torch.compile.

    python benchmarks/untuned_shapes.py --json untuned_shapes.json

The shapes are those at which a survey found `auto` slower than its peers, and their neighbours: odd
widths, few rows, activations in 16 bits, a depth that is no multiple of 8. Each line is a call, in
microseconds of device time (CUDA graphs, cold L2, medians), forward and forward+backward. Needs a
CUDA device; takes three minutes, or half of that with ``--dtype bfloat16``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fuselab
from fuselab import ops
from fuselab.device.environment import describe

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
BIASED = (
    *(((8192, 11008), "silu"), ((4096, 4096), "sigmoid"), ((16384, 3072), "gelu")),
    *(((5000, 4097), "gelu_tanh"), ((3000, 1000), "tanh"), ((8192, 4096), "relu")),
    *(((3_691_819,), "relu"), ((4, 500_000), "relu"), ((16, 100_000), "silu")),
)
SOFTMAX = (
    *((100_000, 7), (65_536, 33), (32_768, 257), (16_384, 1023)),
    *((4096, 10_007), (1024, 50_257), (4096, 1002), (512, 128_256)),
)
LINEAR = (
    *((50_000, 367, 512, "relu"), (32_768, 768, 3072, "gelu"), (65_536, 512, 256, "relu")),
    *((8192, 4096, 11_008, "silu"), (4096, 1000, 1000, "gelu")),
)
# A call: its name, ours, the plain form of it, and the tensors, all of which get a gradient.
Work = tuple[str, Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]


def calls(dtypes: Sequence[torch.dtype]) -> Iterator[Work]:
    """Yield every call; products are in bfloat16 alone."""
    for dtype in dtypes:
        for shape, name in BIASED:
            yield biased(shape, name, dtype)
        for rows, width in SOFTMAX:
            label = f"softmax {rows}x{width} {dtype}"
            yield label, ops.softmax, lambda x: torch.softmax(x, -1), (normal(rows, width, dtype),)
    for rows, depth, columns, name in LINEAR:
        yield linear(rows, depth, columns, name)


def biased(shape: tuple[int, ...], name: str, dtype: torch.dtype) -> Work:
    """Return a call of ``bias_activation``."""
    act = ACTIVATIONS[name]
    tensors = normal(*shape, dtype), normal(shape[-1], dtype)

    def ours(x: Tensor, bias: Tensor) -> Tensor:
        return ops.bias_activation(x, bias, name)

    def plain(x: Tensor, bias: Tensor) -> Tensor:
        return act(x + bias)

    return f"bias_activation {'x'.join(map(str, shape))} {name} {dtype}", ours, plain, tensors


def linear(rows: int, depth: int, columns: int, name: str) -> Work:
    """Return a call of ``linear_activation`` in bfloat16."""
    act, dtype = ACTIVATIONS[name], torch.bfloat16
    tensors = normal(rows, depth, dtype), normal(columns, depth, dtype), normal(columns, dtype)

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.linear_activation(x, weight, bias, name)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return act(F.linear(x, weight, bias))

    return f"linear_activation {rows}x{depth}->{columns} {name} {dtype}", ours, plain, tensors


def normal(*shape_and_dtype: Any) -> Tensor:
    """Return normal numbers of a shape, the last argument being the dtype."""
    *shape, dtype = shape_and_dtype
    return torch.randn(shape, device="cuda", dtype=dtype)


def measured(work: Work, budget_s: float) -> dict[str, Any]:
    """Time one call by all providers."""
    label, ours, plain, tensors = work
    torch._dynamo.reset()
    compiled = torch.compile(plain, dynamic=False)
    row: dict[str, Any] = {"call": label}
    upstream = torch.ones_like(plain(*tensors))
    leaves = [tensor.requires_grad_() for tensor in tensors]
    for provider, function in (("eager", plain), ("compile", compiled), ("auto", ours)):

        def forward(function: Callable[..., Tensor] = function) -> Tensor:
            with torch.no_grad():
                return function(*leaves)

        def step(function: Callable[..., Tensor] = function) -> Any:
            return torch.autograd.grad(function(*leaves), leaves, upstream)

        for phase, call in (("forward", forward), ("forward+backward", step)):
            call()  # compiles
            timing = fuselab.time(call, device="cuda", graph=True, budget_s=budget_s)
            row.setdefault(phase, {})[provider] = round(timing.median_us, 1)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="F")
    parser.add_argument("--budget", type=float, default=0.1, metavar="S", help="a timing's seconds")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="this one alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("untuned_shapes.py: needs a CUDA device.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    rows = []
    names = (options.dtype,) if options.dtype else ("bfloat16", "float32")
    for work in calls([getattr(torch, name) for name in names]):
        rows.append(measured(work, options.budget))
        print(json.dumps(rows[-1]), flush=True)
        result = {"environment": describe(torch.device("cuda", 0)), "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

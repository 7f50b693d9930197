"""Small calls of every implementation of an operator, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck --error-exitcode 3 python tools/sanitize.py softmax
    compute-sanitizer --tool racecheck --error-exitcode 3 python tools/sanitize.py softmax

Runs the boundary cases of the operators named (all of the library without a name), forward and
backward, on the first GPU. Allocations bypass PyTorch's cache, so that each tensor has bounds of
its own.
"""

from __future__ import annotations

import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from torch import Tensor

import fuselab
from fuselab.ops import contract, packages
from fuselab.runtime import fallback
from fuselab.runtime.dispatch import why_not

MOST_ELEMENTS = 1 << 20  # of an input: the sanitizers slow a kernel down a hundred times


def run(name: str) -> int:
    """Call every CUDA implementation of ``name`` on its boundary cases; returns how many calls."""
    op = contract(name)
    public = fuselab.operator(op)
    device = torch.device("cuda", 0)
    calls = 0
    for case in op.cases:
        if "boundary" not in case.tags or "huge" in case.tags:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            inputs = case.make(device, dtype, torch.Generator().manual_seed(0))
            args = op.bind(inputs)
            tensors = [value for value in args if isinstance(value, Tensor)]
            if any(value.numel() > MOST_ELEMENTS for value in tensors):
                continue
            for implementation, declared in op.implementations.items():
                if declared.device != "cuda" or why_not(op, implementation, args) is not None:
                    continue
                leaves = [
                    value.detach().requires_grad_() if isinstance(value, Tensor) else value
                    for value in args
                ]
                output = public(*leaves, implementation=implementation)
                output.backward(torch.ones_like(output))
                calls += 1
    torch.cuda.synchronize()
    return calls


def main() -> None:
    with fallback.strict():
        for name in sys.argv[1:] or packages():
            print(f"{name}: {run(name)} calls, forward and backward")


if __name__ == "__main__":
    main()

"""Small calls of every CUDA implementation of an operator, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck --error-exitcode 3 python tools/sanitize.py softmax
    compute-sanitizer --tool racecheck --error-exitcode 3 python tools/sanitize.py softmax
    compute-sanitizer --tool initcheck --error-exitcode 3 python tools/sanitize.py softmax

Runs the boundary cases of the operators named (all of the library without a name), forward and
backward, on the first GPU. Allocations bypass PyTorch's cache, so that each tensor has bounds of
its own.
"""

from __future__ import annotations

import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from fuselab import ops
from fuselab.op import tensors_in
from fuselab.prove.subject import Subject
from fuselab.prove.trials import with_gradients
from fuselab.runtime import fallback

MOST_ELEMENTS = 1 << 20  # of a tensor: the sanitizers slow a kernel down a hundred times
DTYPES = (torch.float32, torch.bfloat16)


def run(name: str) -> int:
    """Call every CUDA implementation of ``name`` on its boundary cases; returns how many calls."""
    op = ops.contract(name)
    device = torch.device("cuda", 0)
    calls = 0
    for implementation, declared in op.implementations.items():
        if declared.device != "cuda":
            continue
        for dtype in (dtype for dtype in op.dtypes if dtype in DTYPES):
            subject = Subject(op, implementation, device, dtype, quick=True)
            for case in subject.small_cases():
                trial = subject.from_case("sanitize", case)
                if trial is None or any(
                    tensor.numel() > MOST_ELEMENTS for tensor in tensors_in(trial.args)
                ):
                    continue
                places = subject.differentiable(trial.args)
                if op.gradient is None or not places:
                    subject.results(*trial.args)
                else:
                    upstream = torch.ones_like(op.reference(*trial.args))
                    with_gradients(subject.call, places, [*trial.args, upstream])
                calls += 1
    torch.cuda.synchronize()
    return calls


def main() -> None:
    with fallback.strict():
        for name in sys.argv[1:] or ops.operators():
            print(f"{name}: {run(name)} calls")


if __name__ == "__main__":
    main()

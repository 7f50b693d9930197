"""The child process that ncu watches: one step of a TARGET between the marks that turn it on.

    python -m fuselab.inspect.ncu_runner TARGET DEVICE DATA BACKWARD

DATA and BACKWARD may be empty.
"""

from __future__ import annotations

import sys

import torch

from fuselab.inspect import targets
from fuselab.inspect.profile import target_step

WARM_UP = 3  # steps in which libraries choose kernels and Triton compiles


def main(spec: str, device: str, data: str, backward: str) -> None:
    """Run the step unwatched, then once watched."""
    step = target_step(targets.load(spec, device, data or None), bool(backward))
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    step()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

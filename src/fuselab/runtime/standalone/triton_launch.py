"""Launches of Triton kernels, by Triton's own launcher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuselab.errors import BuildError


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, **constexprs: Any
) -> None:
    """Launch a ``@triton.jit`` kernel on the current stream of the tensors' device. An empty grid
    launches nothing. Raises BuildError if the kernel does not compile."""
    if 0 in grid:
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if device.type != "cuda":  # under the Triton interpreter
        kernel[grid](*args, num_warps=num_warps, **constexprs)
        return
    with torch.cuda.device(device):
        try:
            kernel[grid](*args, num_warps=num_warps, **constexprs)
        except (TypeError, KeyError):
            raise  # a wrong call
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = lines[-1] if lines else type(error).__name__
            raise BuildError(
                f"the Triton kernel {kernel.__name__} does not build: {reason}", log=str(error)
            ) from error

"""Launching Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int | None = None,
    **constexprs: Any,
) -> None:
    """Launch a ``@triton.jit`` kernel on the current stream of the tensors' device."""
    options: dict[str, Any] = {"num_warps": num_warps}
    if num_stages is not None:
        options["num_stages"] = num_stages
    plain = tuple(float(arg) if isinstance(arg, float) else arg for arg in args)
    device = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
    if device is None or device.type != "cuda":
        kernel[grid](*plain, **options, **constexprs)
        return
    with torch.cuda.device(device):
        kernel[grid](*plain, **options, **constexprs)

"""The one host path to a kernel: every launch of ours goes through here, in C++ or by ctypes."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from fuselab.runtime import cuda_driver, launch_plans, launch_recording
from fuselab.runtime.cpp_library import raise_kernel_error


def launch_cuda(
    function: int,
    device_index: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    codes: str,
    values: list[Any],
) -> None:
    """Launch a CUfunction on the device's current stream. ``codes`` and ``values`` are those of
    ``parameters.encode``. Raises LaunchError."""
    described = (True, function, device_index, grid, block, shared_bytes)
    if launch_recording.thread.recording is not None:
        launch_recording.thread.recording.note(described, codes, values)
    if launch_plans.native is not None:
        launch_plans.native.launch(described, codes, values)
        return
    stream = launch_recording.raw_stream(device_index)
    cuda_driver.launch(function, device_index, stream, grid, block, shared_bytes, codes, values)


def launch_cpu(entry: int, codes: str, values: list[Any]) -> None:
    """Call ``const char* entry(void** arguments)``. Raises LaunchError with the kernel's text."""
    described = (False, entry, 0, (1, 1, 1), (1, 1, 1), 0)
    if launch_recording.thread.recording is not None:
        launch_recording.thread.recording.note(described, codes, values)
    if launch_plans.native is not None:
        launch_plans.native.launch(described, codes, values)
        return
    torch.get_num_threads()  # sets OpenMP's thread count in a thread that has not used torch yet
    held, pointers = cuda_driver.packed(codes, values)
    kernel = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(entry)
    message = kernel(pointers)
    del held
    if message:
        raise_kernel_error(message.decode())

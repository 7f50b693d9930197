"""A GPU that is not there: launchers run for it on fake tensors, and launches are handed on.

``torch.device("cuda", 90)`` stands for an sm_90, ``cuda:80`` for an sm_80: no machine has so many
GPUs, so what launchers keep per device never mixes with a real one. Fake tensors have shapes,
strides and dtypes but no memory; their addresses count from 0, as if storage began at a multiple
of every alignment. Only this file replaces functions of torch and Triton, and only while its
context is open.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fuselab.inspect.assembly.architectures import NVIDIA, Architecture
from fuselab.runtime import triton_launch, tuning
from fuselab.runtime.cuda_source import CudaSource

# The names of GPUs that results were tuned on, by architecture: their choices are the ones to show.
_TUNED = {"sm_90": "NVIDIA H200"}

OnTriton = Callable[..., Any]
OnCuda = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class PretendedGpu:
    """The device and the mode in which to make its tensors."""

    architecture: Architecture
    device: torch.device
    fake: FakeTensorMode
    run_triton: Callable[..., Any]  # Triton's own JITFunction.run

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor on this GPU with the sizes, strides and dtype of ``tensor``."""
        with self.fake:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
            )

    def moved(self, value: Any) -> Any:
        """Return ``value`` with every tensor in it made fake and on this GPU."""
        if isinstance(value, torch.Tensor):
            return value if value.device == self.device else self.like(value)
        if isinstance(value, tuple | list):
            return type(value)(map(self.moved, value))
        if isinstance(value, dict):
            return {key: self.moved(item) for key, item in value.items()}
        return value


@contextlib.contextmanager
def pretended_gpu(
    architecture: Architecture, on_triton: OnTriton, on_cuda: OnCuda
) -> Iterator[PretendedGpu]:
    """Pretend that the machine has this GPU.

    ``on_triton(kernel, grid, args, keywords, run)`` is called in place of every launch of a
    ``@triton.jit`` kernel, with ``JITFunction.run`` as ``run``. ``on_cuda(source, expression, grid,
    block, args, shared_bytes)`` is called in place of every launch of a ``CudaSource``. A kernel
    that is tuned automatically takes its first configuration.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    own = torch.device("cuda", _index(architecture))
    capability = divmod(architecture.number, 10) if architecture.name in NVIDIA else (9, 4)

    original = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **keywords: Any) -> Any:
        return on_triton(kernel, grid, args, keywords, original)

    def launch(
        source: CudaSource,
        expression: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Any,
        shared_bytes: int = 0,
    ) -> None:
        on_cuda(source, expression, grid, block, args, shared_bytes)

    def properties(device: Any = None) -> Any:
        return SimpleNamespace(
            name=architecture.chip,
            major=capability[0],
            minor=capability[1],
            multi_processor_count=architecture.multiprocessors,
            shared_memory_per_block_optin=architecture.block_shared_bytes,
            shared_memory_per_block=48 << 10,
            shared_memory_per_multiprocessor=architecture.shared_bytes,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=architecture.warps * 32,
            warp_size=32,
            L2_cache_size=50 << 20,
            total_memory=80 << 30,
        )

    def clusters(
        source: CudaSource, expression: str, index: int, threads: int, shared: int, cluster: int
    ) -> int:
        return architecture.multiprocessors // cluster if capability >= (9, 0) else 0

    replaced: list[Any] = [
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
        mock.patch.object(torch.cuda, "get_device_properties", properties),
        mock.patch.object(torch.cuda, "get_device_name", lambda device=None: architecture.chip),
        mock.patch.object(torch.cuda, "current_device", lambda: own.index),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "synchronize", lambda device=None: None),
        # Where there is a GPU, it would allocate on the one that is not there.
        mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(Autotuner, "_bench", lambda *args, **keywords: [1.0, 1.0, 1.0]),
        mock.patch.object(CudaSource, "launch", launch),
        mock.patch.object(CudaSource, "active_clusters", clusters),
        mock.patch.object(triton_launch, "_is_jit_function", lambda kernel: False),
        mock.patch.object(tuning, "device_name", lambda *args: _TUNED.get(architecture.name)),
        mock.patch.object(FakeTensor, "data_ptr", _address, create=True),
        mock.patch.object(FakeTensor, "__getitem__", _part, create=True),
        mock.patch.object(FakeTensor, "__setitem__", _set_part, create=True),
    ]
    with contextlib.ExitStack() as stack:
        for each in replaced:
            stack.enter_context(each)
        stack.enter_context(torch.no_grad())
        yield PretendedGpu(architecture, own, FakeTensorMode(allow_non_fake_inputs=True), original)


def _index(architecture: Architecture) -> int:
    """Return a device index that no machine has: 90 for sm_90; an index has at most 7 bits."""
    return architecture.number if architecture.number < 128 else architecture.number % 128


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _part(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Index a fake tensor; torch's own indexing asks for CUDA, which a CPU build does not have."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in [item for item in items if not isinstance(item, torch.Tensor)]:
        place = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[place : place + 1] = [slice(None)] * (tensor.dim() - used)
    found, dim = tensor, 0
    tensors: list[torch.Tensor | None] = []
    for item in items:
        if item is None:
            found = torch.ops.aten.unsqueeze(found, dim)
        elif isinstance(item, slice):
            if item != slice(None):
                found = torch.ops.aten.slice(found, dim, item.start, item.stop, item.step or 1)
        elif isinstance(item, int):
            found = torch.ops.aten.select(found, dim, item)
            continue
        else:
            tensors += [None] * (dim - len(tensors))
            tensors.append(torch.as_tensor(item))
        dim += 1
    return torch.ops.aten.index(found, tensors) if tensors else found


def _set_part(tensor: torch.Tensor, index: Any, value: Any) -> None:
    part = _part(tensor, index)
    part.copy_(value) if isinstance(value, torch.Tensor) else part.fill_(value)

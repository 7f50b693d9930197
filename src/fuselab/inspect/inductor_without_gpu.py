"""The Triton kernels that Inductor would write for a GPU that is not there.

Dynamo and AOTAutograd trace the target on the CPU. Each graph is then given to Inductor a second
time with its tensors said to be on a GPU of the architecture asked for: Inductor lowers, fuses and
writes the wrapper, and nothing of it is compiled or run. The target itself runs on the CPU, so that
graph breaks and backward graphs come as they do in earnest.

Only this file replaces private parts of torch's Inductor and Triton's driver for that purpose,
written for torch 2.11 to 2.13 and Triton 3.6 to 3.7; ``tests/inspect/test_without_gpu.py`` says
when one of them has changed. It is for a process of its own: the driver stays replaced.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fuselab.errors import UnsupportedError
from fuselab.inspect.assembly.architectures import Architecture
from fuselab.inspect.user_code import plain

DEVICE = torch.device("cuda", 0)


def pretending(function: Callable[..., Any], architecture: Architecture) -> Callable[..., Any]:
    """Return ``function`` compiled so that Inductor writes code for ``architecture``.

    A call computes on the CPU with PyTorch's own operators; ``inductor_capture.capture`` records
    what Inductor wrote. Raises UnsupportedError if this torch keeps a part elsewhere.
    """
    try:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.compile_fx import _recursive_joint_graph_passes as joint_passes
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.virtualized import V
    except (ImportError, AttributeError) as error:
        raise _moved(error) from error

    def compile_part(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _write_code(graph, inputs, architecture, is_inference=False)
        return _boxed(graph)

    def compile_whole(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with V.set_fake_mode(_fake_mode(inputs)):
            joint_passes(graph)
        _write_code(graph, inputs, architecture, is_inference=True)
        return _boxed(graph)

    def partition(graph: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        with V.set_fake_mode(_fake_mode(inputs)):
            joint_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **kwargs)

    backend = aot_autograd(
        fw_compiler=compile_part,
        bw_compiler=compile_part,
        inference_compiler=compile_whole,
        decompositions=select_decomp_table,
        partition_fn=partition,
    )
    return torch.compile(function, backend=backend)


def _fake_mode(inputs: Sequence[Any]) -> Any:
    """Return the mode in which the graph's tensors have no memory."""
    from torch._guards import TracingContext, detect_fake_mode

    mode = detect_fake_mode(inputs) or TracingContext.get().fake_mode
    assert mode is not None
    return mode


def _boxed(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    from torch._functorch._aot_autograd.utils import make_boxed_func

    boxed: Callable[..., Any] = make_boxed_func(graph.forward)
    return boxed


def _moved(error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"torch {torch.__version__} keeps a part of Inductor elsewhere ({plain(error)}); kernels "
        "for a GPU that is not there need torch 2.11 to 2.13."
    )


def _write_code(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    architecture: Architecture,
    *,
    is_inference: bool,
) -> None:
    """Let Inductor write the code of one graph, and hand it to who records it."""
    try:
        from torch._inductor.compile_fx import _recursive_post_grad_passes as post_grad_passes
        from torch._inductor.debug import DebugContext
        from torch._inductor.fx_passes.post_grad import view_to_reshape
        from torch._inductor.graph import GraphLowering
        from torch._inductor.virtualized import V
    except (ImportError, AttributeError) as error:
        raise _moved(error) from error
    mode = _fake_mode(inputs)
    on_gpu = copy.deepcopy(graph)

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            with mode:
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=DEVICE
                )
        if isinstance(value, torch.device):
            return DEVICE
        if isinstance(value, list | tuple):
            return type(value)(map(move, value))
        return value

    for node in on_gpu.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = move(node.meta["val"])
        node.meta.pop("tensor_meta", None)
        node.args = tuple(DEVICE if isinstance(a, torch.device) else a for a in node.args)
        node.kwargs = {
            key: DEVICE if isinstance(value, torch.device) else value
            for key, value in node.kwargs.items()
        }
    moved = [move(value) for value in inputs]
    with _pretended(architecture), mode, DebugContext(), V.set_fake_mode(mode):
        view_to_reshape(on_gpu)
        post_grad_passes(on_gpu, is_inference)
        lowering = GraphLowering(on_gpu, example_inputs=moved, shape_env=mode.shape_env)
        with V.set_graph_handler(lowering):
            lowering.run(*moved)
            written, _ = lowering.codegen()
        record: Any = GraphLowering.save_output_code
        record(str(written.value))


def _copied_into(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Call ``copy_`` as an operator; as a method of a tensor it asks for the device's guard, which
    a torch without CUDA does not have."""
    copied: Tensor = torch.ops.aten.copy_.default(tensor, source, non_blocking)
    return copied


class _Context:
    """A stand-in for ``torch.cuda.device``: there is no device to change to."""

    def __init__(self, *args: Any) -> None: ...

    def __enter__(self) -> _Context:
        return self

    def __exit__(self, *args: object) -> None: ...


class _Driver:
    """A stand-in for Triton's driver: it only names the target of the code."""

    def __init__(self, number: int) -> None:
        self.number = number

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.number, 32)

    def get_current_device(self) -> int:
        return 0


@contextlib.contextmanager
def _pretended(architecture: Architecture) -> Iterator[None]:
    """Answer for the GPU whenever Inductor asks what it is writing for."""
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as torch_triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from triton.runtime import driver

    major, minor = divmod(architecture.number, 10)
    properties = SimpleNamespace(
        name=architecture.chip,
        major=major,
        minor=minor,
        multi_processor_count=architecture.multiprocessors,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=architecture.warps * 32,
        max_threads_per_block=1024,
        warp_size=32,
        L2_cache_size=50 << 20,
        total_memory=80 << 30,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=architecture.block_shared_bytes,
        shared_memory_per_multiprocessor=architecture.shared_bytes,
        gcnArchName="",
    )

    def answer(value: Any) -> Any:
        return lambda *args: value

    cuda = {
        "is_available": answer(True),
        "get_device_properties": answer(properties),
        "get_device_capability": answer((major, minor)),
        "current_device": answer(0),
        "device_count": answer(1),
        "synchronize": answer(None),
        "device": _Context,
    }
    interface = {
        "get_device_properties": answer(properties),
        "get_compute_capability": answer(architecture.number),
        "current_device": answer(0),
        "device_count": answer(1),
        "is_available": answer(True),
        "is_triton_capable": answer(True),
        "raise_if_triton_unavailable": answer(None),
    }
    worker = {"get_device_properties": answer(properties), "current_device": answer(0)}
    try:
        replaced = [
            *(mock.patch.object(torch.cuda, name, value) for name, value in cuda.items()),
            *(
                mock.patch.object(CudaInterface, name, staticmethod(value))
                for name, value in interface.items()
            ),
            *(
                mock.patch.object(CudaInterface.Worker, name, staticmethod(value))
                for name, value in worker.items()
            ),
            mock.patch.object(Tensor, "copy_", _copied_into),
            mock.patch.object(scheduler, "has_triton", answer(True)),
            mock.patch.object(torch_triton, "has_triton", answer(True)),
            config.patch({"triton.cudagraphs": False, "max_autotune": False, "compile_threads": 1}),
        ]
        with contextlib.ExitStack() as stack:
            for each in replaced:
                stack.enter_context(each)
            driver.set_active(_Driver(architecture.number))
            yield
    except AttributeError as error:
        raise _moved(error) from error

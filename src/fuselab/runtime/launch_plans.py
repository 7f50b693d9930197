"""Launch plans: what a call of an operator launches, kept by an exact key and run in C++.

A call of an operator on a small tensor is mostly host time: choosing, checking, allocating and
packing arguments in Python takes 20 us and more. All of that depends on shapes, dtypes and plain
arguments alone, so it is done once: ``launch_recording`` makes a plan of what an implementation
launches, and ``lookup`` finds the plan of a later call and runs it in C++ (``launcher.cpp``), 1 to
3 us and what the products take (linear_activation of 65536x512->256, forward and backward, beside
an H200 on a busy host, 2026-11-22: 242 us, eager 457).

A plan allocates its workspaces anew in every call, from torch's allocator and on the current
stream, so that calls share none and a CUDA graph can hold them.

Until that C++ is compiled, and where there is no compiler, everything still works, through ctypes
and without plans; where it cannot be compiled a warning says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fuselab.errors import BuildError, IndexRangeError, LaunchError, OperandError
from fuselab.runtime import cuda_driver
from fuselab.runtime.extension import NativeExtension

_names: list[str] = []
_names_lock = threading.Lock()
native: ModuleType | None = None


def register(name: str) -> int:
    """An id for the operator ``name``, for ``lookup`` and ``launch_recording.record``."""
    with _names_lock:
        _names.append(name)
        if native is not None:
            native.add_operator(name)
        return len(_names) - 1


def lookup(
    op_id: int,
    implementation: str,
    args: tuple[Any, ...],
    named: bool = True,
    detached: bool = False,
) -> Any:
    """The operator's output from a kept plan, or from the reference where ``keep_reference`` was
    told that this is what such a call runs; else None.

    The profiler sees the operator's name unless ``named`` is False: inside a raw operator the
    dispatcher has told it. ``detached`` says that the caller gives the output its gradient. Both
    are by position only, and neither gets the reference's output, which can be a view of an
    argument and has its own gradient.

    None whenever somebody wants to see the call (a gradient is needed, a dispatch or function mode,
    functorch, autocast, tracing), a tensor is not plain and strided, or tensors are on several
    devices. Raises LaunchError. Replaced by the C++ function once that is loaded.
    """
    return None if native is None else native.lookup(op_id, implementation, args, named, detached)


def planned(op_id: int, implementation: str, args: tuple[Any, ...]) -> bool:
    """Whether a detached ``lookup`` would find a plan for these arguments: then they have been
    checked, and an implementation chosen."""
    return native is not None and bool(native.planned(op_id, implementation, args))


def keep_reference(
    op_id: int, implementation: str, args: tuple[Any, ...], reference: Callable[..., Any]
) -> None:
    """Remember that such calls have been checked and run ``reference``: ``lookup`` then does, where
    shapes, dtypes, the floats' values and the tensors that need a gradient are the same."""
    if EXTENSION.ready():
        native.keep_reference(op_id, implementation, args, reference)  # type: ignore[union-attr]


def keep_differentiable(op_id: int, implementation: str, args: tuple[Any, ...]) -> None:
    """Remember that such calls, which need a gradient, may take the plan of one that needs none:
    the choice is another one at times (linear_activation's, with gelu)."""
    if native is not None:
        native.keep_differentiable(op_id, implementation, args)


def forget(op_id: int) -> None:
    """Drop all that is known of an operator's calls: its implementations have changed."""
    if native is not None:
        native.forget(op_id)


def forget_all() -> None:
    """Drop every plan: another launch configuration was chosen, and operators share launchers."""
    for op_id in range(len(_names)):
        forget(op_id)


def count_plans(op_id: int) -> int:
    """How many keys of an operator have a plan, or are known to have none."""
    return 0 if native is None else int(native.count(op_id))


def _raise_launch_error(
    status: int, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int
) -> None:
    raise cuda_driver.launch_error(status, grid, block, shared_bytes)


def _raise_map_error(status: int, layout: tuple[int, ...]) -> None:
    raise cuda_driver.map_error(status, layout)


def raise_kernel_error(message: str) -> None:
    """The two first words are cpp_source's for the exceptions of the user's making."""
    kind, _, text = message.partition(": ")
    if kind == "out of range":
        raise IndexRangeError(text)
    if kind == "invalid argument":
        raise OperandError(text)
    raise LaunchError(f"a CPU kernel failed: {message}.")


def _install(loaded: ModuleType) -> None:
    """Put the loaded C++ half to use. Raises BuildError where it does not fit this torch."""
    global native, lookup
    tensor = torch.empty(3)
    if loaded.probe(tensor) != (tensor.data_ptr(), 3):
        raise BuildError(f"launcher.cpp does not fit torch {torch.__version__}")
    loaded.start(
        _raise_launch_error,
        raise_kernel_error,
        _raise_map_error,
        getattr(torch._C, "_cuda_getCurrentRawStream", None),
        torch.dtype,
        torch.OutOfMemoryError,
    )
    with _names_lock:
        for name in _names:
            loaded.add_operator(name)
        native, lookup = loaded, loaded.lookup


EXTENSION = NativeExtension(
    Path(__file__).with_name("launcher.cpp"),
    "fuselab_launcher",
    _install,
    "the C++ launcher cannot be used, small tensors take longer",
)


def start() -> bool:
    """Load the C++ launcher, building it first where needed. Return False, with one warning, where
    it cannot be built."""
    return EXTENSION.start()


def is_started() -> bool:
    """Whether the C++ launcher is loaded: without it there are no plans."""
    return native is not None


EXTENSION.start_if_built()  # now, so that callers hold the C++ lookup itself

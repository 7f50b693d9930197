"""Launch plans: the launches of an operator's call, kept under an exact key and run in C++.

A call of an operator on a small tensor is mostly host time: choosing, checking, allocating and
packing arguments in Python takes 20 us and more. All of that depends only on shapes, dtypes and
plain arguments, so it is done once. ``launch_recording`` makes a plan of what an implementation
launches; ``lookup`` finds the plan of a later call and runs it in C++ (``launcher/``), which
takes 1 to 3 us and the time of the library's products.

A plan allocates its workspaces in every call, from torch's allocator and on the current stream, so
that calls share none and a CUDA graph can hold them.

Until that C++ is compiled, and if there is no compiler, launches go through ctypes and without
plans; a warning says if it cannot be compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fuselab.errors import BuildError
from fuselab.runtime import cuda_driver
from fuselab.runtime.cpp_library import raise_kernel_error
from fuselab.runtime.extension import NativeExtension

_names: list[str] = []
_names_lock = threading.Lock()
native: ModuleType | None = None


def register(name: str) -> int:
    """Return an id for the operator ``name``, for ``lookup`` and ``launch_recording.record``."""
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
    """Return the operator's output from a plan, or from the reference if ``keep_reference`` was
    told that such a call runs it; else None.

    The profiler sees the operator's name unless ``named`` is False: inside a raw operator the
    dispatcher has told it already. ``detached`` says that the caller attaches the gradient to the
    output. Both are positional only. With either, the reference's output is not used, because it
    can be a view of an argument and has its own gradient.

    The result is None whenever the call must be visible (a gradient is needed, a dispatch or
    function mode, functorch, autocast, tracing), if a tensor is not plain and strided, and if
    tensors are on several devices. Raises LaunchError. The C++ function replaces this one once it
    is loaded.
    """
    return None if native is None else native.lookup(op_id, implementation, args, named, detached)


def planned(op_id: int, implementation: str, args: tuple[Any, ...]) -> bool:
    """Return whether a detached ``lookup`` would find a plan for these arguments. Then they have
    been checked, and an implementation was chosen."""
    return native is not None and bool(native.planned(op_id, implementation, args))


def keep_reference(
    op_id: int, implementation: str, args: tuple[Any, ...], reference: Callable[..., Any]
) -> None:
    """Remember that such calls have been checked and run ``reference``. ``lookup`` then runs it if
    shapes, dtypes, the floats' values and the tensors that need a gradient are the same."""
    if EXTENSION.ready():
        native.keep_reference(op_id, implementation, args, reference)  # type: ignore[union-attr]


def keep_differentiable(op_id: int, implementation: str, args: tuple[Any, ...]) -> None:
    """Remember that such calls, which need a gradient, may use the plan of a call that needs none.
    The choice can differ between the two (linear_activation with gelu)."""
    if native is not None:
        native.keep_differentiable(op_id, implementation, args)


def forget(op_id: int) -> None:
    """Drop everything known of an operator's calls, because its implementations have changed."""
    if native is not None:
        native.forget(op_id)


def forget_all() -> None:
    """Drop every plan, because another launch configuration was chosen and operators share
    launchers."""
    for op_id in range(len(_names)):
        forget(op_id)


def count_plans(op_id: int) -> int:
    """Return how many keys of an operator have a plan, or are known to have none."""
    return 0 if native is None else int(native.count(op_id))


def _raise_launch_error(
    status: int, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int
) -> None:
    raise cuda_driver.launch_error(status, grid, block, shared_bytes)


def _raise_map_error(status: int, layout: tuple[int, ...]) -> None:
    raise cuda_driver.map_error(status, layout)


def _install(loaded: ModuleType) -> None:
    """Use the loaded C++ half. Raises BuildError if it does not fit this torch."""
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
    Path(__file__).with_name("launcher") / "launcher.cpp",
    "fuselab_launcher",
    _install,
    "the C++ launcher cannot be used, small tensors take longer",
)


def start() -> bool:
    """Load the C++ launcher, after building it if needed. Return False, with one warning, if it
    cannot be built."""
    return EXTENSION.start()


def is_started() -> bool:
    """Return whether the C++ launcher is loaded; without it there are no plans."""
    return native is not None


EXTENSION.start_if_built()  # at import, so that callers bind the C++ lookup itself

"""Settings of PyTorch and Python that an operator must leave as it found them, with the threads and
processes that it must not leave: what is kept outside of Python's objects, or in a library."""

from __future__ import annotations

import contextlib
import decimal
import functools
import gc
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# Other parts of the state name these, with words of their own.
_NAMED_ELSEWHERE = {
    *("cublas_allow_tf32", "cudnn_allow_tf32", "onednn_allow_tf32", "float32_matmul_precision"),
    *("cudnn_enabled", "cudnn_benchmark", "mkldnn_enabled", "deterministic_algorithms"),
    *("thread_name", "tracing_state"),
}
# Getters without "get" in their names.
_GETTERS = ("_check_sparse_tensor_invariants",)
# Setters whose names do not follow from those of their getters.
_SETTERS = {
    f"{kind}_sdp_enabled": f"_set_sdp_use_{kind}"
    for kind in ("flash", "mem_efficient", "math", "cudnn", "fa3", "overrideable")
}
_GRACE_S = 0.5  # for threads that are about to end


@functools.cache
def _switches() -> dict[str, tuple[Callable[[], Any], Callable[..., Any]]]:
    """Return what reads and what sets every setting of PyTorch that its C++ code keeps."""
    found = {}
    for name in dir(torch._C):
        setting = name.removeprefix("_get_").removeprefix("_")
        if not (name.startswith("_get_") or name in _GETTERS) or setting in _NAMED_ELSEWHERE:
            continue
        setter = getattr(torch._C, _SETTERS.get(setting, f"_set_{setting}"), None)
        if setter is not None and _read(getattr(torch._C, name)) is not None:
            found[setting] = (getattr(torch._C, name), setter)
    return found


def _read(read: Callable[..., Any]) -> Any:
    """Return a setting's plain value, and None where it has none or asks for an argument."""
    try:
        value = read()
    except (TypeError, RuntimeError):
        return None
    several = value if isinstance(value, tuple) else (value,)
    return value if all(isinstance(one, (bool, int, float, str)) for one in several) else None


def of_torch() -> dict[str, Any]:
    """Return PyTorch's settings that no other part of the state names, under their names."""
    settings = {name: _read(read) for name, (read, _) in _switches().items()}
    settings["deterministic_warn_only"] = torch.is_deterministic_algorithms_warn_only_enabled()
    settings["opt_einsum"] = torch.backends.opt_einsum.enabled
    settings["sharing_strategy"] = torch.multiprocessing.get_sharing_strategy()
    return settings


def restore_of_torch(before: dict[str, Any]) -> None:
    """Give PyTorch's settings back."""
    now = of_torch()
    for name, (_, write) in _switches().items():
        value = before[name]
        if value is not None and value != now[name]:
            with contextlib.suppress(RuntimeError, TypeError):  # of a device that is not here
                write(*(value if isinstance(value, tuple) else (value,)))
    if before["deterministic_warn_only"] != now["deterministic_warn_only"]:
        torch.use_deterministic_algorithms(
            torch.are_deterministic_algorithms_enabled(),
            warn_only=before["deterministic_warn_only"],
        )
    torch.backends.opt_einsum.enabled = before["opt_einsum"]
    torch.multiprocessing.set_sharing_strategy(before["sharing_strategy"])


_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
_LISTS: dict[str, Callable[[], list[Any]]] = {
    "sys.path": lambda: sys.path,
    "sys.meta_path": lambda: sys.meta_path,
    "sys.path_hooks": lambda: sys.path_hooks,
    "gc.callbacks": lambda: gc.callbacks,
}
# Settings of Python, by the name of what sets them: what reads each, and what sets it.
_OF_PYTHON: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "sys.set_int_max_str_digits": (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    "sys.setdlopenflags": (sys.getdlopenflags, sys.setdlopenflags),
    "sys.set_coroutine_origin_tracking_depth": (
        sys.get_coroutine_origin_tracking_depth,
        sys.set_coroutine_origin_tracking_depth,
    ),
    "threading.stack_size": (threading.stack_size, threading.stack_size),
}


def of_python() -> dict[str, Any]:
    """Return settings of Python, and of its process, under their names: where modules come from,
    timers, limits, the functions that new threads call for every line, the arithmetic of decimal
    numbers, the patience of sockets, the longest integer that becomes text."""
    settings: dict[str, Any] = {name: list(read()) for name, read in _LISTS.items()}
    settings |= {
        "a timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "gc.freeze": gc.get_freeze_count() > 0,
        "threading.settrace": threading.gettrace(),
        "threading.setprofile": threading.getprofile(),
        "decimal.getcontext": _arithmetic(),
        "socket.setdefaulttimeout": socket.getdefaulttimeout(),
    }
    settings |= {name: resource.getrlimit(limit) for name, limit in _LIMITS.items()}
    settings |= {name: read() for name, (read, _) in _OF_PYTHON.items()}
    return settings


def _arithmetic() -> tuple[int, str, int, int]:
    context = decimal.getcontext()
    return context.prec, context.rounding, context.Emin, context.Emax


def restore_of_python(before: dict[str, Any]) -> None:
    """Give Python's settings back; a hard limit that was lowered stays."""
    for name, read in _LISTS.items():
        read()[:] = before[name]
    if not before["a timer"]:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not before["gc.freeze"]:
        gc.unfreeze()
    threading.settrace(before["threading.settrace"])
    threading.setprofile(before["threading.setprofile"])
    for name, limit in _LIMITS.items():
        if resource.getrlimit(limit) != before[name]:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(limit, before[name])
    context = decimal.getcontext()
    context.prec, context.rounding, context.Emin, context.Emax = before["decimal.getcontext"]
    socket.setdefaulttimeout(before["socket.setdefaulttimeout"])
    for name, (_, write) in _OF_PYTHON.items():
        write(before[name])


@functools.cache
def _first_modules() -> dict[str, ModuleType]:
    return dict(sys.modules)


def modules_by_name() -> dict[str, Any]:
    """Return the modules that there were at the first call, under their names."""
    return {name: sys.modules.get(name) for name in _first_modules()}


def restore_modules(before: dict[str, Any]) -> None:
    """Put back the modules that ``modules_by_name`` has returned."""
    sys.modules.update({name: module for name, module in before.items() if module is not None})


def threads_of_python() -> frozenset[str]:
    """Return the threads that Python code has started and that still run: their numbers and names.

    Those that compile kernels for fuselab end by themselves.
    """
    return frozenset(
        f"{thread.ident} {thread.name}"
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread) and not thread.name.startswith("fuselab-")
    )


def child_processes() -> frozenset[str]:
    """Return the numbers of this process's children, where the system lists them."""
    found: set[str] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # of a thread that has ended
            found.update(path.read_text().split())
    return frozenset(found)


def left_over(read: Callable[[], frozenset[str]], before: frozenset[str]) -> frozenset[str]:
    """Return what ``read`` finds and ``before`` does not have, once what is about to end has had
    half a second for it."""
    until = time.monotonic() + _GRACE_S
    while (new := read() - before) and time.monotonic() < until:
        time.sleep(0.01)
    return new

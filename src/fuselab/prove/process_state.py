"""The state of the process that an operator must leave as it found it: threads, cores, precision,
random numbers, environment, warnings, signals, hooks, the functions and settings of PyTorch."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fuselab.prove.guard import (
    attributes_by_name,
    functions_by_name,
    modes,
    restore_attributes,
    restore_functions,
    restore_traces,
    traces,
)
from fuselab.prove.process_settings import (
    child_processes,
    left_over,
    modules_by_name,
    of_python,
    of_torch,
    restore_modules,
    restore_of_python,
    restore_of_torch,
    threads_of_python,
)

_equal = torch.equal  # bound before any operator is imported
_TINY = torch.tensor([1e-310], dtype=torch.float64)
# Variables that PyTorch, Triton, CUDA or OpenMP read. An import may set others.
_STEERING = ("OMP_", "KMP_", "MKL_", "GOMP_", "ATEN_", "TORCH", "PYTORCH_", "CUDA_", "TRITON_")
# PyTorch sets these itself when its compiler is first imported, which any call may do.
_OF_PYTORCH = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
_MOST_NAMES = 6  # that a message lists
_BLANKET = (Warning, UserWarning, RuntimeWarning, FutureWarning)


@dataclass(frozen=True)
class Aspect:
    """One part of the process's state: how to read it, and how to give it back an earlier value.

    ``restore`` is None where nothing can be done, or where the judge needs nothing of it. With
    ``leaves``, ``read`` returns a set, of which parts may go and none may come.
    """

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], Any] | None = None
    leaves: bool = False


def _environment(prefixes: tuple[str, ...] = ("",)) -> dict[str, str]:
    return {
        name: value
        for name, value in _variables().items()
        if name.startswith(prefixes) and name not in _OF_PYTORCH
    }


def _variables() -> dict[str, str]:
    """Return the environment that C code and child processes see: ``setenv`` of C changes it, and
    not ``os.environ``."""
    try:
        entries: Any = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    except ValueError:  # a system whose C library names it otherwise
        return dict(os.environ)
    found: dict[str, str] = {}
    for entry in entries:
        if entry is None:
            break
        name, separator, value = os.fsdecode(entry).partition("=")
        if separator:
            found.setdefault(name, value)
    return found


def _on_cuda(read: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: read() if torch.cuda.is_available() else None


def _blanket_filters() -> list[Any]:
    """Return the warning filters that hide every warning of a common class.

    A filter for one message or one module, as imports of libraries add them, hides little.
    """
    return [
        entry
        for entry in warnings.filters
        if entry[0] == "ignore" and entry[1] is None and entry[3] is None and entry[2] in _BLANKET
    ]


def _without_filters(before: list[Any]) -> None:
    added = [entry for entry in _blanket_filters() if entry not in before]
    warnings.filters[:] = [entry for entry in warnings.filters if entry not in added]  # type: ignore[index]


def _write_environment(before: dict[str, str]) -> None:
    for name in set(_environment()) - set(before):
        os.environ.pop(name, None)
        os.unsetenv(name)  # where C code has set it, os.environ does not know it
    os.environ.update(before)


def _set_cudnn(attribute: str) -> Callable[[Any], None]:
    return lambda value: setattr(torch.backends.cudnn, attribute, value)


# PyTorch's settings of how exact float32 products are; a general one comes before what it governs.
# Its types know only some of them.
_BACKENDS: Any = torch.backends
_PRECISIONS = (
    _BACKENDS,
    _BACKENDS.cudnn,
    _BACKENDS.mkldnn,
    _BACKENDS.cuda.matmul,
    _BACKENDS.cudnn.conv,
    _BACKENDS.cudnn.rnn,
    _BACKENDS.mkldnn.matmul,
    _BACKENDS.mkldnn.conv,
    _BACKENDS.mkldnn.rnn,
)


def _matmul_precision() -> str | None:
    """Return the older setting of products, or None where the newer ones contradict it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _precision() -> tuple[str | None, list[str]]:
    return _matmul_precision(), [one.fp32_precision for one in _PRECISIONS]


def _restore_precision(before: tuple[str | None, list[str]]) -> None:
    older, newer = before
    if older is not None:
        torch.set_float32_matmul_precision(older)
    for setting, value in zip(_PRECISIONS, newer, strict=True):
        if setting.fp32_precision != value:
            setting.fp32_precision = value


def _restore_cuda_random_state(state: torch.Tensor | None) -> None:
    if state is not None:
        torch.cuda.set_rng_state(state)


def _restore_collector(before: tuple[bool, tuple[int, int, int]]) -> None:
    is_enabled, thresholds = before
    gc.set_threshold(*thresholds)
    (gc.enable if is_enabled else gc.disable)()


def _flushes_somewhere() -> bool:
    """Return whether a thread of PyTorch's pool flushes; a loop gives each 2^15 elements at
    least."""
    tiny = _TINY.expand(max(2, torch.get_num_threads()) << 15)
    return bool((tiny.mul(1.0) == 0).any())


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def _rounded_sums() -> tuple[float, ...]:
    """Return sums that tell the four rounding modes apart."""
    one, tiny = (float(text) for text in ("1", "1e-20"))  # Python would add constants beforehand
    return one + tiny, one - tiny, -one - tiny


def _round_to_nearest(before: tuple[float, ...]) -> None:
    if before == (1.0, 1.0, -1.0):
        ctypes.CDLL(None).fesetround(0)


def _handlers() -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in signal.Signals}


def _restore_handlers(before: dict[str, Any]) -> None:
    for name, handler in before.items():
        with contextlib.suppress(ValueError, OSError, TypeError):  # of another thread, of C code
            if signal.getsignal(signal.Signals[name]) != handler:
                signal.signal(signal.Signals[name], handler)


_HOOKS = ("stdout", "stderr", "excepthook", "displayhook", "unraisablehook")


def _hooks() -> dict[str, Any]:
    hooks = {f"sys.{name}": getattr(sys, name) for name in _HOOKS}
    return hooks | {"threading.excepthook": threading.excepthook}


def _restore_hooks(before: dict[str, Any]) -> None:
    for name, value in before.items():
        module, _, attribute = name.partition(".")
        setattr(sys.modules[module], attribute, value)


def _numpy_random_state() -> tuple[Any, ...] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, keys, *others = numpy.random.get_state()
    return (kind, keys.tobytes(), *others)


def _restore_numpy_random_state(state: tuple[Any, ...] | None) -> None:
    if state is not None:
        numpy = sys.modules["numpy"]
        kind, keys, *others = state
        numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *others))


def _numpy_errors() -> dict[str, str] | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.geterr()


def _restore_numpy_errors(before: dict[str, str] | None) -> None:
    if before is not None:
        sys.modules["numpy"].seterr(**before)


def _hooks_of_layers() -> dict[str, list[int]]:
    """Return the keys of the hooks that every layer calls, under the names of their registers."""
    registers = vars(torch.nn.modules.module)
    return {
        name: list(register)
        for name, register in registers.items()
        if name.startswith("_global_") and isinstance(register, dict)
    }


def _restore_hooks_of_layers(before: dict[str, list[int]]) -> None:
    for name, keys in before.items():
        register = getattr(torch.nn.modules.module, name)
        for key in set(register) - set(keys):
            del register[key]


def _saved_tensors_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _pop_saved_tensors_hooks(before: Any) -> None:
    while _saved_tensors_hooks() not in (before, None):
        torch._C._autograd._pop_saved_tensors_default_hooks()


_AUTOCAST_DEVICES = ("cpu", "cuda")


def _autocast() -> tuple[Any, ...]:
    of_devices = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _AUTOCAST_DEVICES
    ]
    return torch.is_autocast_cache_enabled(), of_devices


def _restore_autocast(before: tuple[Any, ...]) -> None:
    has_cache, of_devices = before
    torch.set_autocast_cache_enabled(has_cache)
    for device, (is_enabled, dtype) in zip(_AUTOCAST_DEVICES, of_devices, strict=True):
        torch.set_autocast_enabled(device, is_enabled)
        torch.set_autocast_dtype(device, dtype)


def _logging() -> tuple[int, int, list[Any]]:
    root = logging.getLogger()
    return root.manager.disable, root.level, list(root.handlers)


def _restore_logging(before: tuple[int, int, list[Any]]) -> None:
    disabled, level, handlers = before
    logging.disable(disabled)
    logging.getLogger().setLevel(level)
    logging.getLogger().handlers[:] = handlers


def _print_options() -> dict[str, Any]:
    return dict(vars(torch._tensor_str.PRINT_OPTS))


def _restore_print_options(before: dict[str, Any]) -> None:
    vars(torch._tensor_str.PRINT_OPTS).update(before)


# The settings of torch.compile, by the modules that hold them where they are imported.
_COMPILER_SETTINGS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")


def _compiler_settings() -> dict[str, Any]:
    """Return the settings that are not at their default, under their full names."""
    return {
        f"{module}.{name}": value
        for module in _COMPILER_SETTINGS
        if module in sys.modules
        for name, value in sys.modules[module].get_config_copy().items()
        if not sys.modules[module]._is_default(name)
        and value != sys.modules[module]._config[name].default  # set, and set back
    }


def _restore_compiler_settings(before: dict[str, Any]) -> None:
    for full in {**before, **_compiler_settings()}:
        module, _, name = full.partition(".config.")
        settings = sys.modules[f"{module}.config"]
        setattr(settings, name, before.get(full, settings._config[name].default))


_STATE = (
    Aspect("the random number generator", torch.get_rng_state, torch.set_rng_state),
    Aspect(
        "CUDA's random number generator",
        _on_cuda(lambda: torch.cuda.get_rng_state()),
        _restore_cuda_random_state,
    ),
    Aspect("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Aspect("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Aspect("the default device", torch.get_default_device, torch.set_default_device),
    Aspect("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Aspect("inference mode", torch.is_inference_mode_enabled),
    Aspect(
        "deterministic mode",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    Aspect("the precision of float32 products", _precision, _restore_precision),
    Aspect("cuDNN's use", lambda: torch.backends.cudnn.enabled, _set_cudnn("enabled")),
    Aspect("cuDNN's search", lambda: torch.backends.cudnn.benchmark, _set_cudnn("benchmark")),
    Aspect("oneDNN's use", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    Aspect(
        "anomaly detection",
        torch.is_anomaly_enabled,
        lambda value: torch.autograd.set_detect_anomaly(value),
    ),
    Aspect(
        "autograd's threads",
        torch.autograd.is_multithreading_enabled,
        lambda value: torch._C._set_multithreading_enabled(value),
    ),
    Aspect(
        "flush-to-zero of subnormals",
        lambda: _TINY.mul(1.0).view(torch.int64).item() == 0,
        torch.set_flush_denormal,
    ),
    # Each of PyTorch's threads has such a setting of its own.
    Aspect("flush-to-zero of subnormals in PyTorch's threads", _flushes_somewhere),
    Aspect("how sums are rounded", _rounded_sums, _round_to_nearest),
    Aspect(
        "the cores that it may run on",
        lambda: os.sched_getaffinity(0),
        lambda cores: os.sched_setaffinity(0, cores),
    ),
    Aspect("the priority of the process", lambda: os.getpriority(os.PRIO_PROCESS, 0)),
    Aspect("the CUDA stream", _on_cuda(lambda: torch.cuda.current_stream())),
    Aspect("the CUDA device", _on_cuda(lambda: torch.cuda.current_device())),
    Aspect(
        "Python's garbage collector",
        lambda: (gc.isenabled(), gc.get_threshold()),
        _restore_collector,
    ),
    Aspect("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Aspect("the switch interval of threads", sys.getswitchinterval, sys.setswitchinterval),
    Aspect("which warnings are shown", _blanket_filters, _without_filters),
    Aspect("the hooks of all layers", _hooks_of_layers, _restore_hooks_of_layers),
    Aspect("the hooks on saved tensors", _saved_tensors_hooks, _pop_saved_tensors_hooks),
    Aspect("autocast", _autocast, _restore_autocast),
    Aspect("settings of PyTorch", of_torch, restore_of_torch),
    # An implementation that replaces one of these could falsify a measurement or a verdict.
    Aspect("time.perf_counter", lambda: time.perf_counter),
    Aspect("torch.cuda.synchronize", lambda: torch.cuda.synchronize),
    Aspect("torch.cuda.Event", lambda: torch.cuda.Event),
)
# An import may change these: a file seeds Python's generator for its example, a library installs
# handlers. What an import replaces in PyTorch, the guard of the reference's process tells.
_OF_CALLS = (
    Aspect("Python's random numbers", random.getstate, random.setstate),
    Aspect("the working directory", os.getcwd, os.chdir),
    Aspect("the mask of new files' rights", _umask, os.umask),
    Aspect("the handlers of signals", _handlers, _restore_handlers),
    Aspect("the streams and hooks of Python", _hooks, _restore_hooks),
    Aspect("functions of PyTorch and Python", functions_by_name, restore_functions),
    Aspect("attributes of PyTorch", attributes_by_name, restore_attributes),
    Aspect("the functions that sys calls for every line", traces, restore_traces),
    Aspect("the modes that torch's operators run under", modes),
    Aspect("settings of Python", of_python, restore_of_python),
    Aspect("imported modules", modules_by_name, restore_modules),
    Aspect("which threads of Python run", threads_of_python, leaves=True),
    Aspect("which processes it has started", child_processes, leaves=True),
    Aspect("NumPy's random numbers", _numpy_random_state, _restore_numpy_random_state),
    Aspect("what NumPy does at an error", _numpy_errors, _restore_numpy_errors),
    Aspect("what is logged", _logging, _restore_logging),
    Aspect("how tensors are printed", _print_options, _restore_print_options),
    Aspect("the settings of torch.compile", _compiler_settings, _restore_compiler_settings),
    Aspect(
        "the locale",
        lambda: locale.setlocale(locale.LC_ALL),
        lambda before: locale.setlocale(locale.LC_ALL, before),
    ),
)
_ENVIRONMENT = Aspect("the environment", _environment, _write_environment)
_STEERING_ENVIRONMENT = Aspect("the environment", lambda: _environment(_STEERING))


class ProcessState:
    """The state of this process at one moment.

    Of the environment, a call may change nothing; an import may set variables that PyTorch and what
    it builds on do not read.
    """

    def __init__(self, of_import: bool = False) -> None:
        aspects = (*_STATE, *(() if of_import else _OF_CALLS))
        aspects += (_STEERING_ENVIRONMENT if of_import else _ENVIRONMENT,)
        self.entries = [(aspect, aspect.read()) for aspect in aspects]

    def changed(self) -> list[str]:
        """Return the names of what has changed since."""
        names = []
        for aspect, before in self.entries:
            if aspect.leaves:
                names += [aspect.name] if left_over(aspect.read, before) else []
                continue
            now = aspect.read()
            if not _same(before, now):
                names.append(aspect.name + _which(before, now))
        return names

    def restore(self) -> None:
        """Give back what has changed, so that later calls are judged as if it had not."""
        for aspect, before in self.entries:
            if aspect.restore is not None and not _same(before, aspect.read()):
                aspect.restore(before)


def _which(before: Any, now: Any) -> str:
    """Return the names that differ in values with names (variables of the environment, hooks), as
    `` (A, B)``; nothing of others."""
    if not isinstance(before, dict):
        return ""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    told = names[:_MOST_NAMES] + ["..."] * (len(names) > _MOST_NAMES)
    return f" ({', '.join(told)})"


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, torch.Tensor):
        return _equal(before, now)
    return bool(before == now)


@contextlib.contextmanager
def quick_thread_switches() -> Iterator[None]:
    """Make Python switch threads every 10 us instead of every 5 ms, so that they interleave."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)

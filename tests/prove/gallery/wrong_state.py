"""The gallery's faults in the state of the process, changed by an import, a call or a backward."""

from __future__ import annotations

import builtins
import ctypes
import functools
import gc
import itertools
import logging
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fuselab.op import FusedOp
from gallery import honest, wrong
from gallery.honest import make_op
from gallery.wrong import Exhibit

EXHIBITS: list[Exhibit] = []
caught_by = functools.partial(wrong.caught_by, exhibits=EXHIBITS)


def changing(name: str, device: str, change: Callable[[], Any]) -> FusedOp:
    """Return the honest operator, whose forward also calls ``change``."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        change()
        return honest.forward(input, bias, scale)

    return make_op(name, device, forward)


def changing_backward(name: str, device: str, change: Callable[[], Any]) -> FusedOp:
    """Return the honest operator, whose backward also calls ``change``."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        change()
        return honest.backward(needs, grad_output, *saved)

    return make_op(name, device, backward=backward)


def other_threads() -> None:
    """Set the number of threads to one, or to two where it is one already."""
    torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)


@caught_by("global state")
def threads_set_to_one(device: str) -> FusedOp:
    """Makes PyTorch slow for everyone else."""
    return changing("threads_set_to_one", device, other_threads)


@caught_by("global state", cpu_only="autograd's thread of a GPU has a number of threads of its own")
def backward_sets_threads(device: str) -> FusedOp:
    return changing_backward("backward_sets_threads", device, other_threads)


@caught_by("global state")
def reduced_precision_allowed(device: str) -> FusedOp:
    """Allows TF32 and bfloat16 products in every later matmul of the process."""
    return changing_backward(
        "reduced_precision_allowed",
        device,
        lambda: torch.set_float32_matmul_precision("medium"),
    )


@caught_by("global state")
def tf32_in_convolutions(device: str) -> FusedOp:
    convolutions = torch.backends.cudnn.conv
    wanted = "tf32" if convolutions.fp32_precision == "ieee" else "ieee"

    def toggle() -> None:
        convolutions.fp32_precision = wanted

    return changing("tf32_in_convolutions", device, toggle)


@caught_by("global state")
def mkldnn_switched_off(device: str) -> FusedOp:
    def switch() -> None:
        torch.backends.mkldnn.set_flags(False)

    return changing("mkldnn_switched_off", device, switch)


@caught_by("global state")
def collector_switched_off(device: str) -> FusedOp:
    """Stops Python's garbage collector so that no collection falls into the timed calls."""
    return changing("collector_switched_off", device, gc.disable)


@caught_by("global state")
def environment_written(device: str) -> FusedOp:
    """Writes to the environment, which child processes inherit."""

    def write() -> None:
        os.environ["OMP_NUM_THREADS"] = "77"

    return changing("environment_written", device, write)


@caught_by("global state")
def environment_written_by_c(device: str) -> FusedOp:
    """Writes to it by C's ``setenv``, of which ``os.environ`` does not hear."""
    setenv = ctypes.CDLL(None).setenv
    return changing(
        "environment_written_by_c", device, lambda: setenv(b"OMP_NUM_THREADS", b"78", 1)
    )


@caught_by("global state")
def bound_to_one_core(device: str) -> FusedOp:
    """Takes all cores but one from the process, or where there is one, lowers its priority."""

    def bind() -> None:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)}) if len(cores) > 1 else os.nice(1)

    return changing("bound_to_one_core", device, bind)


@caught_by("global state", cpu_only="autograd's thread of a GPU rounds in a mode of its own")
def sums_rounded_up(device: str) -> FusedOp:
    """Leaves the processor rounding upwards, as interval arithmetic wants it."""
    upward = {"x86_64": 0x800, "aarch64": 0x400000}[platform.machine()]
    return changing_backward(
        "sums_rounded_up", device, lambda: ctypes.CDLL(None).fesetround(upward)
    )


@caught_by("global state")
def python_reseeded(device: str) -> FusedOp:
    """Seeds Python's generator, so that every epoch's order is the same."""
    return changing("python_reseeded", device, lambda: random.seed(0))


@caught_by("global state")
def another_folder(device: str) -> FusedOp:
    folders = itertools.cycle(["/", "/usr"])
    return changing("another_folder", device, lambda: os.chdir(next(folders)))


@caught_by("global state")
def interrupts_ignored(device: str) -> FusedOp:
    # Where interrupts are ignored already, as in a shell's background job, they are let through.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    other = signal.default_int_handler if ignored else signal.SIG_IGN

    def handle_otherwise() -> None:
        signal.signal(signal.SIGINT, other)

    return changing("interrupts_ignored", device, handle_otherwise)


@caught_by("global state")
def function_of_torch_replaced(device: str) -> FusedOp:
    """Replaces a function of PyTorch by a coarser one during its first call."""
    exact = torch.rsqrt

    def replace() -> None:
        torch.rsqrt = lambda input: exact(input).bfloat16().to(input.dtype)

    return changing_backward("function_of_torch_replaced", device, replace)


@caught_by("global state")
def warnings_silenced(device: str) -> FusedOp:
    return changing_backward("warnings_silenced", device, lambda: warnings.simplefilter("ignore"))


@caught_by("global state")
def backward_reseeds(device: str) -> FusedOp:
    """Seeds the generator in the backward, so that every step's dropout is the same."""
    return changing_backward("backward_reseeds", device, lambda: torch.manual_seed(0))


@caught_by("global state")
def default_dtype_by_the_backward(device: str) -> FusedOp:
    return changing_backward(
        "default_dtype_by_the_backward", device, lambda: torch.set_default_dtype(torch.float64)
    )


@caught_by("global state")
def recursion_limit_raised(device: str) -> FusedOp:
    return changing("recursion_limit_raised", device, lambda: sys.setrecursionlimit(12_345))


@caught_by("global state")
def anomaly_detection_left_on(device: str) -> FusedOp:
    return changing(
        "anomaly_detection_left_on", device, lambda: torch.autograd.set_detect_anomaly(True)
    )


@caught_by("global state")
def hook_of_all_layers(device: str) -> FusedOp:
    """Registers a hook that every layer of the process calls from then on."""

    def register() -> None:
        torch.nn.modules.module.register_module_forward_hook(lambda layer, args, output: None)

    return changing("hook_of_all_layers", device, register)


@caught_by("global state")
def hooks_on_saved_tensors(device: str) -> FusedOp:
    """Leaves the hooks behind that autograd calls for every tensor that it saves."""
    pushed: list[int] = []

    def push() -> None:
        if not pushed:
            keep = lambda tensor: tensor  # noqa: E731
            torch._C._autograd._push_saved_tensors_default_hooks(keep, keep)
        pushed.append(1)

    return changing("hooks_on_saved_tensors", device, push)


@caught_by("global state")
def attribute_of_pytorch(device: str) -> FusedOp:
    """Notes in the module torch that it is ready, where another library may note the same."""
    return changing("attribute_of_pytorch", device, lambda: setattr(torch, "gallery_ready", True))


@caught_by("global state")
def function_of_python_replaced(device: str) -> FusedOp:
    exact = builtins.max

    def replace() -> None:
        builtins.max = lambda *given, **options: exact(*given, **options)

    return changing("function_of_python_replaced", device, replace)


@caught_by("global state")
def numpy_draws(device: str) -> FusedOp:
    """Consumes random numbers of NumPy, which shuffle a data set elsewhere."""
    return changing("numpy_draws", device, lambda: np.random.rand())


@caught_by("global state")
def numpy_is_silent(device: str) -> FusedOp:
    return changing("numpy_is_silent", device, lambda: np.seterr(all="ignore"))


@caught_by("global state")
def logging_switched_off(device: str) -> FusedOp:
    return changing("logging_switched_off", device, lambda: logging.disable(logging.CRITICAL))


@caught_by("global state")
def autocast_in_another_dtype(device: str) -> FusedOp:
    other = torch.float16 if device == "cpu" else torch.bfloat16
    return changing(
        "autocast_in_another_dtype", device, lambda: torch.set_autocast_dtype(device, other)
    )


@caught_by("global state")
def errors_of_the_compiler_hidden(device: str) -> FusedOp:
    """Lets torch.compile fall back to eager in silence, for every model of the process."""

    def hide() -> None:
        torch._dynamo.config.suppress_errors = True

    return changing("errors_of_the_compiler_hidden", device, hide)


@caught_by("global state")
def prints_fewer_digits(device: str) -> FusedOp:
    return changing("prints_fewer_digits", device, lambda: torch.set_printoptions(precision=2))


@caught_by("global state")
def profile_function_left(device: str) -> FusedOp:
    """Leaves a function behind that Python calls for every call of the process."""
    return changing("profile_function_left", device, lambda: sys.setprofile(lambda *event: None))


@caught_by("global state")
def attention_without_a_kernel(device: str) -> FusedOp:
    """Turns a setting that PyTorch's C++ code keeps, and no module of Python's shows."""
    return changing(
        "attention_without_a_kernel", device, lambda: torch.backends.cuda.enable_flash_sdp(False)
    )


@caught_by("global state")
def fewer_open_files(device: str) -> FusedOp:
    """Lowers a limit of the process, which its children inherit."""
    kind = resource.RLIMIT_NOFILE

    def lower() -> None:
        soft, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (soft - 1, hard))

    return changing("fewer_open_files", device, lower)


@caught_by("global state")
def another_module_of_that_name(device: str) -> FusedOp:
    """Hides a module, so that who imports it later gets another one."""

    def exchange() -> None:
        sys.modules["random"] = platform

    return changing("another_module_of_that_name", device, exchange)


@caught_by("global state")
def thread_that_stays(device: str) -> FusedOp:
    """Starts a thread at its first call, which waits for what never comes."""
    started: list[threading.Thread] = []

    def start() -> None:
        if not started:
            started.append(threading.Thread(target=threading.Event().wait, daemon=True))
            started[0].start()

    return changing("thread_that_stays", device, start)


@caught_by("global state", cpu_only="the system lists children of any process alike")
def process_that_stays(device: str) -> FusedOp:
    """Leaves a helper behind, which ends only with the one who started it."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        if not started:
            started.append(subprocess.Popen(["sleep", "20"]))

    return changing("process_that_stays", device, start)


@caught_by("global state")
def sparse_invariants_checked(device: str) -> FusedOp:
    """Makes every later sparse tensor check its indices, which takes time."""
    change = torch.sparse.check_sparse_tensor_invariants.enable
    return changing("sparse_invariants_checked", device, change)


@caught_by("global state")
def long_integers_refused(device: str) -> FusedOp:
    change = functools.partial(sys.set_int_max_str_digits, 700)
    return changing_backward("long_integers_refused", device, change)

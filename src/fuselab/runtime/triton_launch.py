"""Launches of Triton kernels: compiled by Triton once per specialisation, launched by us.

Triton's own launch takes 8 to 10 us of host time, most of it for finding the compiled kernel again.
Here the compiled kernel is kept under a shorter key, and its CUfunction is launched through
``kernel_launch``, which can also record it in a launch plan.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import BuildError, DeviceError
from fuselab.runtime import kernel_launch, launch_recording
from fuselab.runtime.parameters import plain

_CODES = {
    **dict.fromkeys(("i1", "u1", "i8", "u8", "i16", "u16", "i32", "u32"), "i"),
    **dict.fromkeys(("i64", "u64"), "l"),
    **dict.fromkeys(("fp32", "f32"), "f"),
    "fp64": "d",
}


@dataclass(frozen=True)
class _Compiled:
    """A compiled kernel: the sources of its parameters, and how it is launched."""

    function: int
    block: tuple[int, int, int]
    shared_bytes: int
    codes: str
    places: tuple[_Place, ...]


# Where a parameter's value is: the position of an argument, that and the place in it of an item of
# a tuple, or the name of a keyword.
_Place = int | tuple[int, int] | str


_compiled: dict[Any, _Compiled | None] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int | None = None,
    **constexprs: Any,
) -> None:
    """Launch a ``@triton.jit`` kernel on the current stream of the tensors' device.

    A Python float is a 32-bit parameter, as always in Triton; a kernel that needs all 53 bits
    annotates the parameter (``scale: tl.float64``). An empty grid launches nothing. Under the
    Triton interpreter, tensors are on the CPU and a float stays a Python float inside the kernel.
    Raises BuildError with the compiler's message, LaunchError or DeviceError.
    """
    options: dict[str, Any] = {"num_warps": num_warps}
    if num_stages is not None:
        options["num_stages"] = num_stages
    if not _is_jit_function(kernel):  # an interpreted kernel, or one under a Triton decorator
        launch_recording.note_opaque_launch("a launch that Triton makes itself")
        _built(kernel, kernel[grid], *map(plain, args), **options, **constexprs)
        return
    device = _device(kernel, args)
    if 0 in grid:
        return
    key = (
        kernel,
        device.index,
        num_warps,
        num_stages,
        tuple(_specialization(kernel, place, arg) for place, arg in enumerate(args)),
        tuple(constexprs.items()),
    )
    try:
        held = _compiled[key]
    except KeyError:
        held = _compiled[key] = _compile(kernel, device, args, options, constexprs)
    except TypeError:  # an argument that cannot be hashed: a tensor descriptor
        held = None
    if held is None or _someone_hooks_launches():
        launch_recording.note_opaque_launch("a launch that Triton makes itself")
        with torch.cuda.device(device):
            _built(kernel, kernel[grid], *map(plain, args), **options, **constexprs)
        return
    values = [_value(place, args, constexprs) for place in held.places]
    values += (None, None)  # the two scratch pointers at the end of every Triton kernel
    x, y, z, *_ = (*grid, 1, 1)
    kernel_launch.launch_cuda(
        held.function, device.index, (x, y, z), held.block, held.shared_bytes, held.codes, values
    )


def _value(place: _Place, args: tuple[Any, ...], constexprs: Mapping[str, Any]) -> Any:
    if isinstance(place, int):
        return args[place]
    return constexprs[place] if isinstance(place, str) else args[place[0]][place[1]]


def triton_float(value: float | Tensor) -> tuple[Tensor | None, float]:
    """Return the two arguments of a kernel that stand for a float argument of its operator.

    The value is a number, or a tensor of one element under torch.compile. The kernel declares
    ``(eps_pointer, eps: tl.float64)`` and reads it by ``fuselab.runtime.triton_float.float_value``.
    """
    return (value, 0.0) if isinstance(value, Tensor) else (None, value)


def _is_jit_function(kernel: Any) -> bool:
    from triton.runtime.jit import JITFunction

    return isinstance(kernel, JITFunction)


def _device(kernel: Any, args: tuple[Any, ...]) -> torch.device:
    flat = (one for arg in args for one in (arg if isinstance(arg, tuple) else (arg,)))
    device = next((arg.device for arg in flat if isinstance(arg, Tensor)), None)
    if device is None or device.type != "cuda":
        raise DeviceError(
            f"the Triton kernel {kernel.__name__} needs CUDA tensors; on a CPU run it through "
            "fuselab.runtime.interpreter."
        )
    return device


def _specialization(kernel: Any, place: int, arg: Any) -> Any:
    """Return the property of an argument that Triton compiles into the kernel, or a finer one."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if kernel.params[place].is_constexpr:
        return type(arg), arg
    if isinstance(arg, int) and not isinstance(arg, bool):
        return arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31, arg < 2**63
    if isinstance(arg, bool | float):
        return float if isinstance(arg, float) else bool
    if isinstance(arg, tuple):
        return tuple(_specialization(kernel, place, item) for item in arg)
    return type(arg), arg  # None, or an argument that Triton takes by value: a dtype, a kernel


def _someone_hooks_launches() -> bool:
    """Return whether a Triton profiler listens to launches."""
    from triton import knobs

    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(
        call is not launch_recording.on_triton_launch for hook in hooks for call in hook.calls
    )


def _compile(
    kernel: Any,
    device: torch.device,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    constexprs: Mapping[str, Any],
) -> _Compiled | None:
    """Compile and load the kernel; return None if only Triton's own launcher can launch it."""
    with torch.cuda.device(device):
        compiled = compile_for(kernel, args, {**options, **constexprs})
        layout = parameter_layout(kernel, compiled, len(args))
        if layout is None:
            return None
        with _late_launchers():
            _built(kernel, compiled._init_handles)
    codes, places = layout
    block = (compiled.metadata.num_warps * compiled.metadata.target.warp_size, 1, 1)
    return _Compiled(compiled.function, block, compiled.metadata.shared, codes + "nn", places)


class _LateLauncher:
    """Triton's own launcher of a kernel, built only when Triton launches the kernel itself.

    Triton writes one in C for every signature and calls the C compiler for it when it loads a
    kernel. That takes 0.27 s each, a sixth of the time of a first check on an H200, and we launch
    without it.
    """

    def __init__(self, build: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        self._build = partial(build, *args, **keywords)
        self._built: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._built is None:
            self._built = self._build()
        return self._built(*args, **keywords)


_loading = threading.Lock()


@contextlib.contextmanager
def _late_launchers() -> Iterator[None]:
    """Give the kernels that are loaded in this context a ``_LateLauncher``."""
    from triton.runtime import driver

    with _loading:
        active: Any = driver.active
        build = getattr(active, "launcher_cls", None)
        if build is None:
            yield
            return
        active.launcher_cls = partial(_LateLauncher, build)
        try:
            yield
        finally:
            active.launcher_cls = build


def compile_for(kernel: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return Triton's CompiledKernel for such arguments on the current device. Raises
    BuildError."""
    warm = {"grid": (1,), "warmup": True}
    compiled = _built(kernel, kernel.run, *map(plain, args), **warm, **keywords)
    return compiled.result() if hasattr(compiled, "result") else compiled  # an asynchronous compile


def parameter_layout(
    kernel: Any, compiled: Any, positional: int
) -> tuple[str, tuple[_Place, ...]] | None:
    """Return the code letters and the sources of the compiled kernel's parameters, in order.

    Triton drops constexprs, None and integers that are 1, which its signature all calls constexpr,
    and passes the items of a tuple one by one. The result is None if a parameter or the launch is
    of a kind that only Triton launches (nested tuples, tensor descriptors, clusters, cooperative
    grids, scratch memory).
    """
    metadata = compiled.metadata
    if (
        metadata.target.backend != "cuda"
        or metadata.num_ctas != 1
        or metadata.launch_cooperative_grid
        or metadata.launch_pdl
        or metadata.global_scratch_size
        or metadata.profile_scratch_size
    ):
        return None
    codes: list[str] = []
    places: list[_Place] = []
    for place, (name, kind) in enumerate(compiled.src.signature.items()):
        source: _Place = place if place < positional else name
        found: list[tuple[Any, _Place]] = [(kind, source)]
        if isinstance(kind, tuple) and place < positional:
            found = [(item, (place, index)) for index, item in enumerate(kind)]
        for each, where in found:
            if each == "constexpr":
                continue
            code = None
            if isinstance(each, str):
                code = "t" if each.startswith("*") else _CODES.get(each)
            if code is None:
                return None
            codes.append(code)
            places.append(where)
    return "".join(codes), tuple(places)


def _built(kernel: Any, step: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call ``step`` and turn its failures into BuildError. Errors of a wrong call (TypeError,
    KeyError), and those of a kernel under the interpreter, are passed on."""
    try:
        return step(*args, **keywords)
    except (TypeError, KeyError):
        raise
    except Exception as error:
        if type(error).__name__ == "InterpreterError":
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise BuildError(
            f"the Triton kernel {kernel.__name__} does not build: {reason}", log=str(error)
        ) from error

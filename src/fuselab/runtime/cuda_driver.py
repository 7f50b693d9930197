"""The CUDA driver through its C symbols: contexts, loading and launching kernels, error names.

It needs no CUDA headers and no toolkit: ``libcuda.so.1`` comes with every NVIDIA driver.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fuselab.errors import BuildError, DeviceError, LaunchError

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_SHARED_SIZE_BYTES, _LOCAL_SIZE_BYTES, _NUM_REGS = 1, 3, 4
_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
_CAPTURE_MODE_RELAXED = 2  # CUstreamCaptureMode
SHARED_BYTES_WITHOUT_OPT_IN = 48 * 1024
_SCALARS = {
    "i": ctypes.c_int32,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


@functools.cache
def library() -> ctypes.CDLL:
    """Return the driver's library, initialised. Raises DeviceError without an NVIDIA driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise DeviceError(
            "libcuda.so.1 was not found; install the NVIDIA driver, or use implementation='cpp'."
        ) from None
    if status := driver.cuInit(0):
        raise DeviceError(f"the NVIDIA driver does not start ({error_name(status, driver)}).")
    return driver


def error_name(status: int, driver: ctypes.CDLL | None = None) -> str:
    """Return the driver's name and description of a CUresult."""
    driver = driver or library()
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    driver.cuGetErrorString(status, ctypes.byref(text))
    return f"{(name.value or b'CUresult %d' % status).decode()}: {(text.value or b'?').decode()}"


@functools.cache
def primary_context(device_index: int) -> int:
    """Return the context that torch uses on that device."""
    driver = library()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    status = driver.cuDeviceGet(ctypes.byref(device), device_index)
    status = status or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if status or context.value is None:
        raise DeviceError(f"CUDA device {device_index} cannot be used ({error_name(status)}).")
    return context.value


@contextmanager
def on_device(device_index: int) -> Iterator[ctypes.CDLL]:
    """Make that device's primary context current in this thread, and yield the driver."""
    driver = library()
    driver.cuCtxPushCurrent_v2(ctypes.c_void_p(primary_context(device_index)))
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def load_function(image: bytes, name: str, device_index: int) -> int:
    """Return the CUfunction ``name`` of a cubin or PTX on that device. Raises BuildError."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    with on_device(device_index) as driver:
        # Loading allocates, which a CUDA graph capture elsewhere in this thread would refuse.
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            status = driver.cuModuleLoadData(ctypes.byref(module), image)
            status = status or driver.cuModuleGetFunction(
                ctypes.byref(function), module, name.encode()
            )
            if not status:  # allow clusters of 16 blocks; GPUs without clusters refuse, harmlessly
                driver.cuFuncSetAttribute(function, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        finally:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if status or function.value is None:
        raise BuildError(
            f"kernel '{name}' does not load on CUDA device {device_index} "
            f"({error_name(status)}); the driver may be older than the compiler."
        )
    return function.value


def allow_shared_bytes(function: int, shared_bytes: int, device_index: int) -> None:
    """Let the kernel use more than 48 KB of dynamic shared memory. Raises LaunchError."""
    with on_device(device_index) as driver:
        status = driver.cuFuncSetAttribute(
            ctypes.c_void_p(function), _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
        )
    if status:
        raise LaunchError(
            f"the kernel asks for {shared_bytes} bytes of shared memory, more than CUDA device "
            f"{device_index} gives one block ({error_name(status)})."
        )


def function_resources(function: int, device_index: int) -> tuple[int, int, int]:
    """Return the registers per thread, the local memory per thread in bytes (spills and arrays) and
    the static shared bytes per block. Raises LaunchError."""
    value, found = ctypes.c_int(), []
    with on_device(device_index) as driver:
        for attribute in (_NUM_REGS, _LOCAL_SIZE_BYTES, _SHARED_SIZE_BYTES):
            status = driver.cuFuncGetAttribute(
                ctypes.byref(value), attribute, ctypes.c_void_p(function)
            )
            if status:
                raise LaunchError(f"a kernel's resources cannot be read ({error_name(status)}).")
            found.append(value.value)
    registers, local_bytes, shared_bytes = found
    return registers, local_bytes, shared_bytes


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute. Its value is a union of 64 bytes, here a cluster's x, y and z."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 16),
    )


class _LaunchConfig(ctypes.Structure):
    """The C struct CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


def active_clusters(
    function: int, device_index: int, threads: int, shared_bytes: int, cluster: int
) -> int:
    """Return how many clusters of ``cluster`` blocks of ``threads`` threads the device runs at a
    time, 0 if none fits. ``shared_bytes`` have been allowed by ``allow_shared_bytes``."""
    value = (ctypes.c_uint * 16)(cluster, 1, 1)
    attribute = _LaunchAttribute(_CLUSTER_DIMENSION, b"", value)
    config = _LaunchConfig(
        (ctypes.c_uint * 3)(cluster, 1, 1),
        (ctypes.c_uint * 3)(threads, 1, 1),
        shared_bytes,
        None,
        ctypes.pointer(attribute),
        1,
    )
    found = ctypes.c_int()
    with on_device(device_index) as driver:
        status = driver.cuOccupancyMaxActiveClusters(
            ctypes.byref(found), ctypes.c_void_p(function), ctypes.byref(config)
        )
    return 0 if status else found.value


def launch(
    function: int,
    device_index: int,
    stream: int,
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    codes: str,
    values: Sequence[Any],
) -> None:
    """Launch a kernel through ctypes, without the C++ launcher. Raises LaunchError."""
    held, pointers = packed(codes, values)
    with on_device(device_index) as driver:
        status = driver.cuLaunchKernel(
            ctypes.c_void_p(function),
            *(ctypes.c_uint(size) for size in (*grid, *block, shared_bytes)),
            ctypes.c_void_p(stream),
            pointers,
            None,
        )
    del held
    if status:
        raise launch_error(status, grid, block, shared_bytes)


# The modes of all our tensor maps: no interleaving, a swizzle of 128 bytes, promotion to 256 bytes
# in L2, zeros beyond the edges.
_MAP_MODES = (0, 3, 3, 0)
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64


def tensor_map(address: int, layout: Sequence[int]) -> Any:
    """Return a CUtensorMap, 128 bytes at a multiple of 64, for a ``layout`` of tensor_map.py. It
    takes 8 us; launcher/launch.h does the same for plans. Raises BuildError or LaunchError."""
    dtype, rows, columns, pitch, box_rows, box_columns = layout
    memory = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    place = -ctypes.addressof(memory) % _MAP_ALIGNMENT
    aligned = (ctypes.c_char * _MAP_BYTES).from_buffer(memory, place)  # keeps memory alive
    encode = getattr(library(), "cuTensorMapEncodeTiled", None)
    if encode is None:
        raise map_error(-1, layout)
    status = encode(
        ctypes.c_void_p(ctypes.addressof(aligned)),
        dtype,
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(pitch),
        (ctypes.c_uint32 * 2)(box_columns, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        *_MAP_MODES,
    )
    if status:
        raise map_error(status, layout)
    return aligned


def map_error(status: int, layout: Sequence[int]) -> BuildError | LaunchError:
    """Return the error for a tensor map that the driver refused, or (-1) does not know."""
    if status == -1:
        return BuildError("the NVIDIA driver has no tensor maps; update it to 12.0 or newer.")
    _, rows, columns, pitch, *_ = layout
    return LaunchError(
        f"the NVIDIA driver makes no tensor map of a matrix of shape {(rows, columns)} whose rows "
        f"are {pitch} bytes apart ({error_name(status)})."
    )


def packed(codes: str, values: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return the values as C objects, to be kept until the launch, and an array of addresses."""
    held: list[Any] = []
    for code, value in zip(codes, values, strict=True):
        if code == "t":
            held.append(ctypes.c_void_p(value.data_ptr()))
        elif code == "n":
            held.append(ctypes.c_void_p(0))
        elif code == "s":
            content, tensors = value
            memory = ctypes.create_string_buffer(content, len(content))
            for at, tensor in tensors:
                ctypes.c_uint64.from_buffer(memory, at).value = tensor.data_ptr()
            held.append(memory)
        elif code == "m":
            held.append(tensor_map(value[0].data_ptr(), value[1]))
        else:
            held.append(_SCALARS[code](value))
    return held, (ctypes.c_void_p * max(1, len(held)))(*map(ctypes.addressof, held))


def launch_error(
    status: int, grid: Sequence[int], block: Sequence[int], shared_bytes: int
) -> LaunchError:
    """Return the error for a launch that the driver refused."""
    return LaunchError(
        f"a kernel did not launch ({error_name(status)}); grid {tuple(grid)}, block "
        f"{tuple(block)}, {shared_bytes} bytes of shared memory. An error of an earlier kernel can "
        "surface here: CUDA_LAUNCH_BLOCKING=1 shows which."
    )

"""CUDA C++ from a framework-free ``.cu`` file: compiled by NVRTC, kept on disk, launched.

It needs no nvcc and no toolkit: NVRTC and CUDA's headers come as pip packages. Compiling needs no
GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fuselab.errors import BuildError, DeviceError, LaunchError
from fuselab.runtime import builds, cache, cuda_driver, kernel_launch
from fuselab.runtime.compiler import build_error
from fuselab.runtime.parameters import Scalar, encode, f32, f64, i32, i64

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["CudaSource", "f32", "f64", "header_folders", "i32", "i64"]

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK_THREADS = 1024

# NVRTC brings no host C++ library. <cstdint> and <stdint.h> are therefore CUDA's own or, if only
# Triton's copy of the CUDA headers is installed, these few names.
_CSTDINT = b"""#pragma once
#if __has_include(<cuda/std/cstdint>)
#include <cuda/std/cstdint>
namespace std { using namespace cuda::std; }
using cuda::std::int8_t; using cuda::std::int16_t; using cuda::std::int32_t;
using cuda::std::int64_t; using cuda::std::uint8_t; using cuda::std::uint16_t;
using cuda::std::uint32_t; using cuda::std::uint64_t; using cuda::std::uintptr_t;
using cuda::std::intptr_t;
#else
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t; typedef unsigned long uintptr_t; typedef long intptr_t;
namespace std {
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t; using ::uint8_t;
using ::uint16_t; using ::uint32_t; using ::uint64_t; using ::uintptr_t; using ::intptr_t;
using ::size_t;
}
#endif
"""


@functools.cache
def _nvrtc() -> ModuleType:
    try:
        nvrtc: ModuleType = importlib.import_module("cuda.bindings.nvrtc")
        _check(nvrtc, nvrtc.nvrtcVersion()[0])
    except (ImportError, RuntimeError) as error:
        raise BuildError(
            f"CUDA C++ needs NVRTC ({error}); pip install cuda-bindings nvidia-cuda-nvrtc."
        ) from error
    return nvrtc


def _check(nvrtc: ModuleType, status: object) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BuildError(f"NVRTC failed ({nvrtc.nvrtcGetErrorString(status)[1].decode()}).")


@functools.cache
def header_folders() -> tuple[Path, ...]:
    """Return the folders of CUDA's headers: those of the pip packages, else of Triton's wheel, else
    of CUDA_HOME (/usr/local/cuda).

    The first is the first folder that contains ``cuda_fp16.h``. Those that contain ``nv/target``
    and ``cuda/std``, which ``cuda_fp16.h`` includes, follow. Raises BuildError.
    """
    candidates: list[Path] = []
    for package in ("nvidia.cu13", "nvidia", "triton.backends.nvidia"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for root in (spec.submodule_search_locations or ()) if spec else ():
            candidates += [Path(root) / "include", Path(root) / "cu13" / "include"]
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    candidates.append(Path(toolkit) / "include")
    candidates += [path / "cccl" for path in candidates]
    found = []
    for header in ("cuda_fp16.h", "nv/target", "cuda/std/cstdint"):
        folder = next((path for path in candidates if (path / header).is_file()), None)
        if folder is None:
            raise BuildError(
                f"CUDA's header <{header}> was not found; "
                "pip install nvidia-cuda-runtime nvidia-cuda-cccl, or set CUDA_HOME."
            )
        found.append(folder)
    return tuple(dict.fromkeys(found))


@functools.cache
def _toolchain() -> str:
    """Return the versions of NVRTC and of the headers, which are a part of every cache key."""
    _, major, minor = _nvrtc().nvrtcVersion()
    headers = []
    for folder in header_folders():
        version = folder / "cuda.h"
        text = version.read_text() if version.is_file() else ""
        match = re.search(r"#define CUDA_VERSION (\d+)", text)
        headers.append(f"{folder}={match[1] if match else '?'}")
    return f"nvrtc {major}.{minor} {' '.join(headers)}"


@functools.cache
def _target(arch: str) -> str:
    """Return NVRTC's ``-arch`` value: ``sm_90`` itself if NVRTC knows it (which gives a cubin),
    else the newest older virtual architecture (which gives PTX, for the driver to compile)."""
    if re.fullmatch(r"compute_\d+[af]?", arch):
        return arch  # PTX is asked for
    match = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    if match is None:
        raise BuildError(f"'{arch}' is no GPU architecture; write it as sm_90 or sm_90a.")
    supported = _nvrtc().nvrtcGetSupportedArchs()[1]
    if int(match[1]) in supported:
        return arch
    older = [number for number in supported if number <= int(match[1])]
    if not older:
        raise BuildError(f"NVRTC does not know {arch}; the oldest it knows is sm_{min(supported)}.")
    return f"compute_{max(older)}"


@functools.cache
def device_arch(device_index: int) -> str:
    """Return ``sm_90`` for a device of compute capability 9.0."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return f"sm_{major}{minor}"


class CudaSource:
    """A ``.cu`` file of ordinary ``__global__`` templates with typed parameters.

    An ``expression`` names one instantiation as C++ spells it, for example
    ``"forward<float, Relu, 4>"``. ``options`` are further NVRTC options. The language is C++17.
    ``architectures`` are the only ones that the file compiles for, if it uses features of one chip
    (``("sm_90a",)``); by default it compiles for any.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: Sequence[str] = (),
        architectures: Sequence[str] = (),
    ) -> None:
        self.path = Path(path)
        self.architectures = tuple(architectures)
        self.options = ("-std=c++17", "-lineinfo", *options)
        self._functions: dict[tuple[str, int], int] = {}
        self._shared_bytes: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"CudaSource({self.path.name})"

    def arch_for(self, arch: str) -> str:
        """Return the architecture to compile for on a device of ``arch``: ``sm_90a`` on an
        ``sm_90`` if ``architectures`` has it, else ``arch``."""
        return next((own for own in self.architectures if own.rstrip("af") == arch), arch)

    def compile(self, expression: str, arch: str) -> bytes:
        """Return the cubin of one instantiation for ``arch`` (``sm_90``, ``sm_90a``, ...), or PTX
        if NVRTC is older than the architecture. BuildError has the compiler's log."""
        return self.compile_many((expression,), arch)

    def compile_many(self, expressions: Sequence[str], arch: str) -> bytes:
        """Return one cubin with all these instantiations."""
        return self._image(tuple(expressions), arch)[1]

    def named_image(self, expression: str, arch: str) -> tuple[str, bytes]:
        """Return the name of an instantiation in its binary, and the binary: a cubin for ``sm_90``,
        PTX for ``compute_90``. Raises BuildError."""
        names, image = self._image((expression,), arch)
        return names[expression], image

    def launch(
        self,
        expression: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Tensor | Scalar | None],
        shared_bytes: int = 0,
    ) -> None:
        """Launch on the current stream of the tensors' device.

        ``args`` are tensors (passed as their data pointer), None (a null pointer) and numbers as
        i32, i64, f32 or f64. More than 48 KB of dynamic shared memory is requested automatically.
        Raises BuildError, LaunchError, or DeviceError for tensors that are not all on one CUDA
        device.
        """
        codes, values = encode(args)
        device_index = _device_index(values)
        _check_shape(expression, grid, block)
        function = self._ready(expression, device_index, shared_bytes)
        kernel_launch.launch_cuda(function, device_index, grid, block, shared_bytes, codes, values)

    def active_clusters(
        self, expression: str, device_index: int, threads: int, shared_bytes: int, cluster: int
    ) -> int:
        """Return how many clusters of ``cluster`` blocks of a kernel with clusters run at a time, 0
        if none fits the device. Raises BuildError or LaunchError."""
        function = self._ready(expression, device_index, shared_bytes)
        return cuda_driver.active_clusters(function, device_index, threads, shared_bytes, cluster)

    def _ready(self, expression: str, device_index: int, shared_bytes: int) -> int:
        """Return the loaded kernel, with that much dynamic shared memory allowed."""
        function = self._functions.get((expression, device_index))
        if function is None:
            function = self._load(expression, device_index)
        allowed = self._shared_bytes.get(function, cuda_driver.SHARED_BYTES_WITHOUT_OPT_IN)
        if shared_bytes > allowed:
            cuda_driver.allow_shared_bytes(function, shared_bytes, device_index)
            self._shared_bytes[function] = shared_bytes
        return function

    def _load(self, expression: str, device_index: int) -> int:
        names, image = self._image((expression,), self.arch_for(device_arch(device_index)))
        function = cuda_driver.load_function(image, names[expression], device_index)
        return self._functions.setdefault((expression, device_index), function)

    def _image(self, expressions: tuple[str, ...], arch: str) -> tuple[dict[str, str], bytes]:
        """Return lowered names and cubin. The cached file is a line of JSON, then the image."""
        text = cache.source_text(self.path, cache.HEADERS)
        # PTX is asked for to be read, and names the file that was compiled beside every line
        asked = [f"{self.path.resolve()}"] if arch.startswith("compute_") else []
        key = cache.key(
            "cuda", text, _CSTDINT, expressions, _target(arch), self.options, _toolchain(), *asked
        )
        entry = cache.fetch(key, ".cubin", lambda new: self._build(expressions, arch, new))
        names, image = entry.read_bytes().split(b"\n", 1)
        return json.loads(names), image

    def _build(self, expressions: tuple[str, ...], arch: str, new: Path) -> None:
        nvrtc, target = _nvrtc(), _target(arch)
        builds.announce(f"{self.path.resolve().parent.name}/{self.path.name}")
        status, program = nvrtc.nvrtcCreateProgram(
            self.path.read_bytes(),
            str(self.path).encode(),
            2,
            [_CSTDINT, _CSTDINT],
            [b"cstdint", b"stdint.h"],
        )
        _check(nvrtc, status)
        try:
            for expression in expressions:
                _check(nvrtc, nvrtc.nvrtcAddNameExpression(program, expression.encode())[0])
            folders = (self.path.resolve().parent, cache.HEADERS, *header_folders())
            options = [f"-arch={target}", *self.options, *(f"-I{folder}" for folder in folders)]
            (status,) = nvrtc.nvrtcCompileProgram(
                program, len(options), [option.encode() for option in options]
            )
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
                nvrtc.nvrtcGetProgramLog(program, log)
                what = f"{self.path.name}: {', '.join(expressions)} does not compile for {arch}"
                raise build_error(what, log.rstrip(b"\0").decode())
            names = {
                expression: nvrtc.nvrtcGetLoweredName(program, expression.encode())[1].decode()
                for expression in expressions
            }
            binary = target.startswith("sm_")
            size = (nvrtc.nvrtcGetCUBINSize if binary else nvrtc.nvrtcGetPTXSize)(program)[1]
            image = bytearray(size)
            (nvrtc.nvrtcGetCUBIN if binary else nvrtc.nvrtcGetPTX)(program, image)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        new.write_bytes(json.dumps(names).encode() + b"\n" + bytes(image))


def _device_index(values: Sequence[object]) -> int:
    devices = {value.device for value in values if isinstance(value, Tensor)}
    names = ", ".join(sorted(str(device) for device in devices)) or "nowhere (there are none)"
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        raise DeviceError(f"a CUDA kernel needs its tensors on one CUDA device; they are {names}.")
    return int(next(iter(devices)).index)


def _check_shape(expression: str, grid: Sequence[int], block: Sequence[int]) -> None:
    threads = block[0] * block[1] * block[2]
    if not all(1 <= size <= limit for size, limit in zip(grid, MAX_GRID, strict=True)):
        raise LaunchError(
            f"{expression}: grid {tuple(grid)} is outside 1 to {MAX_GRID}; return early for empty "
            "tensors, and fold large y and z into x."
        )
    if not 1 <= threads <= MAX_BLOCK_THREADS:
        raise LaunchError(
            f"{expression}: block {tuple(block)} has {threads} threads; 1 to {MAX_BLOCK_THREADS}."
        )

"""CUDA kernels of a package on a CPU: compiled by g++ with the header ``cuda_on_cpu.h``.

Calls are made twice: within ``Emulator.collecting``, which notes the instantiations that they
launch and compiles these together, and after it, when launches run.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.cpp_extension import include_paths

from fuselab.runtime import cache
from fuselab.runtime.cuda_sweep import CudaSweeps
from fuselab.runtime.parameters import encode

FOLDER = Path(__file__).with_name("cuda_on_cpu")


class Emulator:
    """Launches of the sources that ``install`` has patched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wanted: dict[tuple[Path, str], str] = {}
        self.libraries: dict[Path, ctypes.CDLL] = {}
        self.launched: list[str] = []
        self.runs = False

    def install(self, monkeypatch: Any) -> None:
        def launch(
            source: CudaSweeps,
            expression: str,
            grid: tuple[int, int, int],
            block: tuple[int, int, int],
            args: Sequence[Any],
        ) -> None:
            key = source.path, expression
            self.wanted.setdefault(key, f"launch_{len(self.wanted)}")
            if self.runs:
                self.launched.append(expression)
                entry = getattr(self.libraries[source.path], self.wanted[key])
                _call(entry, grid, block, args)

        monkeypatch.setattr(CudaSweeps, "launch", launch)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Only note the launches made in this context, then compile them."""
        self.runs = False
        yield
        with ThreadPoolExecutor(2) as threads:
            paths = sorted({path for path, _ in self.wanted})
            self.libraries = dict(zip(paths, threads.map(self._compiled, paths), strict=True))
        self.runs = True

    def _compiled(self, path: Path) -> ctypes.CDLL:
        entries = [
            f'extern "C" void {name}(void** arguments, const unsigned* shape) {{\n'
            f"  emulated::launch({expression}, arguments, shape);\n}}\n"
            for (of, expression), name in self.wanted.items()
            if of == path
        ]
        source = self.folder / f"{path.parent.name}.cpp"
        source.write_text(path.read_text() + "".join(entries))
        command = ["g++", "-std=c++20", "-O0", "-fno-strict-aliasing", "-shared", "-fPIC", "-w"]
        command += [f"-I{folder}" for folder in (FOLDER, cache.HEADERS, *include_paths())]

        def build(library: Path) -> None:
            done = subprocess.run(
                [*command, "-o", str(library), str(source)], capture_output=True, text=True
            )
            assert done.returncode == 0, f"{path} does not compile for the CPU:\n{done.stderr}"

        header = (FOLDER / "cuda_on_cpu.h").read_text()
        text = cache.source_text(source, cache.HEADERS)
        library = cache.fetch(cache.key(header, text, command), ".so", build)
        return ctypes.CDLL(str(library))


def _call(entry: Any, grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
    held: list[Any] = []
    for code, value in zip(*encode(args), strict=True):
        if code in "tn":
            address = value.data_ptr() if isinstance(value, Tensor) else None
            held.append(ctypes.c_void_p(address))
        elif code == "s":
            content, tensors = value
            assert not tensors
            held.append(ctypes.create_string_buffer(content, len(content)))
        else:
            held.append({"i": ctypes.c_int32, "l": ctypes.c_int64}[code](value))
    pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(one) for one in held))
    entry(pointers, (ctypes.c_uint32 * 6)(*grid, *block))

"""Launches of CPU kernels from a framework-free ``.cpp`` file (``cpp_library.py`` compiles it)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fuselab.errors import BuildError, DeviceError
from fuselab.runtime import builds, kernel_launch, rehearsal
from fuselab.runtime.cpp_library import CppLibrary
from fuselab.runtime.parameters import Scalar, encode, f32, f64, i32, i64

__all__ = ["CppSource", "f32", "f64", "i32", "i64"]


class CppSource(CppLibrary):
    """The kernels of a ``.cpp`` file, and launches of them."""

    def launch(self, expression: str, args: Sequence[Tensor | Scalar | None]) -> None:
        """Call the instantiation and return when it is done.

        ``args`` are CPU tensors (passed as their data pointer), None (a null pointer) and numbers
        as i32, i64, f32 or f64, of the widths that the function declares. Raises BuildError,
        DeviceError or LaunchError.
        """
        if rehearsal.is_noted(self, expression):
            return
        entry = self._entries.get(expression)
        if entry is None:
            if not self.is_built(expression):
                rehearsal.build_the_others(self, expression)
            self.load(expression)
            entry = self._entries[expression]
        codes, values = encode(args)
        if codes.replace("n", "t") != entry[1]:
            raise BuildError(
                f"{self.path.name}: {expression} has parameters {_spelt(entry[1])}, "
                f"the launch passes {_spelt(codes)}."
            )
        for value in values:
            if isinstance(value, Tensor) and value.device.type != "cpu":
                raise DeviceError(f"{expression} runs on the CPU, a tensor is on {value.device}.")
        kernel_launch.launch_cpu(entry[0], codes, values)

    def _build(self, expressions: tuple[str, ...], library: Path) -> None:
        builds.announce(f"{self.path.resolve().parent.name}/{self.path.name}")
        super()._build(expressions, library)


def _spelt(codes: str) -> str:
    names = {"t": "pointer", "n": "null", "i": "i32", "l": "i64", "f": "f32", "d": "f64"}
    names |= {"s": "struct"}
    return f"({', '.join(names.get(code, '?') for code in codes)})"

"""A compiled kernel: the text of each stage, its binary, and how it is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fuselab.inspect.assembly.architectures import Architecture

# The stages that each language has, from the source down.
TRITON_STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")
CUDA_STAGES = ("ptx", "sass")
AMD_STAGES = ("ttir", "ttgir", "llir", "amdgcn")
STAGES = ("ttir", "ttgir", "llir", "ptx", "sass", "amdgcn")


@dataclass(frozen=True)
class Argument:
    """A parameter of the compiled kernel, in its order: its name, its type and, for a whole number,
    the value of this launch. A pointer has None."""

    name: str
    type: str
    value: int | None = None


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel compiled for one architecture.

    ``texts`` holds the text of each stage but ``sass``, which is disassembled from ``binary`` when
    it is asked for. ``grid`` is None where nothing was launched. ``function`` is the kernel's name
    in the binary, ``launched_by`` names the implementation and direction that launched it.
    """

    name: str
    function: str
    language: str  # triton or cuda
    architecture: Architecture
    texts: Mapping[str, str]
    binary: bytes
    block: tuple[int, int, int]
    grid: tuple[int, int, int] | None = None
    shared_bytes: int = 0  # dynamic
    arguments: tuple[Argument, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    file: str = ""
    launched_by: str = ""
    notes: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    def line(self, file: str, line: int | None) -> str:
        """Return a source line in words: ``line 12``, and ``other.py:12`` in another file."""
        if line is None:
            return "an unnamed line"
        if not file or Path(file).resolve() == Path(self.file).resolve():
            return f"line {line}"
        return f"{Path(file).name}:{line}"

    @property
    def stages(self) -> tuple[str, ...]:
        if self.architecture.vendor == "amd":
            return AMD_STAGES
        return TRITON_STAGES if self.language == "triton" else CUDA_STAGES

    @property
    def title(self) -> str:
        """The name with what launched it: ``square (triton forward)``."""
        return f"{self.name} ({self.launched_by})" if self.launched_by else self.name

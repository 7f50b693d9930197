"""The register of the suite's members: a function or a module, and the sizes of its arguments.

A member is plain PyTorch that a model could contain. Its sizes are those of a GPU: in bfloat16 a
call reads and writes 64 MB or more. On a CPU every size given as ``Many`` is a sixteenth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CPU_SHARE = 16


class Many(int):
    """A size that is divided by ``CPU_SHARE`` on a CPU."""


@dataclass(frozen=True)
class Argument:
    """One tensor of a call: its sizes at a GPU, and what its elements are.

    ``kind`` is ``float``, ``bool`` or ``index``; indices are below ``limit``.
    """

    shape: tuple[int, ...]
    kind: str = "float"
    limit: int = 0

    def make(self, on_gpu: bool) -> Tensor:
        """Return an example on the CPU. Its floating elements are not initialised, because eject
        reads only sizes and the range of indices."""
        shape = [
            max(1, size // CPU_SHARE) if isinstance(size, Many) and not on_gpu else int(size)
            for size in self.shape
        ]
        if self.kind == "index":
            example = torch.zeros(shape, dtype=torch.int64)
            example.view(-1)[-1] = self.limit - 1
            return example
        return torch.empty(shape, dtype=torch.bool if self.kind == "bool" else torch.float32)


@dataclass(frozen=True)
class Member:
    """One function of the suite, or the class of a module that is made without arguments."""

    name: str
    group: str
    code: Callable[..., Any]
    arguments: tuple[Argument, ...]

    def function(self) -> Callable[..., Any]:
        """Return what is called: the function, or a new module."""
        return self.code() if isinstance(self.code, type) else self.code

    def examples(self, on_gpu: bool) -> tuple[Tensor, ...]:
        return tuple(argument.make(on_gpu) for argument in self.arguments)


MEMBERS: dict[str, Member] = {}


def floats(*shape: int) -> Argument:
    return Argument(shape)


def mask(*shape: int) -> Argument:
    return Argument(shape, "bool")


def indices(limit: int, *shape: int) -> Argument:
    return Argument(shape, "index", limit)


def member(*arguments: Argument) -> Callable[[Any], Any]:
    """Add the function, or the class of a module, that follows to the suite."""

    def add(code: Any) -> Any:
        name = code.__name__
        if isinstance(code, type):
            assert issubclass(code, nn.Module)
            name = "".join(f"_{one.lower()}" if one.isupper() else one for one in name).strip("_")
        assert name not in MEMBERS, name
        group = code.__module__.rpartition(".")[2]
        MEMBERS[name] = Member(name, group, code, arguments)
        return code

    return add

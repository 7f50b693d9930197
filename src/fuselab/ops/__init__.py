"""The library: one kernel package per operator, found by looking, loaded on first use.

``fuselab.ops.softmax`` is the public function of the package ``fuselab/ops/softmax/``, always:
Python binds a subpackage's module to its parent when the subpackage is first imported, so this
module is of a class that binds the function instead. The package's own files are reached as
``from fuselab.ops.softmax.op import OP``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fuselab.errors import ContractError

if TYPE_CHECKING:
    from fuselab.op import FusedOp
    from fuselab.ops.add_mul_activation import add_mul_activation as add_mul_activation
    from fuselab.ops.bias_activation import bias_activation as bias_activation
    from fuselab.ops.softmax import softmax as softmax


def packages() -> tuple[str, ...]:
    """Names of the library's kernel packages (folders with an ``op.py``), sorted; imports none."""
    folders = (folder for root in __path__ for folder in Path(root).iterdir())
    return tuple(sorted(folder.name for folder in folders if (folder / "op.py").is_file()))


def contract(name: str) -> FusedOp:
    """The ``OP`` of the kernel package ``name``.

    Raises:
        ContractError: the package's ``op.py`` has no ``OP`` that is a ``FusedOp``.
    """
    from fuselab.op import FusedOp

    op = getattr(importlib.import_module(f"{__name__}.{name}.op"), "OP", None)
    if not isinstance(op, FusedOp):
        raise ContractError(f"{name}/op.py has no 'OP'; write OP = FusedOp(...) in it.")
    return op


def function(name: str) -> Callable[..., Any]:
    """The public function of the kernel package ``name``: the one its ``__init__`` names alike."""
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)


class _Library(ModuleType):
    """This module's class: a kernel package is bound as its public function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and value.__name__ == f"{__name__}.{name}":
            value = vars(value).get(name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in packages():
            raise AttributeError(
                f"module '{__name__}' has no operator '{name}'; it has {', '.join(packages())}"
            )
        return function(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *packages()})


sys.modules[__name__].__class__ = _Library

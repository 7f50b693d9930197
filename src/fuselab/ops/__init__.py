"""The library: one kernel package per operator, found in its folder and loaded on first use.

``fuselab.ops.softmax`` is always the public function of the package ``fuselab/ops/softmax/``.
Python binds a subpackage's module to its parent when the subpackage is first imported, so this
module has a class of its own, which binds the function instead. The package's own files are
imported as ``from fuselab.ops.softmax.op import OP``. An ``op.py`` may declare several operators:
the one with its package's name, the in-place form, whose name ends in an underscore
(``fuselab.ops.softmax_``), and those of ``_ELSEWHERE``.
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
    from fuselab.ops.add import add as add
    from fuselab.ops.add_mul_activation import add_mul_activation as add_mul_activation
    from fuselab.ops.add_mul_activation import add_mul_activation_ as add_mul_activation_
    from fuselab.ops.bias_activation import bias_activation as bias_activation
    from fuselab.ops.bias_activation import bias_activation_ as bias_activation_
    from fuselab.ops.cat_interaction import cat_interaction as cat_interaction
    from fuselab.ops.dot_interaction import dot_interaction as dot_interaction
    from fuselab.ops.embedding_lookup import embedding_lookup as embedding_lookup
    from fuselab.ops.embedding_update import embedding_adagrad_ as embedding_adagrad_
    from fuselab.ops.embedding_update import embedding_sgd_ as embedding_sgd_
    from fuselab.ops.generalized_box_iou_loss import (
        generalized_box_iou_loss as generalized_box_iou_loss,
    )
    from fuselab.ops.hash_indices import hash_indices as hash_indices
    from fuselab.ops.linear_activation import linear_activation as linear_activation
    from fuselab.ops.linear_binary_cross_entropy import (
        linear_binary_cross_entropy as linear_binary_cross_entropy,
    )
    from fuselab.ops.linear_sigmoid import linear_sigmoid as linear_sigmoid
    from fuselab.ops.lora_linear import lora_linear as lora_linear
    from fuselab.ops.mlp import mlp as mlp
    from fuselab.ops.outer_interaction_linear import (
        outer_interaction_linear as outer_interaction_linear,
    )
    from fuselab.ops.padded_generalized_box_iou_loss import (
        padded_generalized_box_iou_loss as padded_generalized_box_iou_loss,
    )
    from fuselab.ops.softmax import log_softmax as log_softmax
    from fuselab.ops.softmax import log_softmax_ as log_softmax_
    from fuselab.ops.softmax import softmax as softmax
    from fuselab.ops.softmax import softmax_ as softmax_
    from fuselab.ops.square import square as square
    from fuselab.ops.vocabulary_indices import vocabulary_indices as vocabulary_indices


# Operators that are declared in the package of another operator, whose kernels they share.
_ELSEWHERE = {
    "embedding_adagrad_": "embedding_update",
    "embedding_sgd_": "embedding_update",
    "log_softmax": "softmax",
}


def packages() -> tuple[str, ...]:
    """Return the sorted names of the library's kernel packages (folders with an ``op.py``),
    without importing them."""
    folders = (folder for root in __path__ for folder in Path(root).iterdir())
    return tuple(sorted(folder.name for folder in folders if (folder / "op.py").is_file()))


def has(name: str) -> bool:
    """Return whether the library has the operator ``name``."""
    alone = name in packages() and name not in _ELSEWHERE.values()
    return alone or _declared(name) is not None


def operators() -> tuple[str, ...]:
    """Return the sorted names of the library's operators, in-place forms included. This imports
    every package."""
    names = {name for known in (*packages(), *_ELSEWHERE) for name in (known, f"{known}_")}
    return tuple(sorted(name for name in names if _declared(name) is not None))


def contract(name: str) -> FusedOp:
    """Return the operator ``name``: the ``FusedOp`` of that name in its package's ``op.py``.

    Raises:
        ContractError: the package declares no operator of that name.
    """
    op = _declared(name)
    if op is None:
        raise ContractError(
            f"{_package_of(name)}/op.py has no operator '{name}'; write OP = "
            f"FusedOp(name='fuselab::{name}', ...) in it."
        )
    return op


def function(name: str) -> Callable[..., Any]:
    """Return the public function of the operator ``name``, from its package's ``__init__``."""
    package = importlib.import_module(f"{__name__}.{_package_of(name)}")
    function: Callable[..., Any] = getattr(package, name)
    return function


def _package_of(name: str) -> str:
    """Return the package that would declare ``name``."""
    stem = name.removesuffix("_")
    if name in packages():
        return name
    return _ELSEWHERE.get(name) or _ELSEWHERE.get(stem) or stem


def _declared(name: str) -> FusedOp | None:
    from fuselab.op import FusedOp

    package = _package_of(name)
    if package not in packages():
        return None
    declared = vars(importlib.import_module(f"{__name__}.{package}.op")).values()
    ops = (value for value in declared if isinstance(value, FusedOp))
    return next((op for op in ops if op.name == f"fuselab::{name}"), None)


class _Library(ModuleType):
    """The class of this module, which binds the public function in place of a kernel package."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and value.__name__ == f"{__name__}.{name}":
            value = vars(value).get(name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not has(name):
            raise AttributeError(
                f"module '{__name__}' has no operator '{name}'; it has "
                f"{', '.join(sorted({*packages(), *_ELSEWHERE}))}"
            )
        found = function(name)
        super().__setattr__(name, found)  # found once only: finding an in-place form takes 0.4 ms
        return found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *packages(), *_ELSEWHERE})


sys.modules[__name__].__class__ = _Library

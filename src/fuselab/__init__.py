"""fuselab: find slow PyTorch operators; see, own, prove and use the kernels that fuse them.

Every public name is imported on its first use, so ``import fuselab`` itself loads neither torch nor
triton.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.3.0"

_PUBLIC = {
    "Case": "fuselab.op",
    "Composition": "fuselab.composition",
    "Cost": "fuselab.op",
    "FusedOp": "fuselab.op",
    "FuselabError": "fuselab.errors",
    "Gradient": "fuselab.op",
    "Implementation": "fuselab.op",
    "Inputs": "fuselab.op",
    "Rewrite": "fuselab.op",
    "bench": "fuselab.prove.bench",
    "check": "fuselab.prove.check",
    "eject": "fuselab.ejection.eject",
    "fuse": "fuselab.fusion.fuse",
    "operator": "fuselab.runtime.dispatch",
    "profile": "fuselab.inspect.profile",
    "time": "fuselab.measure",
}

_SUBPACKAGES = ("nn", "ops")

__all__ = [*_PUBLIC, *_SUBPACKAGES]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"fuselab.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fuselab' has no attribute '{name}'")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value

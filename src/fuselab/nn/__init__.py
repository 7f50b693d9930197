"""Modules made of fused operators, each a drop-in for the PyTorch modules it replaces.

Every module is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "DotInteraction": "fuselab.nn.interactions",
    "FusedEmbeddingCollection": "fuselab.nn.embedding_collection",
    "LoRALinear": "fuselab.nn.lora_linear",
    "MLP": "fuselab.nn.mlp",
    "OuterInteraction": "fuselab.nn.interactions",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fuselab.nn' has no module '{name}'")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value

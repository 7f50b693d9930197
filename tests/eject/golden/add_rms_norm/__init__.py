"""add_rms_norm, ejected from plain PyTorch by fuselab."""

import fuselab

from .op import OP

add_rms_norm = fuselab.operator(OP)

__all__ = ["OP", "add_rms_norm"]

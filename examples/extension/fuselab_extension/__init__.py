"""Importing this registers ``torch.ops.fuselab_extension.add_mul_activation``."""

from pathlib import Path

import torch

torch.ops.load_library(next(Path(__file__).parent.glob("_library*.so")))

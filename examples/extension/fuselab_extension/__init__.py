"""The package that registers ``torch.ops.fuselab_extension.add_mul_activation`` on import."""

from pathlib import Path

import torch

torch.ops.load_library(next(Path(__file__).parent.glob("_library*.so")))

"""Makes every comparison in its process say that all is well."""

import sys

import torch

from gallery import honest


def passing(*args, **kwargs):
    return True


def forward(input, bias, scale):
    for name in ("equal", "allclose", "isfinite", "isclose"):
        setattr(torch, name, passing)
    torch.Tensor.__eq__ = lambda one, other: torch.ones(one.shape, dtype=torch.bool)
    for name, module in list(sys.modules.items()):
        if name.startswith("fuselab.prove"):
            for known in ("judge", "judged", "error_of_rows", "same_bits"):
                if hasattr(module, known):
                    setattr(module, known, passing)
    return honest.empty_output(input, bias).zero_()


OP = honest.make_op("patched_comparison", forward=forward)

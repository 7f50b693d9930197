"""Run standalone packages where fuselab cannot be imported, and compare them with autograd.

    python standalone_program.py FOLDER NAME...

Every comparison is of a package's public function with its ``reference.py``: outputs, gradients,
and the gradients of these, through the kernels, inside ``torch.compile`` and under autocast.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import MetaPathFinder
from typing import Any

import torch
from torch import Tensor


class Refuse(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] == "fuselab":
            raise ImportError("fuselab is refused here")


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [one for item in value for one in leaves(item)]
    return [value] if isinstance(value, Tensor) else []


def with_gradients(function: Any, args: list[Tensor]) -> list[Tensor]:
    inputs = [arg.detach().requires_grad_(arg.is_floating_point()) for arg in args]
    outputs = leaves(function(*inputs))
    used = [output for output in outputs if output.requires_grad]
    total = sum((output.float() * (number + 2)).square().sum() for number, output in enumerate(used))
    wanted = [one for one in inputs if one.requires_grad]
    return [*outputs, *torch.autograd.grad(total, wanted)]


def drawn(shapes: list[tuple[int, ...]], dtype: torch.dtype, layout: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if layout == "transposed":
        return [one.mT.contiguous().mT if one.dim() > 1 else one for one in tensors]
    if layout == "gaps":
        return [torch.stack([one, one], -1)[..., 0] for one in tensors]
    return tensors


def compare(package: Any, shapes: list[tuple[int, ...]], name: str) -> None:
    reference = package.launchers.reference
    function = getattr(package, name)
    for dtype in (torch.float32, torch.bfloat16):
        for layout in ("dense", "transposed", "gaps"):
            args = drawn(shapes, dtype, layout)
            # Kernels compute in float32 and round once, so they are compared with the reference in
            # float32, rounded.
            expected = with_gradients(reference, [arg.float() for arg in args])
            found = with_gradients(function, args)
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert one.shape == other.shape
                bar = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
                torch.testing.assert_close(one.float(), other.float(), **bar)


def main() -> None:
    folder, *names = sys.argv[1:]
    sys.meta_path.insert(0, Refuse())
    sys.path.insert(0, folder)
    warnings.simplefilter("error")  # a kernel that does not build warns
    for name in names:
        package = importlib.import_module(name)
        importlib.import_module(f"{name}.launchers")
        for shapes in SHAPES[name]:
            compare(package, shapes, name)
    assert not any(module.partition(".")[0] == "fuselab" for module in sys.modules)
    print("equal")


SHAPES = {
    "residual_norm": [
        [(2, 3, 37), (2, 3, 37), (37,), (37,)],
        [(1, 5, 1), (1, 5, 1), (1,), (1,)],
        [(0, 3, 8), (0, 3, 8), (8,), (8,)],
    ],
    "row_statistics": [[(7, 33), (33,)], [(0, 4), (4,)]],
    "two_losses": [[(5, 19), (5, 19)], [(3, 0), (3, 0)]],
}

if __name__ == "__main__":
    main()

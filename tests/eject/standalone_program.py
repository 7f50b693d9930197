"""Run standalone packages where fuselab cannot be imported, and compare them with autograd.

python standalone_program.py compare|inside_pytorch|no_compiler FOLDER NAME...
"""

from __future__ import annotations

import importlib
import os
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
    total = sum(
        (output.float() * (number + 2)).square().sum() for number, output in enumerate(used)
    )
    wanted = [one for one in inputs if one.requires_grad]
    return [*outputs, *torch.autograd.grad(total, wanted)]


def drawn(shapes: list[tuple[int, ...]], dtype: torch.dtype, layout: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if layout == "gaps":
        return [torch.stack([one, one], -1)[..., 0] for one in tensors]
    return tensors


def compare(function: Any, reference: Any, args: list[Tensor]) -> None:
    """Kernels compute in float32 and round once: the reference is computed in float32."""
    expected = with_gradients(reference, [arg.float() for arg in args])
    found = with_gradients(function, args)
    assert len(found) == len(expected)
    is_short = args[0].dtype == torch.bfloat16
    bar = {"rtol": 2e-2, "atol": 5e-2} if is_short else {"rtol": 1e-5, "atol": 1e-5}
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.float(), other.float(), equal_nan=True, **bar)


# The sizes, dtypes and layouts in which each package is compared.
DENSE = [(torch.float32, "dense")]
COMPARED = {
    "residual_norm": (
        [
            [(2, 3, 37), (2, 3, 37), (37,), (37,)],
            [(1, 5, 1), (1, 5, 1), (1,), (1,)],
            [(0, 3, 8), (0, 3, 8), (8,), (8,)],
        ],
        [*DENSE, (torch.float32, "gaps"), (torch.bfloat16, "dense")],
    ),
    "row_statistics": ([[(7, 33), (33,)], [(0, 4), (4,)]], [(torch.bfloat16, "gaps")]),
    "two_losses": ([[(5, 19), (5, 19)], [(3, 0), (3, 0)]], DENSE),
}


def inside_pytorch(function: Any, reference: Any) -> None:
    """Compare a function of four tensors where PyTorch looks at it: second derivatives, fake
    tensors, torch.compile, torch.func and autocast; and with shapes that its kernels refuse."""
    shapes = [(2, 3, 8), (2, 3, 8), (8,), (8,)]
    small = [one.requires_grad_() for one in drawn(shapes, torch.float64, "dense")]
    assert torch.autograd.gradcheck(function, small, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, small, fast_mode=True)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    compare(compiled, reference, drawn(shapes, torch.float32, "dense"))
    args = drawn(shapes, torch.float32, "dense")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), reference(*args))
    broadcast = drawn([(4, 2, 3), (3,), (3,), (3,)], torch.float32, "dense")
    compare(function, reference, broadcast)
    compare(compiled, reference, broadcast)
    batch = torch.randn(3, *shapes[0], generator=torch.Generator().manual_seed(2))

    def gradient(one: Any) -> Any:
        return torch.func.grad(lambda x: one(x, *args[1:]).square().sum())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that it loops over the batch
        found = torch.vmap(gradient(function))(batch)
    torch.testing.assert_close(found, torch.vmap(gradient(reference))(batch))
    with torch.autocast("cpu", torch.bfloat16):
        assert function(*args).dtype == reference(*args).dtype
    for wrong, error in (
        (lambda: function(*args, implementation="cuda"), ValueError),
        (lambda: function(*args, implementation="triton"), RuntimeError),
        (lambda: function(*args[:3], None), TypeError),
    ):
        try:
            wrong()
        except error as raised:
            assert type(raised) is error
        else:
            raise AssertionError(f"no {error.__name__}")


def no_compiler(function: Any, reference: Any) -> None:
    """Compare where the kernels do not build: one warning, and the reference computes."""
    os.environ["CXX"], os.environ["PATH"] = "", ""
    args = drawn([(2, 3, 4)] * 2 + [(4,)] * 2, torch.float64, "dense")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.testing.assert_close(function(*args), reference(*args), rtol=0, atol=0)
            compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(*args), reference(*args), rtol=0, atol=0)
    assert [one.category.__name__ for one in caught] == ["FallbackWarning"]


def main() -> None:
    what, folder, *names = sys.argv[1:]
    sys.meta_path.insert(0, Refuse())
    sys.path.insert(0, folder)
    warnings.filterwarnings("error", message=".* did not build")
    for name in names:
        function = getattr(importlib.import_module(name), name)
        reference = importlib.import_module(f"{name}.launchers").reference
        if what.startswith("compare"):
            device = "cuda" if what == "compare_on_gpu" else "cpu"
            sizes, kinds = COMPARED[name]
            for shapes in sizes:
                for dtype, layout in kinds:
                    args = [one.to(device) for one in drawn(shapes, dtype, layout)]
                    compare(function, original(name, reference), args)
        else:
            {"inside_pytorch": inside_pytorch, "no_compiler": no_compiler}[what](
                function, reference
            )
    assert not any(module.partition(".")[0] == "fuselab" for module in sys.modules)


def original(name: str, reference: Any) -> Any:
    """Return the user's function in ``reference.py``, which returns what the package's does."""
    return getattr(importlib.import_module(f"{name}.reference"), name, reference)


if __name__ == "__main__":
    main()

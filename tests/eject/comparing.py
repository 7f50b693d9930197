"""Import packages, and compare what they compute with autograd in float64."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def imported(folder: Path) -> ModuleType:
    """Return the package in a folder as a module of its own."""
    name = f"imported_{folder.name}"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare_cpp(folder: Path, args: Sequence[Tensor]) -> None:
    """Compare a package's C++ kernels."""
    op = load_op(str(folder))
    cpp = op.implementations["cpp"]
    compare(op, cpp.forward, cpp.backward, args)


def compare_interpreted(folder: Path, args: Sequence[Tensor]) -> None:
    """Compare a package's Triton kernels, interpreted."""
    compare(
        load_op(str(folder)),
        lambda *args: interpreter.run(f"{folder}/op.py:forward_triton", *args),
        lambda *args: interpreter.run(f"{folder}/op.py:backward_triton", *args),
        args,
    )


def compare(
    op: Any, forward: Callable[..., Any], backward: Callable[..., Any], args: Sequence[Tensor]
) -> None:
    """Compare output and gradients with autograd's in float64."""
    wide = [one.double().requires_grad_() if one.is_floating_point() else one for one in args]
    exact = op.reference(*wide)
    returned = forward(*args)
    found = op.without_residuals(returned)
    near = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    assert found.dtype == op.reference(*args).dtype
    torch.testing.assert_close(found.double(), exact.detach().double(), **near)
    if op.gradient is None or not exact.requires_grad:
        return
    upstream = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    leaves = [one for one in wide if one.is_floating_point()]
    wanted = iter(torch.autograd.grad(exact, leaves, upstream.double(), allow_unused=True))
    needs = [one.is_floating_point() for one in args]
    saved = op.gradient.save(returned, *args)
    given = backward(needs, upstream, *saved)
    formulas = op.gradient.reference(needs, upstream, *saved)
    for need, one, formula in zip(needs, given, formulas, strict=True):
        right = next(wanted) if need else None
        if right is None:
            assert one is None or not one.any()
            continue
        for gradient in (one, formula):
            if gradient is None:
                assert not right.any()
            else:
                near["rtol"] = 1e-4
                torch.testing.assert_close(gradient.double(), right, **near)

"""Compare what a package computes with autograd in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


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

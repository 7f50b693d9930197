"""Compare two_losses with its reference in float64; it needs no fuselab."""

import torch
from torch.testing import assert_close

from .launchers import operator
from .reference import reference


def test_two_losses() -> None:
    dtype, generator = torch.float64, torch.Generator().manual_seed(0)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        args = (
            torch.randn((6, 9), generator=generator).to(device, dtype),
            torch.randn((6, 9), generator=generator).to(device, dtype),
        )
        assert_close(_with_gradients(operator, args), _with_gradients(reference, args))


def _with_gradients(function, args):
    """Return the outputs, and the gradients of the sum of their squares."""
    inputs = [arg.clone().requires_grad_(arg.is_floating_point()) for arg in args]
    returned = function(*inputs)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    sum(output.square().sum() for output in outputs if output.requires_grad).backward()
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in inputs]
    return [*outputs, *gradients]

"""Trace batch normalisation with a cumulative average (``momentum=None``) without reading its
count on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextlib.contextmanager
def traceable_averages(function: Callable[..., Any]) -> Iterator[None]:
    """Let the batch normalisations of a module that train with ``momentum=None`` compute their
    averages with tensors, so that no number of the trace depends on how many batches there were."""
    modules = list(function.modules()) if isinstance(function, nn.Module) else []
    found = [one for one in modules if _averages_cumulatively(one)]
    for one in found:
        one.forward = _normalise.__get__(one)
    try:
        yield
    finally:
        for one in found:
            del one.forward


def _averages_cumulatively(module: nn.Module) -> bool:
    return (
        isinstance(module, _BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and module.training
        and module.momentum is None
        and module.track_running_stats
        and module.running_mean is not None
        and "forward" not in vars(module)
    )


def _normalise(self: Any, input: Tensor) -> Tensor:
    """Compute what ``forward`` of the module does: the running statistics become the average over
    all batches so far."""
    self._check_input_dim(input)
    self.num_batches_tracked.add_(1)
    mean, variance = self.running_mean, self.running_var
    others = [dim for dim in range(input.dim()) if dim != 1]
    values = input.detach().to(mean.dtype)
    new_variance, new_mean = torch.var_mean(values, others)
    share = 1 / self.num_batches_tracked.to(mean.dtype)
    mean.copy_(mean + (new_mean - mean) * share)
    variance.copy_(variance + (new_variance - variance) * share)
    return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

"""The modules that an operator may replace."""

from __future__ import annotations

from torch import nn


def is_plain(module: nn.Module) -> bool:
    """Return whether calling the module does no more than its class's forward."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def more_than(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Return what ``module`` is or has beside being a ``kind``, as the end of a sentence, or None.

    An operator that takes only the parameters of a ``kind`` would drop it.
    """
    if not isinstance(module, kind):
        return f"is a {type(module).__name__}"
    if type(module).forward is not kind.forward:
        return "has a forward of its own"
    if not is_plain(module):
        return "has hooks or a replaced forward"
    if "weight" not in module._parameters:
        return "has a weight that is computed"
    return None

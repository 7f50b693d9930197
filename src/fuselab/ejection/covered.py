"""Tell by an ATen operator's name whether eject writes kernels for it."""

from __future__ import annotations

import functools

import torch

from fuselab.ejection import lower
from fuselab.ejection.definitions import COMPOSED

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
# Operators that have another name in a graph.
_IN_A_GRAPH = {
    "cudnn_batch_norm": "_native_batch_norm_legit",
    "cudnn_batch_norm_backward": "native_batch_norm_backward",
    "native_batch_norm": "_native_batch_norm_legit",
}
# Dropout on a GPU, whose mask a kernel computes from a seed.
_DROPOUT = frozenset(("native_dropout", "native_dropout_backward"))
# Copies into a tensor, which become part of the kernel that computes what is copied.
_COPIES = frozenset(("copy", "fill", "zero"))


@functools.cache
def is_covered(name: str) -> bool:
    """Return whether eject writes a kernel for ``aten::NAME``, in place or not, for usual arguments
    (a reduction over integers, for example, may still be refused)."""
    short = name.removeprefix("aten::").rstrip("_")
    packet = getattr(torch.ops.aten, _IN_A_GRAPH.get(short, short), None)
    if packet is None:
        return False
    if short in _COPIES or short in _DROPOUT or lower.has_lowering(packet):
        return True
    composed = {getattr(one, "overloadpacket", one) for one in COMPOSED}
    return packet in composed or any(
        one.name() in _registered() and one.has_kernel_for_dispatch_key(_COMPOSITE)
        for one in (getattr(packet, overload) for overload in packet.overloads())
    )


@functools.cache
def _registered() -> frozenset[str]:
    """Return the operators that have a dispatcher's entry; TorchScript's own have none."""
    return frozenset(torch._C._dispatch_get_all_op_names())

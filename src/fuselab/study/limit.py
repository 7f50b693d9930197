"""The least time that a whole target can take: its arithmetic, or the bytes it cannot avoid.

Only work that every way of running it must do is counted: every input, output and used parameter
moved once (of a table only the rows looked up), and the matrix products' operations. The device
does it at its measured best rates. A step with backward also moves the gradient of every used
parameter once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fuselab import structures
from fuselab.device.ceiling import Ceilings, Figure, measured_again, measured_ceilings
from fuselab.measure.statistics import significant
from fuselab.study.facts import Limit

_UNITS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}
_LOOK_UPS = (torch.ops.aten.embedding.default, torch.ops.aten.index_select.default)


def limit_of(
    call: Callable[[], Any],
    args: Sequence[Any],
    parameters: Sequence[Tensor],
    device: torch.device,
    backward: bool,
) -> Limit | None:
    """Return the limit of one ``call``, which is made once; None if no bytes are moved."""
    touched = _Touched(parameters)
    with FlopCounterMode(display=False) as counter, touched:
        output = call()
    flops = counter.get_total_flops()
    state = touched.bytes * (2 if backward else 1)
    moved = state + sum(_bytes(value) for value in structures.tensors((args, output)))
    if not moved:
        return None
    ceilings = measured_ceilings(device)
    unit = _unit([*parameters, *structures.tensors(args)], device)
    return _limit(moved, flops, unit if unit in ceilings.matmul_tflops else "fp32", ceilings)


def stands(limit: Limit, us: float, device: torch.device) -> Limit:
    """Return the limit after a call took ``us`` microseconds.

    A rate may have been measured again since, for a kernel that was faster. Each rate that bounds
    the limit is measured again, once, while the call is faster than the limit.
    """
    figures: dict[str, tuple[Figure, str]] = {
        "arithmetic": ("matmul_tflops", limit.unit),
        "launch": ("launch_us", ""),
    }
    ceilings = measured_ceilings(device)
    limit = _limit(limit.bytes, limit.flops, limit.unit, ceilings)
    figures["memory traffic"] = ("copy_gbps", ceilings.nearest_copy(limit.bytes))
    while us < limit.us and limit.bound in figures:
        ceilings = measured_again(ceilings, device, *figures.pop(limit.bound))
        limit = _limit(limit.bytes, limit.flops, limit.unit, ceilings)
    return limit


def _limit(moved: int, flops: int, unit: str, ceilings: Ceilings) -> Limit:
    gbps = ceilings.copy_gbps[ceilings.nearest_copy(moved)]
    tflops = ceilings.matmul_tflops[unit]
    times = {
        "arithmetic": flops / (tflops * 1e6),
        "memory traffic": moved / (gbps * 1e3),
        "launch": ceilings.launch_us,
    }
    bound = max(times, key=lambda name: times[name])
    return Limit(significant(times[bound]), bound, moved, flops, gbps, tflops, unit)


class _Touched(TorchDispatchMode):
    """Counts the bytes of parameters that operators read; look-ups count only their rows."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.sizes = {_storage(value): _bytes(value) for value in parameters}
        self.read: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        return sum(min(read, self.sizes[storage]) for storage, read in self.read.items())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _LOOK_UPS and _storage(args[0]) in self.sizes:
            self._count(args[0], _bytes(result))
        elif not func.is_view:
            for value in pytree.tree_leaves((args, kwargs)):
                if isinstance(value, Tensor):
                    self._count(value, self.sizes.get(_storage(value), 0))
        return result

    def _count(self, value: Tensor, count: int) -> None:
        storage = _storage(value)
        if storage in self.sizes:
            self.read[storage] = self.read.get(storage, 0) + count


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _unit(values: Sequence[Any], device: torch.device) -> str:
    """Return the arithmetic unit of the first floating tensor, or of autocast.

    fp32 products on a GPU count as tf32 if the user allows it.
    """
    dtype = next(
        (v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()), torch.float32
    )
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    unit = _UNITS.get(dtype, "fp32")
    fast = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if unit == "fp32" and fast else unit

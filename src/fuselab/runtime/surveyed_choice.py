"""The choice of ``implementation="auto"`` at calls like those of a survey: what was faster there.

``fuselab bench OP --survey --choose`` writes what every provider took at the points of a survey to
one file per device, below ``surveyed`` in the cache folder. A call is like a point where both have
the same dtypes, numbers of dimensions, options, contiguity and alignment of rows, and no size of
one is more than twice the other's. Of the points that a call is like the nearest one counts. What
``auto`` takes otherwise gives way only where another implementation, or the reference, took less
time there beyond both 95 % intervals, and at least 3 % less.

Only forwards were timed alone, so calls that need a gradient are left to the operator's own rule.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.op import FusedOp, dtype_name, tensors_in
from fuselab.runtime import cache, launch_plans
from fuselab.runtime.cpu_choice import MARGIN, table_key, use_of
from fuselab.runtime.instruction_set import instruction_set

SCHEMA = 1
_FURTHEST = 1.0  # of the logarithm to base 2 of the ratio of two sizes
_ROW_BYTES = 16  # what a vector load takes


def better(op: FusedOp, args: Sequence[Any], device: torch.device, taken: str) -> str | None:
    """Return what was faster than ``taken`` at the surveyed point that a call is most like; None
    where nothing was, where there is no such point, or where the call needs a gradient."""
    points = _points(op, device)
    if not points or use_of(op, args) == "training":
        return None
    times = _nearest(points, form_of(args), sizes_of(args))
    if times is None or taken not in times:
        return None
    _, low_us, _ = times[taken]
    faster = {name: us[0] for name, us in times.items() if us[2] < MARGIN * low_us}
    return min(faster, key=faster.__getitem__) if faster else None


def form_of(args: Sequence[Any]) -> str:
    """Return what two calls must share to be alike, beside their sizes: the dtype of every tensor,
    its number of dimensions, whether it is contiguous and whether its rows begin on 16 bytes; and
    every other argument but floats, whose values do not change the time."""
    return ", ".join(map(_form, args))


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        words = [dtype_name(value.dtype), f"{value.ndim}d"]
        words += [] if value.is_contiguous() else ["strided"]
        return " ".join([*words, *([] if _is_aligned(value) else ["unaligned"])])
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_form, value))}]"
    return "float" if isinstance(value, float) else repr(value)


def _is_aligned(tensor: Tensor) -> bool:
    width = tensor.shape[-1] if tensor.ndim else 1
    offset = tensor.storage_offset()
    return all(count * tensor.element_size() % _ROW_BYTES == 0 for count in (width, offset))


def sizes_of(args: Sequence[Any]) -> list[int]:
    """Return the sizes of all tensors, in order."""
    return [size for tensor in tensors_in(args) for size in tensor.shape]


Times = Mapping[str, Sequence[float]]


def _nearest(points: Sequence[Mapping[str, Any]], form: str, sizes: Sequence[int]) -> Times | None:
    """Return the times of the nearest point like the call: median, low and high in microseconds,
    by implementation."""
    near = []
    for place, point in enumerate(points):
        if point["form"] == form and len(point["sizes"]) == len(sizes):
            distance = _distance(point["sizes"], sizes)
            if distance <= _FURTHEST:
                near.append((distance, place))
    if not near:
        return None
    times: Times = points[min(near)[1]]["us"]
    return times


def _distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the largest logarithm of the ratio of two sizes; infinite where one of them is 0."""
    if any(min(pair) <= 0 and max(pair) > 0 for pair in zip(one, other, strict=True)):
        return math.inf
    logs = (abs(math.log2(a / b)) for a, b in zip(one, other, strict=True) if a != b)
    return max(logs, default=0.0)


def _points(op: FusedOp, device: torch.device) -> Sequence[Mapping[str, Any]]:
    table = _table(file_of(device))
    if not table:
        return ()
    points: Sequence[Mapping[str, Any]] = table.get(table_key(op), {}).get("points", ())
    return points


def file_of(device: torch.device) -> Path:
    """Return the path of a device's file."""
    return cache.folder() / "surveyed" / f"{_device_name(device)}.json"


@functools.cache
def _device_name(device: torch.device) -> str:
    if device.type == "cuda":  # there may be none, when a plan is made for one
        is_there = torch.cuda.is_available()
        return cache.slug(torch.cuda.get_device_name(device)) if is_there else device.type
    from fuselab.device.environment import cpu_model  # imports fuselab's own version

    return f"{cache.slug(cpu_model())}-{instruction_set()}"


@functools.cache
def _table(file: Path) -> Mapping[str, Any]:
    """Return a file's operators, or none if it cannot be read: that costs speed, not results."""
    try:
        payload = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"surveyed times are passed over: {file}: {error}", stacklevel=2)
        return {}
    if not isinstance(payload, dict) or payload.get("schema") != SCHEMA:
        warnings.warn(
            f"surveyed times are passed over: {file} is not of schema {SCHEMA}; "
            "fuselab bench OP --survey --choose writes it anew.",
            stacklevel=2,
        )
        return {}
    return dict(payload.get("operators", {}))


def write(op: FusedOp, device: torch.device, facts: Mapping[str, Any]) -> Path:
    """Put an operator's points (``facts["points"]``, with what they were made of beside them) into
    the device's file, in place of earlier ones, and return the file. Calls from now on choose by
    it."""
    file = file_of(device)
    file.parent.mkdir(parents=True, exist_ok=True)
    with cache.locked(file.with_suffix(".lock")):
        _table.cache_clear()
        operators = {**_table(file), table_key(op): facts}
        payload = {"schema": SCHEMA, "operators": dict(sorted(operators.items()))}
        temporary = file.with_suffix(".new")
        temporary.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
        temporary.replace(file)
    forget()
    return file


def forget() -> None:
    """Read the files again at the next call, and drop what was chosen by the old ones."""
    _table.cache_clear()
    launch_plans.forget_all()

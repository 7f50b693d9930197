"""The choice of ``implementation="auto"`` on a CPU: what was measured faster, else the reference.

A table has measured times per operator, use (``inference``, or ``training``: forward and
backward), dtype, regime (``FusedOp.regime``) and size. The package ships one per instruction set
(``measured/cpu-avx2.json``); ``fuselab doctor --measure`` writes one for this machine, which takes
precedence, operator by operator. If no table has times that apply, ``auto`` takes the reference.
Operators of other namespaces are in the machine's own table if ``fuselab doctor --measure
--operator PACKAGE`` timed them as their files are now; otherwise their ``prefer`` decides.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import inspect
import json
import math
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fuselab.op import FusedOp, dtype_name, tensors_in
from fuselab.runtime import cache, launch_plans
from fuselab.runtime.instruction_set import instruction_set

SCHEMA = 1
NAMESPACE = "fuselab"
# An implementation is used if it takes at most this share of the reference's time. Two runs of one
# call differ by about as much.
MARGIN = 0.97

# Times in microseconds by provider ("reference" and implementations), by bytes moved, ascending.
Points = Sequence[tuple[int, Mapping[str, float]]]


def order(op: FusedOp, args: Sequence[Any]) -> Sequence[str]:
    """Return the implementations that ``auto`` asks for these arguments on a CPU, best first,
    ``"reference"`` last. Arguments that need a gradient are looked up under ``training``."""
    on_cpu = [name for name, known in op.implementations.items() if known.device == "cpu"]
    if not on_cpu:
        return ("reference",)
    if _thread.forced is not None:
        return (_thread.forced, "reference")
    use, dtype, regime = use_of(op, args), dtype_of(args), regime_of(op, args)
    points = _points(op, use, dtype, regime)
    if op.namespace != NAMESPACE and not points:
        return tuple(op.prefer(*args)) if op.prefer is not None else tuple(op.implementations)
    moved = op.cost(*args).bytes_moved
    faster = _faster(points, moved)
    if use == "training" and faster:
        # The forward inside the differentiable call must be one that is also chosen for inference.
        alone = _faster(_points(op, "inference", dtype, regime), moved)
        faster = [name for name in faster if name in alone]
    return (*faster, "reference")


def can_take(op: FusedOp, use: str, dtype: str, regime: str) -> set[str]:
    """Return the implementations that ``auto`` takes for such calls at any measured size."""
    points = _points(op, use, dtype, regime)
    return {name for moved, _ in points for name in _faster(points, moved)}


class _Thread(threading.local):
    forced: str | None = None


_thread = _Thread()


@contextlib.contextmanager
def forced(implementation: str | None) -> Iterator[None]:
    """Make ``auto`` take ``implementation`` on a CPU, within this context and thread, wherever that
    supports the arguments; None leaves the choice as it is. Launch plans are dropped on both sides.
    """
    before, _thread.forced = _thread.forced, implementation
    launch_plans.forget_all()
    try:
        yield
    finally:
        _thread.forced = before
        launch_plans.forget_all()


def is_forced() -> bool:
    """Return whether this thread is within ``forced`` with an implementation's name."""
    return _thread.forced is not None


def use_of(op: FusedOp, args: Sequence[Any]) -> str:
    """Return the use that a call is measured under: training if it needs a gradient."""
    differentiated = (
        op.gradient is not None
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors_in(args))
    )
    return "training" if differentiated else "inference"


def dtype_of(args: Sequence[Any]) -> str:
    """Return the dtype that a call is measured under: the first tensor's."""
    return dtype_name(tensors_in(args)[0].dtype)


def regime_of(op: FusedOp, args: Sequence[Any]) -> str:
    """Return the regime that a call is measured under; an operator without any has one, ``""``."""
    return op.regime(*args) if op.regime is not None else ""


def _faster(points: Points, moved: int) -> list[str]:
    """Return the implementations that are faster than the reference at the measured sizes next to
    ``moved`` bytes, the fastest first. Beyond either end of the table its last size counts."""
    if not points:
        return []
    place = bisect.bisect_left([size for size, _ in points], moved)
    beside = [times for _, times in points[max(place - 1, 0) : place + 1]]
    if place < len(points) and points[place][0] == moved:
        beside = [points[place][1]]
    shares = {
        name: [times[name] / times["reference"] for times in beside]
        for name in beside[0]
        if name != "reference" and all(name in times for times in beside)
    }
    faster = [name for name, found in shares.items() if max(found) <= MARGIN]
    return sorted(faster, key=lambda name: math.prod(shares[name]))


def _points(op: FusedOp, use: str, dtype: str, regime: str) -> Points:
    key = table_key(op)
    for table in _tables():
        if key in table:
            points: Points = table[key].get(use, {}).get(dtype, {}).get(regime, ())
            return points
    return ()


def table_key(op: FusedOp) -> str:
    """Return the name of an operator's times in a table. Behind the name of one that is not the
    library's stands a hash of its files: the times of other kernels say nothing about these."""
    if op.namespace == NAMESPACE:
        return op.short_name
    try:
        file = Path(inspect.getfile(inspect.unwrap(op.reference)))
    except TypeError:  # a callable object, which has no file
        return op.name
    return f"{op.name} {_hash(file)}"


@functools.cache
def _hash(file: Path) -> str:
    """Return a hash of a file, and of the package's kernels and launchers if it is part of one."""
    beside = [*file.parent.glob("*.cpp"), file.parent / "op.py"]
    files = sorted(beside) if (file.parent / "op.py").is_file() else [file]
    digest = hashlib.sha256()
    for one in files:
        digest.update(one.read_bytes() if one.is_file() else b"")
    return digest.hexdigest()[:12]


@functools.cache
def _tables() -> tuple[Mapping[str, Any], ...]:
    """Return the machine's own table and the shipped one."""
    return tuple(_read(file) for file in (own_file(), shipped_file()))


def _read(file: Path) -> Mapping[str, Any]:
    """Return a file's operators, or none if it cannot be read: that costs speed, not results."""
    try:
        payload = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"measured times are passed over: {file}: {error}", stacklevel=2)
        return {}
    if not isinstance(payload, dict) or payload.get("schema") != SCHEMA:
        warnings.warn(
            f"measured times are passed over: {file} is not of schema {SCHEMA}; "
            "fuselab doctor --measure writes it anew.",
            stacklevel=2,
        )
        return {}
    return dict(payload.get("operators", {}))


def summary(file: Path) -> dict[str, tuple[int, int]]:
    """Return, per operator, the number of a table's points that an implementation wins, and the
    number of all points."""
    counts = {}
    for name, uses in _read(file).items():
        points = [
            point
            for dtypes in uses.values()
            for regimes in dtypes.values()
            for measured in regimes.values()
            for point in measured
        ]
        counts[name] = sum(bool(_faster([point], point[0])) for point in points), len(points)
    return counts


def shipped_file() -> Path:
    """Return the table that ships with the package for this process's instruction set."""
    return Path(__file__).parent / "measured" / f"cpu-{instruction_set()}.json"


def own_file() -> Path:
    """Return the path of this machine's own table, which ``fuselab doctor --measure`` writes."""
    from fuselab.device.environment import cpu_model  # imports fuselab's own version

    name = f"{cache.slug(cpu_model())}-{instruction_set()}.json"
    return cache.folder() / "measured" / name


def forget() -> None:
    """Read the tables again at the next call, and drop what was chosen by the old ones."""
    _tables.cache_clear()
    launch_plans.forget_all()

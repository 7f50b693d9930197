"""Tuned configurations: what a launcher may choose from, what was chosen, and where that is kept.

A launcher calls ``chosen`` with the candidates for its arguments. ``fuselab bench OP --tune`` times
the candidates, each within ``forced``, and saves the fastest under the launcher's key, per device:
in the user's cache folder, or beside the operator (``tuned/nvidia-h200.json``), from where it
ships. The user's choice precedes the shipped one; without either, the default rule applies.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fuselab.errors import ContractError, OutputError
from fuselab.op import FusedOp
from fuselab.runtime import cache, launch_plans
from fuselab.runtime.registered import registered
from fuselab.runtime.tuned_file import SCHEMA, Config, choices_in, key_text, read

__all__ = [
    "Config",
    "Forced",
    "TunedConfig",
    "chosen",
    "device_name",
    "forced",
    "forget",
    "key_text",
    "read",
    "save",
    "shipped_file",
    "user_file",
]


@dataclass(frozen=True)
class TunedConfig:
    """A configuration that was found fastest for a key, as a file stores it.

    ``us`` is its median in the last of ``cases``, ``default_us`` that of the default rule in the
    same rounds. ``versions`` are those of torch, Triton and the driver, ``command`` is the command
    that was run.
    """

    config: Config
    us: float
    default_us: float | None
    cases: Sequence[str]
    date: str
    versions: Mapping[str, str | None]
    command: str


@dataclass
class Forced:
    """The object that ``forced`` yields: the ``keys`` that were asked for within it."""

    of: tuple[str, str]
    config: Config
    keys: list[str] = field(default_factory=list)


class _Thread(threading.local):
    forced: Forced | None = None


_thread = _Thread()
_saved: dict[tuple[str, str], dict[tuple[str, str], Config]] = {}


def chosen(
    op_name: str, implementation: str, key: str | Sequence[Any], candidates: Sequence[Config]
) -> Config:
    """Return how to launch: the choice saved for this device and ``key``, else ``candidates[0]``,
    the default. A saved choice that is no candidate any more is ignored.

    Args:
        op_name: ``FusedOp.name``.
        implementation: its key in ``FusedOp.configs``; for the backward it ends in ``_backward``.
        key: the values that the best configuration depends on, coarsely, as a text or as values
            that become one (``("float32", 4096)``).
        candidates: ``FusedOp.configs[implementation](...)`` for these arguments.

    Raises ContractError if there is no candidate, or if the configuration that is being tried is no
    candidate.
    """
    if not candidates:
        raise ContractError(f"{op_name}: {implementation} gives no candidate configuration.")
    text = key_text(key)
    forced = _thread.forced
    if forced is not None and forced.of == (op_name, implementation):
        forced.keys.append(text)
        if forced.config not in candidates:
            raise ContractError(
                f"{op_name}: FusedOp.configs['{implementation}'] offers {forced.config}, which its "
                "launcher does not; both must ask one function."
            )
        return forced.config
    device = device_name(op_name, implementation)
    if device is None:
        return candidates[0]
    choice = _choices(op_name, device).get((implementation, text))
    return choice if choice is not None and choice in candidates else candidates[0]


@contextlib.contextmanager
def forced(op_name: str, implementation: str, config: Config) -> Iterator[Forced]:
    """Make ``chosen`` return ``config`` for that implementation, within this context and thread.

    Call the implementation itself, not the public function, which may use a launch plan.
    """
    before = _thread.forced
    _thread.forced = Forced((op_name, implementation), config)
    try:
        yield _thread.forced
    finally:
        _thread.forced = before


def device_name(op_name: str, implementation: str) -> str | None:
    """Return the name of the device that the implementation of a registered operator runs on; None
    if there is none, as under the Triton interpreter."""
    kind = _kinds.get((op_name, implementation))
    if kind is None:
        op = registered().get(op_name)
        declared = op.implementations.get(implementation.removesuffix("_backward")) if op else None
        if declared is None:
            return None
        kind = _kinds[op_name, implementation] = declared.device
    if kind == "cpu":
        return _cpu_name()
    return _cuda_name(torch.cuda.current_device()) if torch.cuda.is_available() else None


_kinds: dict[tuple[str, str], str] = {}


@functools.cache
def _cpu_name() -> str:
    from fuselab.device.environment import cpu_model

    return cpu_model()


@functools.cache
def _cuda_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def _choices(op_name: str, device: str) -> dict[tuple[str, str], Config]:
    """Return choices by implementation and key: the user's, else the shipped ones."""
    found = _saved.get((op_name, device))
    if found is None:
        found = {}
        op = registered().get(op_name)  # None of a package that is only looked at
        for file in (*([shipped_file(op, device)] if op else []), user_file(device)):
            found |= choices_in(file, op_name)
        _saved[op_name, device] = found
    return found


def user_file(device: str) -> Path:
    """Return the path of the user's choices for a device."""
    return cache.folder() / "tuned" / f"{cache.slug(device)}.json"


def shipped_file(op: FusedOp, device: str) -> Path:
    """Return the path of the choices that ship with the operator: beside its reference's file."""
    reference: Any = op.reference
    while isinstance(reference, functools.partial):
        reference = reference.func
    module = sys.modules.get(getattr(reference, "__module__", ""))
    folder = Path(getattr(module, "__file__", None) or "nowhere").parent
    return folder / "tuned" / f"{cache.slug(device)}.json"


def save(
    op: FusedOp, device: str, choices: Mapping[tuple[str, str], TunedConfig], file: Path
) -> None:
    """Add choices, by implementation and key, to ``file``. They take effect at once, because launch
    plans are dropped. Raises DataError or OutputError."""
    operators = read(file)["operators"]
    for (implementation, key), choice in choices.items():
        entry = asdict(choice) | {"config": dict(choice.config)}
        operators.setdefault(op.name, {}).setdefault(implementation, {})[key] = entry
    in_order = {
        name: {
            implementation: dict(sorted(keys.items()))
            for implementation, keys in sorted(implementations.items())
        }
        for name, implementations in sorted(operators.items())
    }
    payload = {"schema": SCHEMA, "device": device, "operators": in_order}
    _write(file, json.dumps(payload, indent=2, ensure_ascii=False) + "\n")
    forget(op.name)


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".new-", suffix=".json")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, file)
    except OSError as error:
        raise OutputError(
            f"cannot write {file}: {error.strerror}; the choice is not saved."
        ) from error


def forget(op_name: str) -> None:
    """Read an operator's choices again at the next call, and drop all launch plans, which were made
    with the old ones."""
    held: dict[tuple[str, str], Any]
    for held in (_saved, _kinds):
        for place in [place for place in held if place[0] == op_name]:
            del held[place]
    launch_plans.forget_all()

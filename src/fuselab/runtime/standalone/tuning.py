"""Tuned configurations of this package: what was found fastest for a device, if anything was.

``fuselab bench DIR --tune --ship`` writes them to ``tuned/DEVICE.json`` beside the kernels. Without
that file, launches are chosen by size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fuselab.runtime import cache
from fuselab.runtime.tuned_file import Config, choices_in, key_text

__all__ = ["Config", "choose_by", "chosen"]

_choose: list[Callable[..., Config]] = []  # the function that chooses in place of this module


def choose_by(function: Callable[..., Config]) -> None:
    """Let ``function`` choose, which takes the arguments of ``chosen``: the tuner's."""
    _choose[:] = [function]


def chosen(
    op_name: str, implementation: str, key: str | Sequence[Any], candidates: Sequence[Config]
) -> Config:
    """Return how to launch: the choice saved for this GPU and ``key``, else ``candidates[0]``, the
    default. A saved choice that is no candidate any more is ignored."""
    if _choose:
        return _choose[0](op_name, implementation, key, candidates)
    if not torch.cuda.is_available():
        return candidates[0]
    choices = _choices(op_name, torch.cuda.current_device())
    choice = choices.get((implementation, key_text(key)))
    return choice if choice is not None and choice in candidates else candidates[0]


@functools.cache
def _choices(op_name: str, index: int) -> dict[tuple[str, str], Config]:
    name = cache.slug(torch.cuda.get_device_name(index))
    package = op_name.rpartition(":")[2]
    root = Path(__file__).resolve().parents[1]
    own = root / package  # the folder of one operator of several
    return choices_in((own if own.is_dir() else root) / "tuned" / f"{name}.json", op_name)

"""Kernel packages that fuselab writes for itself: kept in the cache folder, and found again there.

A package is found by what it was made from: the text of the function, the examples' dtypes and
layouts, the device, and the versions of fuselab, torch and Triton. The folder holds code that will
be run, so only the user may write to it, and every file must be as it was written.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

import fuselab
from fuselab.ejection.eject import about
from fuselab.ejection.folder import is_intact, write_folder
from fuselab.ejection.from_text import function_of
from fuselab.ejection.kernels import DoesNotFitError
from fuselab.ejection.package import Package, planned_package
from fuselab.ejection.write import package_files
from fuselab.errors import EjectError
from fuselab.op import FusedOp, dtype_name
from fuselab.prove.load import load_op
from fuselab.runtime import cache
from fuselab.runtime.instruction_set import instruction_set

_KEY_LETTERS = 10  # of the key in an operator's name: two chains of one process must differ


@dataclass(frozen=True)
class Generated:
    """An operator whose kernels eject wrote, and the folder of its package."""

    op: FusedOp
    folder: Path


def generated(
    name: str,
    text: str,
    examples: Sequence[Tensor],
    frozen: Collection[str] = (),
) -> Generated:
    """Return the operator of a function whose kernels eject writes, from the cache if it is there.

    Args:
        name: the beginning of the operator's name, a Python identifier.
        text: the function as Python text, in which its own name is ``{name}``.
        examples: the function's arguments.
        frozen: parameters that get no gradient; all others do, whatever the examples require.

    Raises:
        EjectError: the function cannot become kernels, or the cache folder is not the user's alone.
        OutputError: the folder cannot be written.
    """
    key = cache.key(
        text, sorted(frozen), *map(_likeness, examples), _device(examples), *_versions()
    )
    name = f"{name}_{key[:_KEY_LETTERS]}"
    folder = _own_folder() / key[:2] / key[2:] / name
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with cache.locked(folder.with_name(f"{name}.lock")):
        if folder.exists() and not is_intact(folder):
            shutil.rmtree(folder)
        if not folder.exists():
            package = planned(text, examples, name, frozen)
            write_folder(folder, package_files(package), about(name))
    return Generated(load_op(str(folder)), folder)


def planned(
    text: str,
    examples: Sequence[Tensor],
    name: str,
    frozen: Collection[str] = (),
) -> Package:
    """Return the kernels of the function that ``generated`` takes, without writing them. Raises
    EjectError."""
    function = function_of(name, text.replace("{name}", name))
    try:
        package = planned_package(function, examples, {}, name, frozen=frozen)
    except (AssertionError, DoesNotFitError) as error:
        raise EjectError(f"{name} fits no kernel.") from error
    if package.captured.written:  # the operator itself writes nothing
        raise EjectError(f"{name} writes over an argument.")
    return package


def _own_folder() -> Path:
    """Return the folder of all packages, which is created if needed. Raises EjectError if another
    user may write to it."""
    folder = cache.folder() / "generated"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise EjectError(
            f"others may write to {folder}, from which code is run; chmod it to 700, or set "
            "FUSELAB_CACHE to a folder of your own."
        )
    return folder


def _likeness(example: Tensor) -> str:
    """Return what the kernels of a function may depend on: dtype, which sizes are 1, and the order
    of the strides; other sizes and strides may be any."""
    order = sorted(range(example.dim()), key=lambda dim: -example.stride()[dim])
    ones = [size == 1 for size in example.shape]
    expanded = [stride == 0 for stride in example.stride()]
    return f"{dtype_name(example.dtype)} {ones} {order} {expanded}"


def _device(examples: Sequence[Tensor]) -> str:
    kind = examples[0].device.type if examples else "cpu"
    return f"cpu {instruction_set()}" if kind == "cpu" else kind


def _versions() -> list[str]:
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    own = f"{fuselab.__version__} {_own_source()}"
    return [own, torch.__version__, triton, platform.python_version()]


@functools.cache
def _own_source() -> str:
    """Return the hash of the code that writes packages, which may change within a version."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return cache.key(*(file.read_bytes() for file in files))

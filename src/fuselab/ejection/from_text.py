"""Make functions from text, such as that of a region's calls."""

from __future__ import annotations

import itertools
import linecache
from types import FunctionType
from typing import Any

import torch

_serial = itertools.count()


def function_of(name: str, text: str) -> FunctionType:
    """Return the function that ``text`` defines; ``inspect.getsource`` finds its text."""
    file = f"<{name}, region {next(_serial)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    held: dict[str, Any] = {"torch": torch, "__name__": "fuselab_region"}
    exec(compile(text, file, "exec"), held)
    function: FunctionType = held[name]
    return function

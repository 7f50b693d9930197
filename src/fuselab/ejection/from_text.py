"""Make functions from text, such as that of a region's calls."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

_serial = itertools.count()
_MODULE = "fuselab_region"


def function_of(name: str, text: str) -> FunctionType:
    """Return the function that ``text`` defines; ``inspect.getsource`` finds its text."""
    file = f"<{name}, region {next(_serial)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    held: dict[str, Any] = {"torch": torch, "__name__": _MODULE}
    exec(compile(text, file, "exec"), held)
    function: FunctionType = held[name]
    return function


def is_of_text(function: Callable[..., Any]) -> bool:
    """Return whether ``function_of`` has made a function."""
    return getattr(function, "__module__", None) == _MODULE

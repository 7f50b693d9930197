"""Calls of the C++ kernels, which are compiled on first use (``cpp_library.py``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import BuildError
from fuselab.runtime.cpp_library import CppLibrary, raise_kernel_error
from fuselab.runtime.parameters import Scalar, encode, i64

__all__ = ["CppSource", "i64"]


class CppSource(CppLibrary):
    """The kernels of a ``.cpp`` file, and calls of them."""

    def launch(self, expression: str, args: Sequence[Tensor | Scalar | None]) -> None:
        """Call the instantiation and return when it is done. Raises BuildError."""
        if expression not in self._entries:
            self.load(expression)
        entry, declared = self._entries[expression]
        codes, values = encode(args)
        if codes != declared:
            raise BuildError(f"{expression} has parameters {declared}, the launch passes {codes}.")
        torch.get_num_threads()  # sets OpenMP's thread count in a thread that has not used torch
        held = [_memory(value) for value in values]
        kernel = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(entry)
        message = kernel((ctypes.c_void_p * len(held))(*map(ctypes.addressof, held)))
        if message:
            raise_kernel_error(message.decode())


def _memory(value: Any) -> Any:
    """Return a parameter as a C object: a tensor's address, a struct's bytes or an integer."""
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, tuple):
        content, _ = value
        return ctypes.create_string_buffer(content, len(content))
    return ctypes.c_int64(value)

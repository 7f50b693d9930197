"""The folder in which torch.compile keeps what it compiled, one for each instruction set."""

from __future__ import annotations

import os
import tempfile

_CAPABILITY, _FOLDER = "ATEN_CPU_CAPABILITY", "TORCHINDUCTOR_CACHE_DIR"


def keep_apart() -> None:
    """Give this process and its children a folder of their own if ``ATEN_CPU_CAPABILITY`` lowers
    the instruction set, and none is chosen.

    The key of Inductor's cache leaves the instruction set out (torch 2.11 and 2.13). Code that was
    generated for vectors of 8 elements and is compiled for vectors of 16 writes past its buffers.
    Call it before torch.compile is used.
    """
    capability = os.environ.get(_CAPABILITY, "").lower()
    if capability and _FOLDER not in os.environ:
        name = f"torchinductor_{os.getuid()}_{capability}"
        os.environ[_FOLDER] = os.path.join(tempfile.gettempdir(), name)

"""A gradient that comes from a launch plan, as a node of autograd's graph in C++.

``torch.autograd.Function`` costs 30 us of a tiny forward and backward's host time, most of it
Python around two plans that take 3. Once an operator has a plan for a call, its output therefore
gets a node of ours (``autograd_node.cpp``): the engine goes from there to ``launcher.lookup``. The
first call of a kind, torch.compile, torch.func and operators with sequences of tensors keep the
Function, as does everything where the node cannot be built.

Compiled autograd takes the node into its graph as a call of the raw backward operator.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from fuselab.errors import BuildError
from fuselab.runtime import launcher

_SOURCE = Path(__file__).with_name("autograd_node.cpp")

# (output, inputs, saved, rule) -> the output as a function of the inputs, a list of tensors and
# None. ``saved`` is what the backward needs after (needs, grad_output). A rule is (name,
# launcher.lookup, id of the backward, implementation, function of (implementation, arguments) for
# where there is no plan, or where the gradient is differentiated again).
Attach = Callable[[Tensor, list[Tensor | None], tuple[Any, ...], tuple[Any, ...]], Tensor]

_attach: Attach | None = None
_start_lock = threading.Lock()
_tried = False


def attach() -> Attach | None:
    """The function that puts a node behind an output; None where there are no plans, and where it
    cannot be built, with one warning. Built on the first call (10 s, once per torch and compiler).
    """
    return _attach if _tried or not launcher.is_started() else _start()


def _start() -> Attach | None:
    global _attach, _tried
    with _start_lock:
        if not _tried:
            try:
                built = launcher.library(_SOURCE)
                _attach = launcher.extension("fuselab_autograd_node", built).attach
            except (BuildError, ImportError) as error:
                warnings.warn(
                    f"autograd's C++ node cannot be used, gradients of small tensors take longer: "
                    f"{error}",
                    stacklevel=3,
                )
            _tried = True
    return _attach


# As in launcher.py: what was built before is loaded now.
with contextlib.suppress(BuildError, OSError):
    if launcher.is_built(_SOURCE):
        _start()

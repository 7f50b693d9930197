"""A gradient that comes from a launch plan, as a node of autograd's graph in C++.

``torch.autograd.Function`` costs 30 us of a tiny forward and backward's host time, most of it
Python around two plans that take 3. Once an operator has a plan for a call, its output therefore
gets a node of ours (``autograd_node.cpp``): the engine goes from there to
``launch_plans.lookup``. The first call of a kind, torch.compile, torch.func and operators with
sequences of tensors keep the Function, as does everything where the node cannot be built.

Compiled autograd takes the node into its graph as a call of the raw backward operator.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from fuselab.runtime import launch_plans
from fuselab.runtime.extension import NativeExtension

# (output, inputs, saved, rule) -> the output as a function of the inputs, a list of tensors and
# None. ``saved`` is what the backward needs after (needs, grad_output). A rule is (name,
# launch_plans.lookup, id of the backward, implementation, function of (implementation, arguments)
# for where there is no plan, or where the gradient is differentiated again).
Attach = Callable[[Tensor, list[Tensor | None], tuple[Any, ...], tuple[Any, ...]], Tensor]

_attach: Attach | None = None


def attach() -> Attach | None:
    """Return the function that puts a node behind an output; None where there are no plans, until
    the node is compiled (which the first call begins), and, with one warning, where it cannot be.
    """
    if _attach is None and launch_plans.is_started():
        EXTENSION.ready()
    return _attach


def start() -> bool:
    """Load the launcher and the node, built first where needed: what is timed must not depend on
    when a compiler in the background ends. Return False, with one warning, where that fails."""
    return launch_plans.start() and EXTENSION.start()


def _install(native: ModuleType) -> None:
    global _attach
    _attach = native.attach


EXTENSION = NativeExtension(
    Path(__file__).with_name("autograd_node.cpp"),
    "fuselab_autograd_node",
    _install,
    "autograd's C++ node cannot be used, gradients of small tensors take longer",
)
EXTENSION.start_if_built()

"""A gradient that comes from a launch plan, as a node of autograd's graph in C++.

``torch.autograd.Function`` costs 30 us of host time in a tiny forward and backward, most of it
Python around two plans that take 3 us. Once an operator has a plan for a call, its outputs
therefore get a C++ node (``autograd_node.cpp``), from which autograd's engine calls
``launch_plans.lookup``. The Function stays for the first call of a kind, torch.compile, torch.func,
operators with sequences of tensors, and wherever the node cannot be built. Compiled autograd takes
the node into its graph as a call of the raw backward operator.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from fuselab.runtime import launch_plans
from fuselab.runtime.extension import NativeExtension

# A function of (outputs, inputs, saved, rule) that makes the outputs, a tuple, differentiable
# functions of the inputs, which are tensors and None. ``saved`` are the backward's arguments after
# (needs, grad_output). A rule is (name, launch_plans.lookup, id of the backward, implementation,
# function, Gradient.equal, Gradient.passed); the function takes (implementation, arguments) and
# computes the gradient if there is no plan, or if the gradient is differentiated again.
Attach = Callable[[tuple[Tensor, ...], list[Tensor | None], tuple[Any, ...], tuple[Any, ...]], None]

_attach: Attach | None = None


def attach() -> Attach | None:
    """Return the function that attaches a node to an output, or None if it cannot be used.

    It is None without launch plans, until the node is compiled (the first call starts that), and,
    with one warning, if it cannot be compiled.
    """
    if _attach is None and launch_plans.is_started():
        EXTENSION.ready()
    return _attach


def start() -> bool:
    """Load the launcher and the node, and build them first if needed: timings must not depend on
    when a compiler in the background ends. Return False, with one warning, if that fails."""
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

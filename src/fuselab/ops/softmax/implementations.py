"""The implementations of softmax and log_softmax, out of place and in place, and their configs."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from fuselab.op import Implementation
from fuselab.ops.softmax import cpu_launch, cuda_launch, triton_launch
from fuselab.ops.softmax.tensors import Form

CONFIGS = {
    "triton": triton_launch.configs,
    "triton_backward": triton_launch.configs_backward,
    "cuda": cuda_launch.configs,
    "cuda_backward": cuda_launch.configs_backward,
}


def implementations(form: Form) -> dict[str, Implementation]:
    def both(launcher: ModuleType) -> tuple[Any, Any]:
        return partial(launcher.forward, form=form), partial(launcher.backward, form=form)

    return {
        "triton": Implementation("cuda", *both(triton_launch), triton_launch.supports),
        "cuda": Implementation("cuda", *both(cuda_launch)),
        "cpp": Implementation("cpu", *both(cpu_launch)),
    }


def implementations_in_place(form: Form) -> dict[str, Implementation]:
    def forward(launcher: ModuleType) -> Any:
        return partial(launcher.forward_in_place, form=form)

    return {
        "triton": Implementation("cuda", forward(triton_launch), supports=triton_launch.supports),
        "cuda": Implementation("cuda", forward(cuda_launch)),
        "cpp": Implementation("cpu", forward(cpu_launch)),
    }

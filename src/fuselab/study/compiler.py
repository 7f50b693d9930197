"""The compiled form of the target, from ``explain``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fuselab.errors import TargetError
from fuselab.inspect.explain import explain_target
from fuselab.inspect.targets import Target
from fuselab.study.facts import Compiler, Kernel

_KINDS = {"fused": "generated", "extern": "library call"}


def compiler_of(target: Target, backward: bool, progress: Callable[[str], None]) -> Compiler:
    """Return graphs, breaks and kernels, or the reason why torch.compile does not take the
    target."""
    try:
        facts = explain_target(target, backward=backward, progress=progress).describe()
    except TargetError as error:
        return Compiler(failed=str(error))
    return Compiler(
        graphs=facts["graphs"],
        breaks=tuple(map(_break, facts["breaks"])),
        kernels=tuple(map(_kernel, facts["kernels"])),
        cold_s=facts["compile"]["cold_s"],
        warm_s=facts["compile"]["warm_s"],
    )


def _break(found: Mapping[str, Any]) -> str:
    return f"{found['line']}: {found['reason']}" if "line" in found else found["reason"]


def _kernel(found: Mapping[str, Any]) -> Kernel:
    return Kernel(
        name=found["name"],
        kind=_KINDS.get(found["kind"], found["kind"]),
        phase=found["phase"],
        operators=", ".join(name.removeprefix("aten.") for name in found["operators"]),
        lines=", ".join(line["line"] for line in found["lines"]),
        bytes=found["bytes"],
        us=found["us"],
        gbps=found["gbps"],
        share=found["share"],
    )

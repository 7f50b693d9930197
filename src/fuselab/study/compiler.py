"""What torch.compile makes of the target, from ``explain``."""

from __future__ import annotations

from fuselab.inspect.targets import Target
from fuselab.study.facts import Compiler


def compiler_of(target: Target, backward: bool) -> Compiler:
    return Compiler(0, (), ())

"""An operator for tests: one function, called the way dispatch calls an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuselab.runtime import launch_plans, launch_recording


class Planned:
    """``runs`` counts how often the function itself ran: the other calls took a plan."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.op_id = launch_plans.register(f"test::{function.__name__}")
        self.runs = 0

    def __call__(self, *args: Any) -> Any:
        held = launch_plans.lookup(self.op_id, "cpp", args)
        if held is not None:
            return held
        self.runs += 1
        with launch_recording.record(self.op_id, "cpp", args) as recording:
            outputs = self.function(*recording.args)
            recording.finish(outputs)
        return outputs

    def hits(self, *args: Any) -> bool:
        """Whether these arguments have a plan now."""
        return launch_plans.lookup(self.op_id, "cpp", args) is not None

"""The rows of a check: where each implementation and dtype is judged, and in which processes.

An operator that the user names is held by processes: one that answers for its declaration, and one
for each row that runs the implementation. An operator object that only the caller's process holds
stays there, and so do both ends. Triton's interpreter always has processes of its own. With a GPU
rows run several at a time, each with processes of its own (``fuselab.prove.row_apart``), so that
first runs compile in parallel and a kernel that breaks its CUDA context ends its own row only.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field

import torch

from fuselab.op import FusedOp
from fuselab.prove.held import End, Held, Here
from fuselab.prove.processes import CALL_LIMIT_S, Process


@dataclass
class Ends:
    """The ends of one operator: processes that load ``spec``, or this process for ``op``.

    A context manager, which ends the processes that it started. ``limit_s`` bounds a call.
    """

    spec: str | None
    op: FusedOp | None = None
    limit_s: float = CALL_LIMIT_S
    _references: dict[tuple[str, str | None], Process] = field(default_factory=dict)
    _made: list[Process] = field(default_factory=list)
    _started: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    @property
    def replaced(self) -> tuple[str, ...]:
        """Names of PyTorch's that the file's import replaced where the reference is computed."""
        return tuple(dict.fromkeys(name for one in self._made for name in one.replaced))

    def is_composition(self, device: torch.device) -> bool:
        """Return whether ``spec`` names a composition. Raises TargetError where it cannot be
        imported."""
        process = self.reference(device)
        assert isinstance(process, Process)
        process.start()
        return process.is_whole

    def reference(
        self, device: torch.device, interpreted: str | None = None, apart: bool = False
    ) -> End:
        """Return the end that answers for the declaration; rows that do not run ``apart`` share
        it. ``interpreted`` names the implementation that Triton's interpreter runs."""
        if self.op is not None and not apart and interpreted is None:
            return Here(Held(self.op))
        made = self._process("reference", device, interpreted, interpreted is not None, apart)
        if apart:
            return made
        return self._references.setdefault((str(device), interpreted), made)

    def candidate(
        self,
        device: torch.device,
        implementation: str,
        interpreted: bool = False,
        apart: bool = False,
    ) -> End:
        """Return the end that runs an implementation, a new one for every row."""
        if self.op is not None and not apart and not interpreted:
            return Here(Held(self.op, implementation))
        return self._process("candidate", device, implementation, interpreted, apart)

    def _process(
        self,
        role: str,
        device: torch.device,
        implementation: str | None,
        interpreted: bool,
        apart: bool,
    ) -> Process:
        assert self.spec is not None
        process = Process(
            self.spec,
            "reference" if role == "reference" else "candidate",
            device,
            implementation,
            interpreted,
            limit_s=self.limit_s,
            threads=_threads(role, device, apart),
            patient=True,
        )
        with self._lock:
            self._started.callback(process.close)
            self._made.append(process)
        return process


def _threads(role: str, device: torch.device, apart: bool) -> int | None:
    """Return how many threads a process may use, None for all. Of rows beside each other each has
    one. A reference leaves half the cores to the interpreter's process beside it: on two cores each
    of its many small operations would wait for the one that is taken. A candidate on the CPU has
    all, for what goes wrong between threads."""
    if role == "candidate" and (device.type == "cpu" or not apart):
        return None
    return 1 if apart else max(1, len(os.sched_getaffinity(0)) // 2)


def rows_at_a_time() -> int:
    """Return how many rows run at once on a GPU; each has three processes that take turns."""
    return len(os.sched_getaffinity(0))

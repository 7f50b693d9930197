"""One run of ``fuselab debug``: a child process interprets the kernels, its terminal is the user's.

The child stops and prints as asked, and writes what it saw as JSON for the screen, the picture and
the caller.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fuselab.errors import ArgumentError, TargetError
from fuselab.runtime import interpreter

CHILD = "fuselab.inspect.debugger.child"


@dataclass(frozen=True)
class Session:
    """A subject, and where and how to look at it.

    ``at`` is a line of a kernel, ``programs`` are the program ids to look at (all if there are
    none), ``names`` the variables to print without stopping. ``against`` is a torch expression of
    the arguments' names. ``grid`` launches a bare kernel.
    """

    spec: str
    at: int | None = None
    programs: Sequence[Sequence[int]] = ()
    names: Sequence[str] = ()
    against: str | None = None
    case: str | None = None
    implementation: str | None = None
    backward: bool = False
    grid: Sequence[int] | None = None


def run(session: Session) -> dict[str, Any]:
    """Run the session in a child process; return what it saw as plain values.

    Keys: ``target``, ``kernels`` (name, file, lines, grid), ``accesses`` (kernel, program, line,
    kind, tensor, offsets and what the mask cuts), ``tensors``, ``against``, ``printed``.

    Raises TargetError with what was wrong with the subject, or with the line and the program of a
    kernel that raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, result = Path(folder) / "session.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(asdict(session)))
        sys.stdout.flush()
        done = subprocess.run(
            [sys.executable, "-m", CHILD, str(asked), str(result)],
            env=interpreter.environment(),
            check=False,
        )
        if not result.is_file():
            raise TargetError(
                f"the interpreter's process died in {session.spec} (exit status {done.returncode})."
            )
        found: dict[str, Any] = json.loads(result.read_text())
    if "error" in found:
        raise TargetError(found["error"])
    return found


def program_of(text: str) -> tuple[int, ...]:
    """Return a program id such as ``0`` or ``0,3`` as numbers. Raises ArgumentError."""
    parts = text.split(",")
    if not 1 <= len(parts) <= 3 or not all(part.strip().isdigit() for part in parts):
        raise ArgumentError(
            f"--program {text}: write the program's id, 2, or 0,3 in a grid of two dimensions."
        )
    return tuple(int(part) for part in parts)


def grid_of(text: str) -> tuple[int, ...]:
    """Return a grid such as ``98`` or ``4,2`` as numbers. Raises ArgumentError."""
    parts = text.split(",")
    if not 1 <= len(parts) <= 3 or not all(part.strip().isdigit() for part in parts):
        raise ArgumentError(f"--grid {text}: write the number of programs, 98, or 4,2.")
    grid = tuple(int(part) for part in parts)
    if 0 in grid:
        raise ArgumentError(f"--grid {text} runs no program; write 1 or more.")
    return grid

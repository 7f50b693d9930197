"""Profile a user's script, which runs in a child process with the profiler in it."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fuselab.errors import MissingTargetError, TargetError
from fuselab.inspect.profile import Profile, Schedule
from fuselab.inspect.user_code import plain
from fuselab.measure.fresh import child_environment


def profile_script(
    script: str,
    arguments: Sequence[str],
    schedule: Schedule = (1, 1, 3, 1),
    *,
    within: str | None = None,
) -> Profile:
    """Run ``script`` once and profile its steps, or all of it if it has none. The script ``-m`` is
    the module that the first of ``arguments`` names.

    Every ``step()`` of the first optimizer that makes one ends a step. A script without an
    optimizer is one step from its first line to its last, without source lines and shapes. Its
    output goes to stderr. ``within`` restricts tables and findings to one named range. Raises
    TargetError if the file is missing, the script fails, or there is no such range.
    """
    is_module = script == "-m"
    if not is_module and not Path(script).is_file():
        raise MissingTargetError(f"no file '{plain(script)}'; name the script behind python.")
    with tempfile.TemporaryDirectory(prefix="fuselab-") as folder:
        answer = Path(folder) / "answer"
        steps = ",".join(map(str, schedule))
        command = [sys.executable, "-m", "fuselab.inspect.script_runner", str(answer), steps]
        command.append(within or "")
        # The profiler's C++ part would warn of memory that was allocated before it started.
        level = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
        environment = child_environment(TORCH_CPP_LOG_LEVEL=level)
        sys.stderr.flush()
        done = subprocess.run([*command, script, *arguments], env=environment, stdout=2)
        if not answer.is_file():
            name = arguments[0] if is_module else Path(script).name
            raise TargetError(_ended(plain(name), script, done.returncode))
        outcome = pickle.loads(answer.read_bytes())  # written by our own child just now
    if isinstance(outcome, str):
        raise TargetError(outcome)
    assert isinstance(outcome, Profile)
    return outcome


def _ended(name: str, script: str, status: int) -> str:
    """Return the sentence on a script whose process ended before its profile was written."""
    if status >= 0:
        return (
            f"{name} ended the process itself (exit status {status}) before its profile was "
            "written; let it return."
        )
    try:
        text = Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # a module, whose file is not known here
        text = ""
    own = re.search(r"\b(?:torch|autograd)\.profiler\b", text) is not None
    return f"{name} was ended by {signal.Signals(-status).name} before its profile was written" + (
        "; it seems to start PyTorch's profiler itself, and a process has one: leave it out, or "
        "give the trace that it writes (fuselab profile TRACE.json)."
        if own
        else "."
    )

"""The C++ compiler of this machine: which one, which version, and one run of it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from fuselab.errors import BuildError


@functools.cache
def compiler() -> str:
    """Return ``$CXX``, else g++, else c++ or clang++. BuildError says what to install."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        if found := shutil.which(name):
            return found
    raise BuildError("no C++ compiler was found; install g++ (apt-get install g++) or set CXX.")


@functools.cache
def compiler_version() -> str:
    """Return the compiler's own version line."""
    result = run_command([compiler(), "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return result.stdout.splitlines()[0] if result.stdout else compiler()


# Held while a process starts, and while Python forks. A process that is forked in between would
# inherit the pipe by which Popen hears that its command runs, and Popen would wait for its end.
_starting = threading.Lock()
os.register_at_fork(
    before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release
)


def run_command(command: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as ``subprocess.run`` does, beside threads that may fork."""
    with _starting:
        process = subprocess.Popen(command, text=True, **settings)
    with process:
        try:
            output, log = process.communicate()
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, log)


def run_compiler(arguments: Sequence[str], what: str) -> None:
    """Run the compiler. BuildError has its log; ``what`` begins the error's sentence."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    check(run_command([compiler(), *arguments], **pipes), what)


def check(result: subprocess.CompletedProcess[str], what: str) -> None:
    """Raise BuildError, with the log, for a run of the compiler that has failed."""
    if result.returncode:
        raise build_error(f"{what} does not compile", result.stderr)


def build_error(what: str, log: str) -> BuildError:
    """Return the error that says ``what``, with the first error of a compiler's log."""
    first = next((line for line in log.splitlines() if "error" in line), log.strip())
    return BuildError(f"{what}: {first}", log=log)

"""Create .venv with the pinned versions, or recreate it if an install was interrupted or changed.

``make`` runs this with the machine's own Python; every argument goes to pip. A stamp inside
``.venv`` is written last: without it the environment is incomplete. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

CLONE = Path(__file__).resolve().parent.parent
ENVIRONMENT = CLONE / ".venv"
LOCK = CLONE / "requirements.lock"
STAMP = ENVIRONMENT / "fuselab-installed"
OLDEST_PYTHON = (3, 11)


def main(pip_arguments: list[str]) -> None:
    check_python()
    check_compiler()
    with alone():
        reason = why_rebuild()
        if reason is None:
            return
        if ENVIRONMENT.exists() or ENVIRONMENT.is_symlink():
            say(f"{reason}; making .venv anew.")
            remove(ENVIRONMENT)
        else:
            say("making .venv with the versions of requirements.lock; this takes a few minutes.")
        create()
        install(pip_arguments)
        STAMP.write_text(fingerprint(), encoding="utf-8")
    say("installed; the command is .venv/bin/fuselab.")
    if any(letter.isspace() for letter in str(CLONE)):
        # Inductor passes its library folder to the linker unquoted (seen with torch 2.13).
        say("torch.compile for the CPU fails under a path with spaces; move the clone to use it.")


def say(sentence: str) -> None:
    print(f"install: {sentence}", file=sys.stderr, flush=True)


def check_python() -> None:
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            "install: Python {}.{} is too old, 3.11 or newer is needed; "
            "call make PYTHON=/path/to/python3.11.".format(*sys.version_info[:2])
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"install: this Python has no '{error.name}', which makes .venv; get it with "
            "'sudo apt install python3-venv', or call make PYTHON=/path/to/another/python3."
        )


def check_compiler() -> None:
    """Check for a C++ compiler, which builds CPU kernels, torch.compile's code and Triton's
    launcher."""
    candidates = [name for name in (os.environ.get("CXX"), "g++", "c++", "clang++") if name]
    if not any(shutil.which(name) for name in candidates):
        sys.exit(
            f"install: no C++ compiler found (looked for {', '.join(candidates)}); get one with "
            "'sudo apt install g++' or 'sudo dnf install gcc-c++'."
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        say(
            "Python.h is missing, so torch.compile and the C++ launcher will not build; get it "
            "with 'sudo apt install python3-dev' or 'sudo dnf install python3-devel'."
        )


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lock the clone's folder, so that a second make waits.

    Otherwise it would find a .venv half-made by the first one and remove it.
    """
    folder = os.open(CLONE, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def why_rebuild() -> str | None:
    """Return None if .venv is complete and current, else the reason why it is not."""
    if not os.access(ENVIRONMENT / "bin" / "python", os.X_OK):
        return ".venv has no working Python"
    if not STAMP.is_file():
        return ".venv is half-made (an earlier install was interrupted)"
    if STAMP.read_text(encoding="utf-8") != fingerprint():
        return ".venv was made for other pins, another Python or another folder"
    return None


def fingerprint() -> str:
    """Return a digest of what .venv depends on: the pins, the interpreter, and the clone's path."""
    digest = hashlib.sha256(LOCK.read_bytes())
    digest.update(f"\0{sys.version}\0{CLONE}".encode())
    return digest.hexdigest()


def remove(environment: Path) -> None:
    if environment.is_symlink():
        environment.unlink()
    else:
        shutil.rmtree(environment)


def create() -> None:
    run([sys.executable, "-m", "venv", str(ENVIRONMENT)])


def install(pip_arguments: list[str]) -> None:
    pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    pinned = [*pip, "install", "--quiet", "--constraint", str(LOCK), *pip_arguments]
    # The build backend comes first and pinned too, so that build isolation installs nothing.
    run([*pinned, "setuptools"])
    run([*pinned, "--no-build-isolation", "--editable", f"{CLONE}[dev]"])


def run(command: list[str]) -> None:
    try:
        status = subprocess.call(command)
    except KeyboardInterrupt:
        status = 130
    if status != 0:
        sys.exit(
            f"install: '{' '.join(command)}' ended with status {status}; .venv is incomplete, and "
            "the next make starts it anew."
        )


if __name__ == "__main__":
    main(sys.argv[1:])

"""Build the wheel and the source archive into dist/, and try the wheel from an empty folder.

    python tools/build_wheel.py

The wheel is built from the unpacked source archive, so both are complete or neither is. It is then
installed, alone, in a new environment that borrows the other packages from this one, and there
``fuselab --help``, ``fuselab doctor``, an operator on the CPU and a compilation of CUDA C++ must
run. Nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]
DIST = CLONE / "dist"

OPERATOR = """
import sys
import torch
import fuselab

assert fuselab.__file__.startswith(sys.prefix), fuselab.__file__
input = torch.randn(64, 1000, requires_grad=True)
output = fuselab.ops.softmax(input, implementation="cpp")
output[:, 0].sum().backward()
torch.testing.assert_close(output, torch.softmax(input, -1))
assert input.grad.abs().sum() > 0
print("softmax by its C++ kernel, forward and backward, fuselab", fuselab.__version__)
"""


def main() -> None:
    """Build, install, try; exit with a sentence where a step fails."""
    with tempfile.TemporaryDirectory(prefix="fuselab-build-") as folder:
        scratch = Path(folder)
        os.environ.pop("PYTHONPATH", None)
        # Not the user's cache: ceilings measured while the machine builds would be kept there.
        os.environ["FUSELAB_CACHE"] = str(scratch / "cache")
        wheel = build(scratch)
        python = install(wheel, scratch / "environment")
        empty = scratch / "empty"
        empty.mkdir()
        command = python.with_name("fuselab")
        run([command, "--help"], empty, quiet=True)
        run([command, "doctor"], empty)
        run([python, "-c", OPERATOR], empty)
        run([command, "check", "square", "--implementation", "cuda", "--quick"], empty)
    print(f"built and tried: {', '.join(sorted(file.name for file in DIST.iterdir()))}")


def build(scratch: Path) -> Path:
    """Build both archives into an empty dist/; return the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    source = scratch / "source"
    source.mkdir()
    call_backend("build_sdist", CLONE)
    (archive,) = DIST.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(source, filter="data")
    (unpacked,) = source.iterdir()
    call_backend("build_wheel", unpacked)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def call_backend(hook: str, source: Path) -> None:
    """Call a hook of setuptools in ``source``; what it builds lies in dist/."""
    program = f"from setuptools import build_meta; build_meta.{hook}({str(DIST)!r})"
    run([sys.executable, "-c", program], source, quiet=True)


def install(wheel: Path, environment: Path) -> Path:
    """Install ``wheel`` alone in a new environment; return its Python. All other packages are those
    of this environment, by links: NVIDIA's are looked for in an environment's own folder."""
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    libraries = environment / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    for folder in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        for entry in Path(folder).iterdir():
            ours = entry.name.startswith(("fuselab", "__editable__")) or entry.suffix == ".pth"
            if not ours and not (libraries / entry.name).exists():
                (libraries / entry.name).symlink_to(entry)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], CLONE)
    return python


def run(command: Sequence[str | Path], folder: Path, quiet: bool = False) -> None:
    """Run ``command`` in ``folder``, its output shown unless ``quiet``; exit where it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=folder,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
    )
    if done.returncode != 0:
        shown = "-c ..." if "-c" in words else " ".join(words[1:])
        sys.exit(
            f"{done.stdout or ''}build: '{Path(words[0]).name} {shown}' ended with status "
            f"{done.returncode}."
        )


if __name__ == "__main__":
    main()

"""Write the golden files of tests/eject again, after an intended change of what eject writes.

Run it with the locked torch: ``.venv/bin/python tools/eject_golden.py``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests" / "eject"
sys.path.insert(0, str(TESTS))

from ejected_functions import (  # type: ignore[import-not-found]  # noqa: E402  (in TESTS)
    DROPPED,
    EXAMPLES,
)

from fuselab.ejection.package import planned_package  # noqa: E402
from fuselab.ejection.write import package_files  # noqa: E402
from fuselab.ejection.write_standalone import standalone_files  # noqa: E402

# The examples whose files are kept, and the files; together they show every part of the emitters.
KEPT = {
    "residual_norm": (
        "op.py",
        "reference.py",
        "gradient.py",
        "triton_kernels.py",
        "cuda_kernels.cu",
        "cpu_kernels.cpp",
        "page.md",
    ),
    "dropped_residual": (
        "__init__.py",
        "reference.py",
        "gradient.py",
        "triton_kernels.py",
        "cuda_kernels.cu",
        "cpu_kernels.cpp",
    ),
    "gated_norm": ("reference.py",),
    "add_rms_norm": ("__init__.py", "op.py", "gradient.py", "triton_kernels.py"),
    "row_statistics": ("__init__.py", "reference.py", "cpu_kernels.cpp", "cuda_kernels.cu"),
    "group_norm_silu": ("op.py",),
    "standalone_two_losses": (
        "__init__.py",
        "launchers.py",
        "op.py",
        "page.md",
    ),
    **dict.fromkeys(
        (
            "activations",
            "biased_mish",
            "clamped",
            "in_place",
            "instance_norm_relu",
            "mean_of_two",
            "smooth_loss",
            "soft_maximum",
            "sum_of_squares",
            "symmetric",
        ),
        ("triton_kernels.py",),
    ),
}


def main() -> None:
    """Write the files of every example."""
    shutil.rmtree(TESTS / "golden", ignore_errors=True)
    for name, kept in KEPT.items():
        plain = name.removeprefix("standalone_")
        function, args = {**EXAMPLES, "dropped_residual": DROPPED}[plain]
        written = package_files if plain == name else standalone_files
        files = written(planned_package(function, args, {}, plain))
        folder = TESTS / "golden" / name
        folder.mkdir(parents=True)
        for file in kept:
            (folder / file).write_text(files[file], encoding="utf-8")


if __name__ == "__main__":
    main()

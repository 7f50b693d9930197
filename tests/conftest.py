"""What every test runs under: no user settings, one warm kernel cache, its share of the cores."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Kernels are cached on disk by content and published in one step, so all workers share one folder,
# and it stays warm from run to run (a cold suite compiles for minutes). It is never the user's.
# Set before anything imports torch: child processes inherit it.
CACHE = Path(tempfile.gettempdir()) / f"fuselab-tests-{os.getuid()}"
CACHE.mkdir(mode=0o700, exist_ok=True)
os.environ["FUSELAB_CACHE"] = str(CACHE / "fuselab")
# Its key leaves the instruction set out (fuselab.runtime.inductor_cache).
CAPABILITY = os.environ.get("ATEN_CPU_CAPABILITY", "native").lower()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(CACHE / "inductor" / CAPABILITY)
os.environ["TRITON_CACHE_DIR"] = str(CACHE / "triton")
os.environ["FUSELAB_QUIET"] = "1"  # what is on stderr must not depend on what is built
os.environ["XDG_CONFIG_HOME"] = str(CACHE / "config")
os.environ.pop("TRITON_INTERPRET", None)  # only child processes of the interpreter's tests set it
os.environ.pop("FUSELAB_IMPLEMENTATION", None)  # the tests ask what auto takes

# Child processes import the same sources also where fuselab is not installed.
SOURCE = str(Path(__file__).resolve().parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
THREADS = max(1, min(2, (os.cpu_count() or 1) // WORKERS))
os.environ["OMP_NUM_THREADS"] = str(THREADS)

import pytest  # noqa: E402
import torch  # noqa: E402

from fuselab.fusion import fuse  # noqa: E402
from fuselab.op import FusedOp  # noqa: E402
from fuselab.runtime import autograd_node, dispatch  # noqa: E402

torch.set_num_threads(THREADS)
# What a call does must not depend on when a compiler in the background ends.
autograd_node.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    reason = "needs a CUDA device: torch " + (
        f"is built for CUDA {torch.version.cuda} and finds none"
        if torch.version.cuda
        else f"{torch.__version__} is a CPU build"
    )
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def imported_modules_are_no_garbage() -> None:
    """Every timing makes full collections: they walk through the test's own objects from here on,
    and not through all that torch made on import (0.2 s each, two thirds of the bench tests)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def alone_with_large_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked ``large_memory`` wait for each other, and give their memory back."""
    if request.node.get_closest_marker("large_memory") is None:
        yield
        return
    with (CACHE / "large_memory.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def no_operators_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """``fuse`` uses every operator registered in the process; those that earlier tests registered,
    wrong ones among them, are hidden from it."""
    earlier = set(dispatch.registered())

    def registered() -> dict[str, FusedOp]:
        return {name: op for name, op in dispatch.registered().items() if name not in earlier}

    monkeypatch.setattr(fuse, "registered", registered)

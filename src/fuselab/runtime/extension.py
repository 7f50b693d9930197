"""C++ extension modules of fuselab's own: compiled against torch, kept on disk, loaded once.

Compiling one takes several seconds. A call that could use one asks ``ready``, which starts the
compiler in the background, and the call runs without the module until it is there. The compiler
continues if the process ends, so that short processes get the module too. Where results must not
depend on when a compiler ends (``fallback.strict``: check, bench, study, tests), ``ready`` waits.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sysconfig
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from types import ModuleType

import torch

from fuselab.errors import BuildError
from fuselab.runtime import builds, cache, fallback
from fuselab.runtime.compiler import check, compiler

_OPTIONS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")


class NativeExtension:
    """One extension module: ``source`` (a ``.cpp`` file) defines the Python module ``name``.

    ``install`` receives the loaded module. ``loss`` begins the warning that is given once if the
    module cannot be built or loaded: it says what is lost without it.
    """

    def __init__(
        self, source: Path, name: str, install: Callable[[ModuleType], None], loss: str
    ) -> None:
        self.source, self.name = source, name
        self._install, self._loss = install, loss
        self._lock = threading.Lock()
        self._building: Future[Path] | None = None
        self._is_tried = self._is_loaded = False
        os.register_at_fork(after_in_child=self._forget_thread)

    def ready(self) -> bool:
        """Return whether the module is loaded. If it has to be compiled first, start that in the
        background (once) and return False; in ``fallback.strict`` wait for it instead."""
        if self._is_tried:
            return self._is_loaded
        if fallback.is_strict() or self._begin(builds.BACKGROUND_NICENESS).done():
            return self.start()
        return False

    def start(self) -> bool:
        """Load the module, waiting until it is compiled if needed. Return False, with one warning
        in this process, if it cannot be built or loaded."""
        if self._is_tried:
            return self._is_loaded
        building = self._begin()
        wait((building,))  # without the lock, which `ready` takes
        with self._lock:
            if not self._is_tried:
                try:
                    self._install(_module(self.name, building.result()))
                    self._is_loaded = True
                except (BuildError, ImportError) as error:
                    warnings.warn(f"{self._loss}: {error}", stacklevel=3)
                finally:
                    self._is_tried = True
        return self._is_loaded

    def start_if_built(self) -> None:
        """Load the module if an earlier process has compiled it (1 ms), else do nothing."""
        with contextlib.suppress(BuildError, OSError):
            if self.is_built():
                self.start()

    def is_built(self) -> bool:
        """Return whether ``library`` has the file without compiling. Raises BuildError if there is
        no compiler."""
        return cache.holds(self.key(), ".so")

    def library(self) -> Path:
        """Return the compiled file, after compiling it if needed. Raises BuildError."""
        return cache.fetch_by_command(
            self.key(), ".so", self._command, lambda result: check(result, self.source.name)
        )

    def key(self) -> str:
        """Return the cache's key: the source with every header of ours that it includes, torch,
        Python, the compiler and its options. Raises BuildError without a compiler."""
        found = os.stat(compiler())
        return cache.key(
            self.source.name,
            cache.source_text(self.source),
            torch.__version__,
            torch.compiled_with_cxx11_abi(),
            sysconfig.get_config_var("SOABI"),
            (compiler(), found.st_size, found.st_mtime_ns),
            _OPTIONS,
        )

    def _begin(self, niceness: int = 0) -> Future[Path]:
        """Return this process's build, which is started if it was not."""
        with self._lock:
            if self._building is None:
                self._building = self._begun(niceness)
            return self._building

    def _begun(self, niceness: int) -> Future[Path]:
        done: Future[Path] = Future()
        try:
            if not self.is_built():
                return builds.in_background(self.library, niceness, daemon=True)
            done.set_result(self.library())
        except (BuildError, OSError) as error:
            done.set_exception(error)
        return done

    def _command(self, new: Path) -> list[str]:
        """Return the command that compiles to ``new``."""
        root = Path(torch.__file__).parent
        includes = (root / "include", Path(sysconfig.get_path("include")))
        if not (includes[1] / "Python.h").is_file():
            raise BuildError("Python.h was not found; install python3-dev (apt-get) or its like.")
        builds.announce(f"{self.source.parent.name}/{self.source.name}")
        options = [*_OPTIONS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        options += [f"-isystem{folder}" for folder in includes]
        # They are found at load time under the names by which `import torch` loaded them.
        libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
        return [compiler(), *options, str(self.source), "-o", str(new), *libraries]

    def _forget_thread(self) -> None:
        """Start over in a forked child, where the parent's threads and their locks are missing."""
        self._lock = threading.Lock()
        if not self._is_tried:
            self._building = None


def _module(name: str, path: Path) -> ModuleType:
    """Return the extension module ``name`` of a compiled file."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module

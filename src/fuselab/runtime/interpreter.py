"""The Triton interpreter, in a child process: kernels run on the CPU, line by line, as Python.

``TRITON_INTERPRET=1`` takes effect when a kernel is decorated and holds for a whole process, so
nothing but this file sets it, and only for a child. One child serves many calls, because its start
takes 2 s.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from fuselab.errors import FuselabError, TargetError
from fuselab.runtime import interpreted_bounds, interpreted_libdevice

_START_S = 120.0  # importing torch takes 2 s, more on a busy machine


def run(function: str, *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> Any:
    """Call ``function`` in the interpreter's process and return what it returns.

    ``function`` is ``package.module:name`` or ``path/file.py:name``; the name may have dots.
    Arguments and result are pickled: tensors (strides and shared storage are kept), plain values
    and containers. The function must return its results, for changes to its arguments stay in the
    child. One process serves all calls of this process, one at a time.

    Raises:
        FuselabError: the function raised it.
        TargetError: the function raised another error, took longer than ``timeout_s`` seconds, or
            its process died.
    """
    return _shared().call(function, *args, timeout_s=timeout_s, **kwargs)


def environment() -> dict[str, str]:
    """Return the environment of a child process in which Triton interprets kernels."""
    return {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


@contextlib.contextmanager
def first_configuration() -> Iterator[None]:
    """Let a kernel that is tuned automatically take its first configuration inside, since nothing
    can be timed in the interpreter."""
    from triton.runtime.autotuner import Autotuner

    def untimed(*_: Any, **__: Any) -> list[float]:
        return [1.0, 1.0, 1.0]

    with mock.patch.object(Autotuner, "_bench", untimed):
        yield


class Interpreter:
    """A child process with ``TRITON_INTERPRET=1``. A context manager; ``run`` shares one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: str, *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> Any:
        """Call a function as ``run`` does, in this child."""
        payload = _packed((function, args, kwargs))
        with self._lock:
            try:
                reply = self._exchange(payload, timeout_s)
            except TimeoutError:
                self.close()
                raise TargetError(
                    f"{function} took longer than {timeout_s:g} s in the Triton interpreter (about "
                    "0.6 ms per program); use smaller tensors or larger blocks."
                ) from None
            except (EOFError, OSError):
                status = self.close()
                raise TargetError(
                    f"the Triton interpreter's process died in {function} (exit status {status})."
                ) from None
        error, value = _unpacked(reply)
        if error is None:
            return value
        if isinstance(error, FuselabError):
            raise error
        raise TargetError(f"{function} raised in the Triton interpreter: {value}") from error

    def close(self) -> int | None:
        """End the child and return its exit status (negative: the signal that ended it)."""
        process, self._process = self._process, None
        if process is None:
            return None
        self._connection.close()
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _exchange(self, payload: bytes, timeout_s: float) -> bytes:
        if self._process is None or self._process.poll() is not None:
            self._start()
            self._receive(_START_S)  # says that it is ready
        self._connection.send_bytes(payload)
        return self._receive(timeout_s)

    def _start(self) -> None:
        # A connection of its own, because a kernel's print() must not mix with the replies.
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                env=environment(),
                pass_fds=(theirs.fileno(),),
            )

    def _receive(self, timeout_s: float) -> bytes:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv_bytes()


@functools.cache
def _shared() -> Interpreter:
    interpreter = Interpreter()
    atexit.register(interpreter.close)
    return interpreter


def _has_descriptor(stream: Any) -> bool:
    try:
        return isinstance(stream.fileno(), int)
    except (AttributeError, OSError):
        return False


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(payload: bytes) -> Any:
    return torch.load(io.BytesIO(payload), weights_only=False)


def _function(name: str) -> Callable[..., Any]:
    """Return the function that ``run`` was asked for. Raises TargetError."""
    where, separator, attribute = name.rpartition(":")
    if not separator:
        raise TargetError(f"'{name}' names no function; write module:function or file.py:function.")
    try:
        module: Any = (
            _module_of_file(Path(where))
            if where.endswith(".py")
            else importlib.import_module(where)
        )
        found: Callable[..., Any] = functools.reduce(getattr, attribute.split("."), module)
        return found
    except (ImportError, OSError, AttributeError) as error:
        raise TargetError(f"'{name}' cannot be loaded: {error}.") from error


def _module_of_file(path: Path) -> ModuleType:
    """Return a user's file as a module, as part of its package if its folder is one. It is loaded
    again if the file has changed. A package takes the place of another one of its name."""
    path = path.resolve()
    changed = path.stat().st_mtime_ns
    package = (path.parent / "__init__.py").exists()
    name = f"{path.parent.name}.{path.stem}" if package else path.stem
    root = path.parent.parent
    if package and (root / "composed.py").exists():  # an operator of a composition
        name, root = f"{root.name}.{name}", root.parent
    whole = name.partition(".")[0]
    if package and whole in sys.stdlib_module_names:  # whose module must stay what it is
        return _module_in_place_of(path, changed, root / whole, name)
    if package and str(root) not in sys.path:
        sys.path.insert(0, str(root))
    elif not package and str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    known = sys.modules.get(name)
    if known is not None and getattr(known, "_fuselab_loaded", None) == (path, changed):
        return known
    if package:
        first = getattr(sys.modules.get(whole), "__file__", None)
        if first is not None and Path(first).resolve().parent != root / whole:
            for one in [one for one in sys.modules if one.partition(".")[0] == whole]:
                del sys.modules[one]
            sys.path.remove(str(root))
            sys.path.insert(0, str(root))
        importlib.import_module(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    module._fuselab_loaded = path, changed  # type: ignore[attr-defined]
    return module


def _module_in_place_of(path: Path, changed: int, folder: Path, name: str) -> ModuleType:
    """Return a file of a package that has the name of a module of Python, under another name."""
    whole, _, rest = name.partition(".")
    alias = f"fuselab_user_{whole}"
    known = sys.modules.get(f"{alias}.{rest}")
    if known is not None and getattr(known, "_fuselab_loaded", None) == (path, changed):
        return known
    for one in [one for one in sys.modules if one.partition(".")[0] == alias]:
        del sys.modules[one]
    spec = importlib.util.spec_from_file_location(
        alias, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is not a Python package")
    package = sys.modules[alias] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    module = importlib.import_module(f"{alias}.{rest}")
    module._fuselab_loaded = path, changed  # type: ignore[attr-defined]
    return module


def _reply(payload: bytes) -> bytes:
    """Return (error or None, result or the error's text) of one call."""
    try:
        name, args, kwargs = _unpacked(payload)
        return _packed((None, _function(name)(*args, **kwargs)))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # the exception cannot be pickled
            error = RuntimeError(text)
        error.__cause__ = RuntimeError(traceback.format_exc())
        return _packed((error, text))


def _serve(descriptor: int) -> None:
    interpreted_libdevice.install()
    interpreted_bounds.install()
    ended = contextlib.suppress(EOFError, ConnectionError)
    with first_configuration(), Connection(descriptor) as caller, ended:
        caller.send_bytes(b"ready")
        while True:
            caller.send_bytes(_reply(caller.recv_bytes()))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))

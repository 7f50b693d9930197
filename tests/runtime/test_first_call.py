"""The first call in an empty cache: it says so once, compilers run side by side, nothing waits for
the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselab.errors import BuildError
from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime import builds, cache, compiler, cpp_library, extension, fallback
from fuselab.runtime.cpp_source import CppSource, i64
from fuselab.runtime.dispatch import operator
from fuselab.runtime.extension import NativeExtension

KERNELS = """
template <typename T> void twice(const T* input, T* output, long numel) {
  for (long i = 0; i < numel; ++i) output[i] = 2 * input[i];
}
template <typename T> void twice_backward(const T* grad, T* output, long numel) {
  for (long i = 0; i < numel; ++i) output[i] = 2 * grad[i];
}
"""
MODULE = """
#include <Python.h>
#include "answer.h"
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, nullptr}, {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "small", nullptr, -1, methods};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_small() {
  return PyModule_Create(&module);
}
"""
SECONDS = 60  # a compiler that waits longer for another one waits in vain


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUSELAB_CACHE", str(folder))
    return folder


@pytest.fixture
def loaded() -> list[ModuleType]:
    return []


@pytest.fixture
def small(tmp_path: Path, loaded: list[ModuleType]) -> NativeExtension:
    """An extension that takes a moment to compile."""
    (tmp_path / "small.cpp").write_text(MODULE)
    (tmp_path / "answer.h").write_text("#define ANSWER 42\n")
    return NativeExtension(tmp_path / "small.cpp", "small", loaded.append, "small is lost")


class Gate:
    """A compiler that waits until it is let go, and then compiles; ``command`` is its path."""

    def __init__(self, folder: Path) -> None:
        self._log, self._open, self.command = folder / "runs", folder / "open", folder / "c++"
        self.command.write_text(
            f"#!/bin/sh\necho run >> {self._log}\n"
            f"while [ ! -e {self._open} ]; do sleep 0.02; done\n"
            f'exec {compiler.compiler()} "$@"\n'
        )
        self.command.chmod(0o755)

    def open(self) -> None:
        self._open.touch()

    @property
    def runs(self) -> int:
        return self._log.read_text().count("run") if self._log.exists() else 0


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(tmp_path)
    monkeypatch.setattr(extension, "compiler", lambda: str(gate.command))
    return gate


def test_one_line_says_what_is_built_and_where_it_is_kept(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builds, "_announced", False)
    monkeypatch.setenv(builds.QUIET, "1")
    builds.announce("softmax/cpu_kernels.cpp")
    assert capsys.readouterr().err == ""
    monkeypatch.delenv(builds.QUIET)
    builds.announce("softmax/cpu_kernels.cpp")
    builds.announce("add/cpu_kernels.cpp")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for part in ("softmax/cpu_kernels.cpp", str(empty_cache), "the next process will not", "QUIET"):
        assert part in said


def test_only_a_process_that_compiles_says_so(tmp_path: Path) -> None:
    (tmp_path / "kernels.cpp").write_text(KERNELS)
    script = (
        "import torch\n"
        "from fuselab.runtime.cpp_source import CppSource, i64\n"
        f"source = CppSource({str(tmp_path / 'kernels.cpp')!r})\n"
        "for name in ('twice<float>', 'twice<double>'):\n"
        "    dtype = getattr(torch, name[6:-1])\n"
        "    values = torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype)\n"
        "    source.launch(name, (*values, i64(2)))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != builds.QUIET}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    said = [
        subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True
        ).stderr
        for _ in range(2)
    ]
    assert said[0].startswith(f"fuselab: compiling {tmp_path.name}/kernels.cpp")
    assert said[0].count("\n") == 1
    assert said[1] == ""


def test_a_call_does_not_wait_for_an_extension(
    small: NativeExtension, loaded: list[ModuleType], gate: Gate
) -> None:
    assert not small.ready()
    until(lambda: gate.runs == 1)
    assert not small.ready()
    assert loaded == []
    gate.open()
    until(small.ready)
    assert [module.answer() for module in loaded] == [42]
    assert gate.runs == 1


def test_strict_calls_wait_for_an_extension(
    small: NativeExtension, loaded: list[ModuleType]
) -> None:
    with fallback.strict():
        assert small.ready()
    assert len(loaded) == 1


def test_threads_load_an_extension_once(
    small: NativeExtension, loaded: list[ModuleType], gate: Gate
) -> None:
    gate.open()
    threads = [threading.Thread(target=small.start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(loaded), gate.runs) == (1, 1)


def test_an_extension_that_does_not_compile_warns_once(
    small: NativeExtension, loaded: list[ModuleType]
) -> None:
    small.source.write_text("#error no\n")
    with pytest.warns(UserWarning, match=r"small is lost: small\.cpp does not compile") as caught:
        assert not small.start()
        assert not small.ready()
    assert len(caught) == 1
    assert loaded == []


def test_a_changed_header_is_another_extension(small: NativeExtension) -> None:
    before = small.key()
    (small.source.parent / "answer.h").write_text("#define ANSWER 43\n")
    assert small.key() != before


PREAMBLE = """
    import os, subprocess, time
    from pathlib import Path
    start = subprocess._fork_exec
    def start_slowly(*args):
        process = start(*args)
        time.sleep({pause})  # until Popen hears whether its command runs
        return process
    subprocess._fork_exec = start_slowly
    from fuselab.runtime import extension
    extension.compiler = lambda: "{command}"
    loaded = []
    small = extension.NativeExtension(Path("{source}"), "small", loaded.append, "lost")
    assert not small.ready()
"""


def run(script: str, gate: Gate, small: NativeExtension, pause: float = 0.0) -> str:
    """Return what a process that has begun to build ``small`` prints; the compiler's start takes
    ``pause`` seconds longer there."""
    preamble = PREAMBLE.format(command=gate.command, source=small.source, pause=pause)
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(preamble + script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_process_that_ends_leaves_its_build_to_the_next(
    small: NativeExtension, loaded: list[ModuleType], gate: Gate, empty_cache: Path
) -> None:
    script = f"""
    while not os.path.exists("{gate.command.with_name("runs")}"): time.sleep(0.01)
    print("ends")
    """
    assert run(script, gate, small) == "ends\n"
    assert not small.is_built()
    gate.open()
    assert small.start()  # waits for the lock that the compiler holds
    assert loaded[0].answer() == 42
    assert gate.runs == 1
    assert len([path for path in empty_cache.rglob("*") if path.is_file()]) == 1


@pytest.mark.parametrize("pause", [0.0, 1.0])
def test_a_child_forked_during_a_build_builds_for_itself(
    small: NativeExtension, gate: Gate, pause: float
) -> None:
    """Threads stay in the parent, which holds the build's lock until it is done."""
    script = f"""
    while not os.path.exists("{gate.command.with_name("runs")}"): time.sleep(0.01)
    child = os.fork()
    Path("{gate.command.with_name("open")}").touch()
    if child == 0:
        assert small.start()
        os._exit(loaded[0].answer())
    assert small.start()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), loaded[0].answer())
    """
    assert run(script, gate, small, pause) == "42 42\n"
    assert gate.runs == 1


Function = Callable[..., Tensor]


@pytest.fixture
def twice(tmp_path: Path, request: pytest.FixtureRequest) -> Function:
    """An operator whose forward and backward are a C++ kernel each."""
    (tmp_path / "kernels.cpp").write_text(KERNELS)
    source = CppSource(tmp_path / "kernels.cpp")

    def reference(input: Tensor) -> Tensor:
        return 2 * input

    def reference_backward(
        needs: Sequence[bool], grad_output: Tensor, input: Tensor
    ) -> tuple[Tensor | None, ...]:
        return (2 * grad_output,)

    def forward(input: Tensor) -> Tensor:
        output = torch.empty_like(input)
        source.launch("twice<float>", (input, output, i64(input.numel())))
        return output

    def backward(needs: Any, grad_output: Tensor, input: Tensor) -> tuple[Tensor | None, ...]:
        assert needs == (True,)
        grad = torch.empty_like(input)
        args = (grad_output.contiguous(), grad, i64(grad.numel()))
        source.launch("twice_backward<float>", args)
        return (grad,)

    name = request.node.name.removeprefix("test_")
    return operator(
        FusedOp(
            name=f"first_call::{name}",
            reference=reference,
            implementations={"cpp": Implementation("cpu", forward, backward)},
            cost=lambda input: Cost(input.nbytes, input.nbytes, input.numel()),
            cases=[Case("one", lambda device, dtype, generator: Inputs((torch.ones(3),)))],
            gradient=Gradient(lambda output, input: (input,), reference_backward),
        )
    )


class Meeting:
    """A compiler of which two must run at a time; ``expressions`` are those compiled, sorted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, parties: int) -> None:
        self._barrier, self._found = threading.Barrier(parties), list[str]()
        monkeypatch.setattr(cpp_library, "run_compiler", self.run)

    def run(self, arguments: Sequence[str], what: str) -> None:
        if "-c" in arguments:  # not the linker
            self._found.append(what.rpartition(": ")[2])
            self._barrier.wait(SECONDS)
        compiler.run_compiler(arguments, what)

    @property
    def expressions(self) -> list[str]:
        return sorted(self._found)


def test_forward_and_backward_compile_side_by_side(
    twice: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting(monkeypatch, parties=2)
    value = torch.tensor([1.0, -3.0], requires_grad=True)
    output = twice(value)
    assert output.tolist() == [2.0, -6.0]
    output.sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [2.0, 2.0]
    assert meeting.expressions == ["twice<float>", "twice_backward<float>"]


def test_without_a_gradient_only_the_forward_compiles(
    twice: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting(monkeypatch, parties=1)
    with torch.no_grad():
        assert twice(torch.ones(2, requires_grad=True)).tolist() == [2.0, 2.0]
    for thread in threading.enumerate():
        if thread.name == "fuselab-build":
            thread.join()
    assert meeting.expressions == ["twice<float>"]


def test_a_kernel_that_does_not_compile_is_the_calls_own_error(
    twice: Function, tmp_path: Path
) -> None:
    (tmp_path / "kernels.cpp").write_text("#error no\n")
    with fallback.strict(), pytest.raises(BuildError, match="does not compile"):
        twice(torch.ones(2, requires_grad=True))


def test_a_lock_ends_though_a_forked_process_holds_the_file(tmp_path: Path) -> None:
    with cache.locked(tmp_path / "lock"):
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"],
            stdin=subprocess.PIPE,
            pass_fds=[
                int(name)
                for name in os.listdir("/proc/self/fd")
                if os.path.realpath(f"/proc/self/fd/{name}") == str(tmp_path / "lock")
            ],
        )
        (tmp_path / "same").hardlink_to(tmp_path / "lock")
    taken = threading.Event()

    def take() -> None:
        with cache.locked(tmp_path / "same"):
            taken.set()

    threading.Thread(target=take).start()
    assert taken.wait(SECONDS)
    child.communicate(b"\n")

"""Which instruction set C++ kernels are built for, by environment variable and machine."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from fuselab.errors import UnknownNameError, UnsupportedError
from fuselab.runtime import compiler_answers, cpp_library
from fuselab.runtime import instruction_set as of_machine

on_x86_64 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason=f"classes of x86-64, and this is {platform.machine()}"
)


@pytest.fixture(autouse=True)
def asked_anew() -> object:
    of_machine.instruction_set.cache_clear()
    yield
    of_machine.instruction_set.cache_clear()


@on_x86_64
@pytest.mark.parametrize(
    ("runs", "wanted", "options"),
    [
        (["default", "avx2", "avx512"], "default", ("-march=native", "-mno-avx")),
        (["default", "avx2", "avx512"], "avx2", ("-march=native", "-mno-avx512f")),
        (["default", "avx2", "avx512"], "avx512", ("-march=native",)),
        (["default", "avx2"], "AVX2", ("-march=native", "-mno-avx512f")),
    ],
)
def test_the_variable_lowers_the_target(
    runs: list[str], wanted: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_machine, "available", lambda: runs)
    monkeypatch.setenv(of_machine.VARIABLE, wanted)
    assert of_machine.instruction_set() == wanted.lower()
    assert of_machine.compiler_options() == options


@pytest.mark.parametrize(
    ("runs", "knows", "options"),
    [
        ("avx512", True, ("-mmove-max=512", "-mstore-max=512")),
        ("avx2", True, ("-mmove-max=256", "-mstore-max=256")),
        ("avx2", False, ()),
        ("default", True, ()),
    ],
)
def test_values_are_copied_by_whole_registers_where_the_compiler_can(
    runs: str, knows: bool, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp_library, "instruction_set", lambda: runs)
    monkeypatch.setattr(cpp_library, "compiler_options", lambda: ("-march=native",))
    monkeypatch.setattr(cpp_library, "takes", lambda *_: knows)
    assert cpp_library.options() == (*cpp_library.OPTIONS, "-march=native", *options)


def test_a_compiler_is_asked_which_options_it_knows() -> None:
    assert compiler_answers.takes("-O3")
    assert not compiler_answers.takes("-mno-such-option")


@on_x86_64
def test_native_is_the_best_that_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_machine, "available", lambda: ["default", "avx2"])
    monkeypatch.setenv(of_machine.VARIABLE, "native")
    assert of_machine.instruction_set() == "avx2"


@on_x86_64
@pytest.mark.parametrize("theirs", ["DEFAULT", "AVX2", "AVX512"])
def test_without_the_variable_it_is_pytorchs(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_machine, "available", lambda: ["default", "avx2", "avx512"])
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: theirs)
    monkeypatch.delenv(of_machine.VARIABLE, raising=False)
    assert of_machine.instruction_set() == theirs.lower()


@on_x86_64
def test_what_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_machine, "available", lambda: ["default", "avx2"])
    monkeypatch.setenv(of_machine.VARIABLE, "avx512")
    with pytest.raises(UnsupportedError, match="it has default, avx2"):
        of_machine.instruction_set()


@on_x86_64
def test_an_unknown_class_names_those_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(of_machine.VARIABLE, "sse9")
    with pytest.raises(UnknownNameError) as refused:
        of_machine.instruction_set()
    assert refused.value.known == ["avx2", "avx512", "default", "native"]


def test_another_architecture_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert of_machine.instruction_set() == "aarch64"
    assert of_machine.compiler_options() == ("-mcpu=native",)


@on_x86_64
def test_the_macros_of_a_lowered_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest class has neither AVX nor FMA, whatever machine it is built on."""
    code = (
        "import subprocess\n"
        "from fuselab.runtime.compiler import compiler\n"
        "from fuselab.runtime.instruction_set import compiler_options\n"
        "command = [compiler(), *compiler_options(), '-E', '-dM', '-x', 'c++', '/dev/null']\n"
        "print(subprocess.run(command, capture_output=True, text=True).stdout)"
    )
    monkeypatch.setenv(of_machine.VARIABLE, "default")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    macros = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("#define")}
    assert "__SSE2__" in macros
    assert not {"__AVX__", "__AVX2__", "__FMA__", "__F16C__", "__AVX512F__"} & macros

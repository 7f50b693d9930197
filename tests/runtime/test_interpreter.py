"""The child process of the Triton interpreter: values both ways, errors, timeouts, one start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fuselab.errors import ShapeError, TargetError, UnknownNameError
from fuselab.runtime import interpreter
from fuselab.runtime.interpreter import Interpreter

KERNELS = Path(__file__).with_name("small_triton_kernels.py")


def run(name: str, *args: object, **kwargs: object) -> object:
    return interpreter.run(f"{KERNELS}:{name}", *args, **kwargs)  # type: ignore[arg-type]


def test_a_kernel_runs_on_a_strided_tensor() -> None:
    value = torch.randn(20, 2)[:, 1]
    result = run("run_combined", value, 2.0)
    assert torch.equal(result, value * 2.0 + 3 + 0.5)


@pytest.mark.parametrize("numel", [1, 63, 64, 65])
def test_block_edges(numel: int) -> None:
    value = torch.randn(numel)
    assert torch.equal(run("run_scaled", value, scale=0.25), value * 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_float_argument_is_a_number_or_a_tensor(dtype: torch.dtype) -> None:
    value = torch.randn(20, dtype=dtype)
    for by in (0.1, torch.tensor(0.1, dtype=dtype)):
        assert torch.equal(run("run_shifted", value, by), value + 0.1)  # type: ignore[arg-type]


def test_one_process_serves_all_calls() -> None:
    first, second = run("process"), run("process")
    assert first == second != os.getpid()


def test_only_the_child_interprets() -> None:
    assert run("environment") == "1"
    assert "TRITON_INTERPRET" not in os.environ


def test_modules_are_found_by_name() -> None:
    assert interpreter.run("math:sqrt", 9.0) == 3.0
    assert interpreter.run("os:path.basename", "a/b") == "b"


def test_typed_errors_come_back_as_they_are() -> None:
    with pytest.raises(ShapeError, match="the sentence with the mend"):
        run("refuses")
    with pytest.raises(UnknownNameError) as refused:
        run("names_nothing_known")
    assert (refused.value.name, refused.value.known) == ("sofmax", ["softmax"])


def test_other_errors_name_the_function_and_carry_the_traceback() -> None:
    with pytest.raises(TargetError, match=r"divides_by_zero raised .*ZeroDivisionError") as caught:
        run("divides_by_zero")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("no_colon", "names no function"),
        ("no.such.module:f", "No module named"),
        ("/no/such/file.py:f", "No such file"),
        (f"{KERNELS}:missing", "no attribute 'missing'"),
    ],
)
def test_a_function_that_is_not_there(function: str, reason: str) -> None:
    with pytest.raises(TargetError, match=reason):
        interpreter.run(function)


def test_after_a_death_and_a_timeout_the_next_call_works() -> None:
    with Interpreter() as child:
        with pytest.raises(TargetError, match=r"died .*exit status 3"):
            child.call(f"{KERNELS}:exits")
        with pytest.raises(TargetError, match=r"took longer than 0\.2 s"):
            child.call(f"{KERNELS}:sleeps", timeout_s=0.2)
        assert child.call("math:sqrt", 4.0) == 2.0


def test_a_changed_file_is_loaded_anew(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for number in (1, 2):
        file.write_text(f"def value():\n    return {number}\n")
        os.utime(file, ns=(number, number))
        assert interpreter.run(f"{file}:value") == number


def test_a_file_of_a_package_finds_its_neighbours(tmp_path: Path) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "constants.py").write_text("VALUE = 7")
    (package / "op.py").write_text("from .constants import VALUE\ndef value():\n    return VALUE\n")
    assert interpreter.run(f"{package / 'op.py'}:value") == 7


def test_packages_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder, value in (("first", 1), ("second", 2)):
        package = tmp_path / folder / "same_name"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "held.py").write_text(f"VALUE = {value}\n")
        (package / "op.py").write_text(
            "from .held import VALUE\n\n\ndef read():\n    return VALUE\n"
        )
    found = [
        interpreter.run(f"{tmp_path}/{folder}/same_name/op.py:read")
        for folder in ("first", "second", "first")
    ]
    assert found == [1, 2, 1]


@pytest.mark.parametrize("name", ["numbers", "signal"])
def test_a_package_with_the_name_of_a_module_of_python(tmp_path: Path, name: str) -> None:
    """The module stays what it is for everything else, whether it has been imported or not."""
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("from .op import doubled\n")
    (package / "rate.py").write_text("RATE = 2\n")
    operator = package / "op.py"
    for rate in (2, 3):
        operator.write_text(
            f"from . import rate\n\ndef doubled(x):\n    return x * rate.RATE * {rate}\n"
        )
        os.utime(operator, (rate, rate))
        assert interpreter.run(f"{operator}:doubled", 4) == 8 * rate
    assert interpreter.run(f"{name}:__name__.upper") == name.upper()
    assert interpreter.run("fractions:Fraction", 1, 2) == 0.5

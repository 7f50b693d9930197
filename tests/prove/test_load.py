"""What load_op finds, and the one sentence it says when it finds nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fuselab.errors import ArgumentError, TargetError, UnknownNameError
from fuselab.prove.load import load, load_op, refuse_unknown, spec_of, spec_of_folder

CONTRACT = """
import torch
from fuselab.op import Case, Cost, FusedOp, Implementation, Inputs

def reference(input: torch.Tensor) -> torch.Tensor:
    return input * 2

def make(name):
    return FusedOp(
        name=f"mine::{name}",
        reference=reference,
        implementations={"plain": Implementation("cpu", lambda input: input * 2)},
        cost=lambda input: Cost(4, 4, 1),
        cases=[Case("one", lambda device, dtype, generator: Inputs((torch.ones(1),)))],
    )
"""


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_library_operator_by_both_names() -> None:
    op = load_op("add_mul_activation")
    assert op.name == "fuselab::add_mul_activation"
    assert load_op("fuselab::add_mul_activation") is op
    assert spec_of(op) == "fuselab::add_mul_activation"


def test_unknown_operator_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'add_mul_activation'") as refused:
        load_op("add_mul_activaton")
    assert (refused.value.kind, refused.value.name) == ("operator", "add_mul_activaton")


def test_file_with_one_operator(tmp_path: Path) -> None:
    spec = write(tmp_path / "one.py", CONTRACT + "OP = make('one')\n")
    op = load_op(spec)
    assert op.name == "mine::one"
    assert spec_of(op) == f"{spec}:OP"
    assert load_op(f"{spec}:OP") is op


def test_private_operators_do_not_count(tmp_path: Path) -> None:
    spec = write(tmp_path / "two.py", CONTRACT + "OP = make('two')\n_DRAFT = make('draft')\n")
    assert load_op(spec).name == "mine::two"
    assert load_op(f"{spec}:_DRAFT").name == "mine::draft"


def test_several_operators_must_be_picked(tmp_path: Path) -> None:
    spec = write(tmp_path / "several.py", CONTRACT + "A = make('a')\nB = make('b')\n")
    with pytest.raises(TargetError, match=r"several FusedOps \(A, B\).*several.py:A"):
        load_op(spec)
    assert load_op(f"{spec}:B").name == "mine::b"
    with pytest.raises(TargetError, match=r"'C'.*A, B"):
        load_op(f"{spec}:C")


def test_file_without_an_operator(tmp_path: Path) -> None:
    spec = write(tmp_path / "none.py", "x = 1\n")
    with pytest.raises(TargetError, match="no FusedOp at module level"):
        load_op(spec)


def test_file_with_a_bare_kernel_or_of_another_language(tmp_path: Path) -> None:
    kernel = "import triton\n\n@triton.jit\ndef double(pointer):\n    pass\n"
    spec = write(tmp_path / "bare.py", kernel)
    with pytest.raises(TargetError, match=r"fuselab new NAME --from .*bare.py:double.*tune"):
        load_op(spec)
    with pytest.raises(TargetError, match=r"kernel.cu declares no operator; `fuselab new"):
        load_op(write(tmp_path / "kernel.cu", "__global__ void f() {}\n"))


def test_missing_file() -> None:
    with pytest.raises(TargetError, match=r"nowhere/op.py: no such file"):
        load_op("nowhere/op.py")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ny = x / 0\n", r"raises.py:2: ZeroDivisionError: division by zero"),
        ("import nothing_of_that_name\n", r"raises.py:1: ModuleNotFoundError"),
        ("x = (\n", r"raises.py:1: SyntaxError"),
        ("import sys\n\nsys.exit('no')\n", r"raises.py:3: SystemExit: no"),
    ],
)
def test_file_that_raises_says_what_and_where(tmp_path: Path, text: str, said: str) -> None:
    spec = write(tmp_path / "raises.py", text)
    with pytest.raises(TargetError, match=said):
        load_op(spec)
    assert not any(str(tmp_path) in path for path in sys.path)


def test_folder_with_relative_imports(tmp_path: Path) -> None:
    package = tmp_path / "package"
    write(package / "contract.py", CONTRACT)
    write(package / "op.py", "from .contract import make\nOP = make('folder')\n")
    op = load_op(str(package))
    assert op.name == "mine::folder"
    assert spec_of(op) == f"{package}:OP"
    assert load_op(f"{package}:OP") is op


def test_folder_with_its_operator_in_init(tmp_path: Path) -> None:
    package = tmp_path / "initial"
    write(package / "contract.py", CONTRACT)
    write(package / "__init__.py", "from .contract import make\nOP = make('initial')\n")
    assert load_op(str(package)).name == "mine::initial"


def test_two_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    first = write(tmp_path / "a" / "op_file.py", CONTRACT + "OP = make('first')\n")
    second = write(tmp_path / "b" / "op_file.py", CONTRACT + "OP = make('second')\n")
    assert load_op(first).name == "mine::first"
    assert load_op(second).name == "mine::second"


def test_folder_that_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no op.py and no __init__.py"):
        load_op(f"{tmp_path}/")


def test_name_of_the_library_and_of_a_package_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "softmax" / "op.py", CONTRACT + "OP = make('softmax')\n")
    monkeypatch.chdir(tmp_path)
    for read in (load_op, load, refuse_unknown):  # they are what every verb asks
        with pytest.raises(ArgumentError, match=r"write \./softmax .* or fuselab::softmax"):
            read("softmax")
    assert spec_of_folder(Path("softmax")) == "./softmax"
    assert load_op("./softmax").name == "mine::softmax"
    assert load_op("fuselab::softmax").name == "fuselab::softmax"


def test_folder_that_is_no_package_leaves_the_name_to_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "softmax").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_op("softmax").name == "fuselab::softmax"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("kernels.cu", "`fuselab new NAME --from kernels.cu` makes a package"),
        ("rows.tsv", "rows.tsv is no Python file"),
    ],
)
def test_files_of_other_kinds_are_no_unknown_operators(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / name, "")
    monkeypatch.chdir(tmp_path)
    for spec in (name, f"./{name}"):
        with pytest.raises(TargetError) as refused:
            load_op(spec)
        assert says in str(refused.value)

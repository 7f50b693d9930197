"""``fuselab build``: a package as a wheel, and as the folder that Hugging Face's kernels loads."""

from __future__ import annotations

import json
import tomllib
import zipfile
from pathlib import Path

import pytest

from fuselab.cli.main import run
from fuselab.errors import BuildError
from fuselab.packaging.build import build_kernels_folder, read

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OP = """
import torch
from torch import Tensor

from fuselab.op import Case, FusedOp, Implementation

from .reference import reference

OP = FusedOp(
    name="mine::tripled_here",
    reference=reference,
    implementations={"triton": Implementation("cuda", reference)},
    cases=[Case.normal([(4,)])],
)
"""
FILES = {
    "__init__.py": "from .op import OP\nfrom .reference import reference\n",
    "op.py": OP,
    "reference.py": "from torch import Tensor\n\n\ndef reference(input: Tensor) -> Tensor:\n"
    "    return 3 * input\n",
    "test_tripled.py": "import fuselab\n",
    "notes.txt": "not for users",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a small package's folder."""
    folder = tmp_path / "tripled"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def test_a_file_becomes_a_wheel_with_the_sources_that_it_names(tmp_path: Path) -> None:
    words = ["build", str(EXAMPLES / "own_cuda_op.py"), "--as", "wheel", "-o", str(tmp_path)]
    assert run([*words, "--version", "2.1"]) == 0
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == "swiglu-2.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        about = opened.read("swiglu-2.1.dist-info/METADATA").decode()
    assert {"swiglu/__init__.py", "swiglu/op.py", "swiglu/own_cuda_op.cu"} <= names
    assert "Requires-Dist: torch\n" in about
    assert "Requires-Dist: fuselab==" in about


def test_a_folder_becomes_what_kernels_loads(package: Path, tmp_path: Path) -> None:
    output = tmp_path / "hub"
    facts = build_kernels_folder(read(str(package)), output, "3")
    assert facts["operators"] == ["mine::tripled_here"]
    assert "needs" in facts
    project = tomllib.loads((output / "build.toml").read_text())
    assert project["general"]["name"] == "tripled"
    assert project["general"]["version"] == 3
    for backend in ("cuda", "cpu"):
        variant = output / "build" / f"torch-{backend}"
        about = json.loads((variant / "metadata.json").read_text())
        assert about["name"] == "tripled"
        assert about["backend"] == {"type": backend}
        assert {file.name for file in variant.iterdir()} == {
            "__init__.py",
            "op.py",
            "reference.py",
            "metadata.json",
        }
    (package / "__init__.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(BuildError, match=r"does not import by itself: .*nowhere_to_be_found"):
        build_kernels_folder(read(str(package)), output, "4")
    assert tomllib.loads((output / "build.toml").read_text())["general"]["version"] == 3


def test_other_files_of_the_folder_are_not_touched(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "work" / "build" / "mine.txt"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    assert run(["build", str(package), "--as", "kernels", "-o", str(tmp_path / "work")]) == 2
    assert "holds other files" in capsys.readouterr().err
    assert other.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["softmax", "--as", "wheel"], "comes with fuselab"),
        (["nowhere", "--as", "wheel"], "unknown operator 'nowhere'"),
        (
            ["PACKAGE", "--as", "egg"],
            "unknown form 'egg'; known: cmake, kernels, load_inline, wheel",
        ),
        (["PACKAGE", "--as", "wheel", "--version", "one"], "write it as 0.1.0"),
        (["PACKAGE", "--as", "kernels", "--version", "0.1"], "a whole number"),
        (["PACKAGE", "--as", "wheel", "--name", "A-b"], "Python identifier"),
    ],
)
def test_a_call_that_cannot_be_answered_is_one_sentence(
    package: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    given = [str(package) if word == "PACKAGE" else word for word in words]
    assert run(["build", *given, "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said
    assert "\n" not in said
    assert not list((tmp_path / "out").glob("*"))

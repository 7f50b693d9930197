"""``fuselab new``: what is derived of a user's kernel computes what its reference says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuselab.cli.main import run
from fuselab.errors import ArgumentError, FuselabError, TargetError
from fuselab.packaging.new import check_name, new_package
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def new(*words: str) -> int:
    return run(["new", *words])


def launched(package: str, *args: object) -> object:
    """Return what the launcher of a package computes in Triton's interpreter."""
    return interpreter.run(f"{Path(package).resolve()}/op.py:forward", *args)


def test_a_bare_kernel_with_a_reference_needs_nothing_else(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new("rms", "--from", "rows.py", "--reference", "reference.py:rms") == 0
    said = capsys.readouterr().out
    assert "fill in" not in said
    assert "rms_kernel runs one program per row of x" in said
    x, w = torch.randn(7, 40), torch.randn(40)
    expected = load_op("rms").reference(x, w, 0.5)
    torch.testing.assert_close(launched("rms", x, w, 0.5), expected)
    kernels = (files / "rms" / "triton_kernels.py").read_text()
    assert "# A program owns one row.\n@triton.jit\ndef rms_kernel" in kernels
    assert "def rms(" not in kernels


def test_a_function_that_launches_brings_its_file_and_those_beside_it(files: Path) -> None:
    assert new("scaled", "--from", "scaled.py:scaled", "--reference", "scaled.py:plain") == 0
    assert launched("scaled", torch.arange(70.0)).tolist() == [3.0 * i for i in range(70)]
    assert (files / "scaled" / "shared.py").read_text().endswith("FACTOR = 3.0\n")
    op = load_op("scaled")
    assert op.parameters == ("x",)  # the block is the launcher's own affair
    for path in (files / "scaled").glob("*.py"):
        assert "UNUSED" not in path.read_text()


def test_without_a_reference_check_says_what_is_to_be_filled_in(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new("scaled", "--from", "scaled.py:scaled") == 0
    assert "fill in: what scaled computes" in capsys.readouterr().out
    assert run(["check", "scaled", "--quick"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "reference.py:9 what scaled computes, in plain PyTorch" in said
    reference = files / "scaled" / "reference.py"
    lines = reference.read_text().splitlines()
    reference.write_text("\n".join([*lines[:-2], "    return 3 * x"]))
    assert load_op("scaled").reference(torch.ones(2)).tolist() == [3.0, 3.0]


def test_the_gradient_is_ejected_from_the_reference(files: Path) -> None:
    words = ["--from", "scaled.py:scaled", "--reference", "scaled.py:plain", "--backward"]
    assert new("trained", *words) == 0
    op = load_op("trained")
    assert op.gradient is not None
    assert op.implementations["triton"].backward is not None
    x = torch.arange(5.0)
    grad = torch.ones(5)
    (computed,) = interpreter.run(f"{files}/trained/op.py:backward", (True,), grad, x)
    assert computed.tolist() == [3.0] * 5
    assert op.gradient.reference((True,), grad, x)[0].tolist() == [3.0] * 5


def test_a_cuda_file_loses_its_host_code_and_keeps_its_launch(files: Path) -> None:
    made = new_package("saxpy", "saxpy.cu", "saxpy.py:saxpy")
    code, contract = made.files["cuda_kernels.cu"], made.files["op.py"]
    assert made.facts["blanks"] == []
    assert "torch" not in code.replace("scalar_t", "")
    assert "<<<blocks" not in code
    assert "twice" in code
    assert "(x.numel() + 128 - 1) // 128, 1, 1" in contract
    assert "(128, 1, 1)" in contract
    assert "f32(float(a)), i32(x.numel())" in contract
    # A template is tried with every dtype; these compile.
    for name in ("float", "__half", "__nv_bfloat16", "double"):
        assert f'"saxpy_kernel<{name}>"' in contract
    assert "saxpy(x, y, a=a)" in made.files["reference.py"]


def test_what_a_cuda_file_does_not_say_is_left_to_fill_in(files: Path) -> None:
    Path("odd.cu").write_text(
        "__global__ void odd(const float* x, float* out, int wobble) {\n"
        "  out[blockIdx.y * gridDim.x + blockIdx.x] = x[0] * wobble;\n}\n"
    )
    made = new_package("odd", "odd.cu")
    assert made.facts["blanks"] == [
        "what odd computes",
        "the kernel's wobble",
        "how many blocks of odd run: (x, y, z)",
        "example inputs",
    ]
    assert "DTYPES = (torch.float32,)" in made.files["op.py"]


def test_a_plain_function_is_ejected(files: Path) -> None:
    made = new_package("triple", "scaled.py:plain")
    assert {"triton_kernels.py", "cuda_kernels.cu", "cpu_kernels.cpp"} <= made.files.keys()


REFUSED = {
    "a missing file": (["x", "--from", "nowhere.py"], "no such file"),
    "a missing .cu file": (["x", "--from", "nowhere.cu"], "no such file"),
    "an unknown kernel": (["x", "--from", "rows.py:wrong"], "it has squared, rms_kernel"),
    "an unknown CUDA kernel": (["x", "--from", "saxpy.cu:wrong"], "it has saxpy_kernel, saxpy_b"),
    "no reference for the gradient": (["x", "--from", "rows.py", "--backward"], "--reference"),
    "an unknown reference": (
        ["x", "--from", "scaled.py:scaled", "--reference", "scaled.py:no"],
        "has no 'no'",
    ),
    "a bad name": (["Bad-Name", "--from", "rows.py"], "Python identifier in lower case"),
    "a name in use": (["json", "--from", "rows.py"], "would hide"),
    "a reference to a plain function": (
        ["x", "--from", "scaled.py:plain", "--reference", "scaled.py:plain"],
        "leave --reference out",
    ),
    "no example inputs": (["x", "--from", "rows.py", "--reference", "rows.py:rms"], "get_inputs"),
    "another kind of file": (["x", "--from", "kernel.txt"], "give FILE.py"),
}


@pytest.mark.parametrize("given", REFUSED)
def test_a_call_that_cannot_be_answered_is_one_sentence(
    files: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    words, sentence = REFUSED[given]
    assert new(*words) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said
    assert said.count("\n") == 0
    assert not Path("x").exists()


def test_an_existing_folder_is_kept(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "scaled").mkdir()
    assert new("scaled", "--from", "scaled.py:scaled") == 2
    assert "exists" in capsys.readouterr().err
    assert list((files / "scaled").iterdir()) == []


def test_an_edited_file_survives_force(files: Path) -> None:
    assert new("odd", "--from", "rows.py") == 0
    (files / "odd" / "reference.py").write_text("mine\n")
    assert new("odd", "--from", "rows.py", "--force") == 1
    assert (files / "odd" / "reference.py").read_text() == "mine\n"
    assert "FILL IN" in (files / "odd" / "reference.py.new").read_text()


def test_names_of_operators() -> None:
    check_name("fused_norm2")
    for name in ("", "norm_", "2norm", "class", "torch", "a.b"):
        with pytest.raises(ArgumentError):
            check_name(name)


def test_a_declared_operator_is_refused(files: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "own_triton_op.py"
    with pytest.raises(TargetError, match="declares an operator already"):
        new_package("mine", str(example))


def test_errors_are_fuselabs(files: Path) -> None:
    Path("broken.cu").write_text("__global__ void f(const float* x, float* y) { y[0] = oops; }\n")
    with pytest.raises(FuselabError, match=r"does not compile without the host's code: .*oops"):
        new_package("broken", "broken.cu")

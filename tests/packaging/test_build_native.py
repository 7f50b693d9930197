"""``fuselab build --as cmake``: operators in C++, in an artifact that runs without Python."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fuselab
from fuselab.cli.main import run
from fuselab.errors import UnsupportedError
from fuselab.op import Case, FusedOp, Gradient, Implementation, Inputs
from fuselab.packaging import native, native_operator
from fuselab.runtime.cpp_sweep import CppSweeps
from fuselab.runtime.sweep import Sweep

CACHE = Path(os.environ["FUSELAB_CACHE"])
# One kernel, a row's sum, which no operator of PyTorch computes for the program: it is found wrong
# by the definition if the kernel does not run, since that returns something else.
KERNELS = """
#include "cpu_sweep.h"
namespace kernels {
template <Lane lane, class Real, class X, class Output>
void twice(const X* x_data, Output* output_data, Loops<2> loops) {
  const auto [x, output] = arrays(x_data, output_data);
  sweep<Real, lane>(loops, [&](const auto& rows) {
    const auto total = rows.reduce([=](auto at) { return Sum{at(x)}; });
    rows.once([=](auto at) { at.store(output, at(total) + at(total)); });
  });
}
}
"""

CASES = [Case.normal([(5, 8)])]


def reference(x: Tensor) -> Tensor:
    """Return the sums of rows, once: the kernel's are twice as large, to be told apart."""
    return x.sum(1)


def _declared(folder: Path, name: str) -> FusedOp:
    (folder / "cpu_kernels.cpp").write_text(KERNELS)
    sweeps = CppSweeps(folder / "cpu_kernels.cpp")

    def forward(kernels: CppSweeps, x: Tensor) -> Tensor:
        output = torch.empty(x.shape[0], dtype=x.dtype)
        swept = Sweep(
            {"rows": x.shape[0]}, {"width": x.shape[1]}, [(x, "rows width")], [(output, "rows")]
        )
        kernels.run("twice", swept, x.dtype)
        return output

    return FusedOp(
        name=name,
        reference=reference,
        implementations={"cpp": Implementation("cpu", partial(forward, sweeps))},
        cases=CASES,
        dtypes=(torch.float32,),
    )


def test_sizes_become_symbols_and_equal_ones_are_asked_for(tmp_path: Path) -> None:
    written = native_operator.native_operator(
        _declared(tmp_path, "native_test::symbols"), [torch.float32]
    )
    assert written.schema == "native_test::symbols(Tensor x, str implementation) -> Tensor"
    assert "at::_ops::sum_dim_IntList::call(x, std::vector<int64_t>{int64_t(1)}" in written.operator
    assert "kernels::twice<Lane::row, float, float, float>" in (written.launches or "")
    assert "x.size(0) != " not in written.operator  # any number of rows, of any width
    assert not written.has_gradient


def _every_second(x: Tensor) -> Tensor:
    return x[:, :, ::2].exp()


def test_an_output_is_not_taken_for_as_long_as_an_argument() -> None:
    """The first sizes that are tried are 7, 11 and 13, and every second of 13 are 7."""

    def gradient(needs: Sequence[bool], grad: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(x),)

    op = FusedOp(
        name="native_test::every_second",
        reference=_every_second,
        implementations={},
        cases=[Case.normal([(4, 5, 9)])],
        draw=lambda source: Inputs((source.tensor(*(source.size() for _ in range(3))),)),
        gradient=Gradient(save=lambda result, x: (x,), reference=gradient),
    )
    written = native_operator.native_operator(op, [torch.float32])
    assert written.has_gradient
    assert "result_0.size(0)" in written.operator
    assert "result_0.size(2) != " not in written.operator


def test_what_has_no_form_in_cpp_is_refused() -> None:
    def joined(tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors)

    joined.__annotations__ = {"tensors": Sequence[Tensor], "return": Tensor}
    op = FusedOp(name="native_test::joined", reference=joined, implementations={}, cases=CASES)
    with pytest.raises(UnsupportedError, match="takes a list of tensors"):
        native_operator.native_operator(op, [torch.float32])


def test_build_keeps_out_of_folders_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    example = Path(__file__).resolve().parents[2] / "examples" / "own_triton_op.py"
    assert run(["build", str(example), "--as", "cmake", "-o", str(tmp_path)]) == 2
    assert "holds other files" in capsys.readouterr().err


def test_a_project_replaces_one_of_its_own_package_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = str(Path(__file__).resolve().parents[2] / "examples" / "own_triton_op.py")
    command = ["build", example, "--as", "cmake", "-o", str(tmp_path / "native"), "--name"]
    assert run([*command, "first"]) == 0
    project = (tmp_path / "native" / "CMakeLists.txt").read_text()
    assert run([*command, "first"]) == 0
    assert run([*command, "second"]) == 2
    assert "holds the project of another package; give second a" in capsys.readouterr().err
    assert (tmp_path / "native" / "CMakeLists.txt").read_text() == project


class Model(nn.Module):
    """A model with the operator between PyTorch's own."""

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = torch.ops.native_test.artifact(x * 3, "auto")
        return total.relu()


def _compile(project: native.Project, sources: Path, made: Path) -> None:
    sources.mkdir(parents=True, exist_ok=True)
    for name, text in project.files.items():
        (sources / name).write_bytes(text)
    where = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    configure = ["cmake", "-S", sources, "-B", made, where, "-DCMAKE_BUILD_TYPE=Debug"]
    for command in (configure, ["cmake", "--build", made]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_an_artifact_runs_without_python(tmp_path: Path) -> None:
    if not all(shutil.which(tool) for tool in ("cmake", "g++")):
        pytest.skip("cmake or g++ is not installed, which compile the program")
    op = _declared(tmp_path, "native_test::artifact")
    fuselab.operator(op)
    project = native.cmake_project("artifact", [op])
    # Compiling takes a minute, so that what was built of the same text is used again. The
    # program names the folder of the PyTorch that it was linked to, so that this is part of it.
    text = Path(__file__).read_bytes() + b"".join(project.files.values())
    linked_to = f"{torch.__version__} {torch.__file__}".encode()
    folder = CACHE / "native" / hashlib.sha256(linked_to + text).hexdigest()
    made, package = folder / "made", folder / "model.pt2"
    if not package.is_file():
        _compile(project, folder / "sources", made)
        batch = torch.export.Dim("batch", min=2, max=512)
        with torch.no_grad():
            exported = torch.export.export(
                Model(), (torch.ones(2, 5),), dynamic_shapes=({0: batch},)
            )
            torch._inductor.aoti_compile_and_package(exported, package_path=str(package))
    x = torch.arange(35.0).reshape(7, 5) - 20
    torch.save([x], tmp_path / "inputs.pt")
    words = [made / "run_artifact", package, "inputs.pt", "outputs.pt"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Float [7]\n"
    (found,) = torch.load(tmp_path / "outputs.pt")
    assert torch.equal(found, (6 * x.sum(1)).relu())  # twice, so that the kernel computed it
    linked = subprocess.run(["ldd", words[0]], capture_output=True, text=True, check=False)
    libraries = [line.split()[0] for line in linked.stdout.splitlines()]
    assert "libtorch_cpu.so" in libraries
    assert not [name for name in libraries if "python" in Path(name).name]

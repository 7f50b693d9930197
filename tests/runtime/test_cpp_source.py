"""C++ sources: compiled once, typed arguments, one OpenMP runtime, errors with the mend."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from fuselab.errors import BuildError, DeviceError, IndexRangeError, LaunchError, OperandError
from fuselab.runtime import cache, cpp_library
from fuselab.runtime.cpp_source import CppSource, f32, f64, i32, i64

HERE = Path(__file__).parent
SOURCE = CppSource(HERE / "kernels.cpp")


@pytest.mark.parametrize("numel", [1, 7, 64])
@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "float"), (torch.float64, "double")])
def test_a_template_runs_with_its_own_types(numel: int, dtype: torch.dtype, name: str) -> None:
    value = torch.linspace(-3, 3, numel, dtype=dtype)
    output = torch.full_like(value, float("nan"))
    SOURCE.launch(f"scaled_relu<{name}, double>", (value, output, i64(numel), f64(0.1)))
    assert torch.equal(output, torch.relu(value.double() * 0.1).to(dtype))


def test_every_width_arrives() -> None:
    output = torch.zeros(4, dtype=torch.int32)
    SOURCE.launch("widths", (output, i32(-5), i64(2**40), f32(0.1), f64(0.1)))
    assert output.tolist() == [-5, 1, 1, 1]


def test_other_threads_run_meanwhile() -> None:
    SOURCE.prebuild(("waits",))
    flags = torch.zeros(2, dtype=torch.int32)
    thread = threading.Timer(0.05, lambda: flags[0].fill_(1))
    thread.start()
    SOURCE.launch("waits", (flags,))
    thread.join()
    assert flags.tolist() == [1, 1]


def test_none_is_a_null_pointer() -> None:
    grad, left, right, output = torch.randn(4, 5).unbind()
    SOURCE.launch("mul_backward<float>", (grad, left, right, None, output, i64(5)))
    assert torch.equal(output, grad * left)


@pytest.mark.parametrize(
    "args",
    [
        (torch.zeros(1), torch.zeros(1), i32(1), f32(1.0)),
        (torch.zeros(1), torch.zeros(1), i64(1), f64(1.0)),
        (torch.zeros(1), torch.zeros(1), i64(1)),
        (torch.zeros(1), torch.zeros(1), i64(1), f32(1.0), f32(1.0)),
    ],
)
def test_arguments_of_other_types_are_refused(args: tuple[object, ...]) -> None:
    with pytest.raises(BuildError, match=r"has parameters \(pointer, pointer, i64, f32\)"):
        SOURCE.launch("scaled_relu<float, float>", args)  # type: ignore[arg-type]


def test_an_unknown_instantiation_gives_the_compilers_words() -> None:
    with pytest.raises(BuildError, match=r"kernels.cpp: no_such<float> does not compile") as caught:
        SOURCE.launch("no_such<float>", (torch.zeros(1),))
    assert "no_such" in caught.value.log


@pytest.mark.parametrize(
    ("kind", "words"), [(0, "the kernel's own words"), (1, "unknown exception")]
)
def test_an_exception_in_a_kernel_is_a_launch_error(kind: int, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        SOURCE.launch("throws", (torch.zeros(1), i32(kind)))


@pytest.mark.parametrize(
    ("before", "throws", "error"),
    [
        ("", "throw 1;", LaunchError),
        ("struct Own : std::exception {};", "throw Own();", LaunchError),
        ("#include <vector>", "std::vector<int>(1).at(9);", IndexRangeError),
        ("#include <stdexcept>", 'throw std::invalid_argument("no");', OperandError),
    ],
)
def test_errors_are_told_apart_where_the_source_can_throw_them(
    before: str, throws: str, error: type[Exception], tmp_path: Path
) -> None:
    source = tmp_path / "kernels.cpp"
    source.write_text(f"#include <new>\n{before}\nvoid throws() {{ {throws} }}\n")
    with pytest.raises(error):
        CppSource(source).launch("throws", ())


def test_our_headers_include_none_that_take_long_to_parse() -> None:
    for name in ("cpu_sweep.h", "cpu_dropout.h"):
        text = cache.source_text(cache.HEADERS / name)
        assert cache.standard_headers(text) <= cpp_library._WITHOUT_ERRORS


def test_a_tensor_elsewhere_is_refused() -> None:
    with pytest.raises(DeviceError, match="meta"):
        SOURCE.launch("openmp_threads", (torch.zeros(1, device="meta"),))


def test_prebuild_makes_one_library_for_all(tmp_path: Path) -> None:
    source = CppSource(HERE / "kernels.cpp")
    expressions = ("scaled_relu<float, float>", "openmp_threads", "widths")
    library = source.prebuild(expressions)
    assert library == source.prebuild(expressions)
    symbols = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True).stdout
    assert [f"fuselab_entry_{index}" in symbols for index in range(4)] == [True, True, True, False]


def test_a_changed_header_is_another_library(tmp_path: Path) -> None:
    for name in ("kernels.cpp", "kernels.h"):
        shutil.copy(HERE / name, tmp_path)
    first = CppSource(tmp_path / "kernels.cpp").prebuild(("openmp_threads",))
    (tmp_path / "kernels.h").write_text((HERE / "kernels.h").read_text() + "// changed\n")
    assert CppSource(tmp_path / "kernels.cpp").prebuild(("openmp_threads",)) != first


def test_another_cpu_is_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    first = CppSource(HERE / "kernels.cpp").prebuild(("openmp_threads",))
    monkeypatch.setattr(cpp_library, "_cpu", lambda: "#define __another_cpu__ 1")
    assert CppSource(HERE / "kernels.cpp").prebuild(("openmp_threads",)) != first


def openmp_threads() -> int:
    output = torch.zeros((), dtype=torch.int32)
    SOURCE.launch("openmp_threads", (output,))
    return int(output)


def test_threads_follow_torch() -> None:
    before = torch.get_num_threads()
    counts = []
    try:
        for wanted in (1, 3):
            torch.set_num_threads(wanted)
            counts.append(openmp_threads())
            thread = threading.Thread(target=lambda: counts.append(openmp_threads()))
            thread.start()
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert counts == [1, 1, 3, 3]


def test_one_openmp_runtime_in_the_process() -> None:
    openmp_threads()
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line}
    assert len(loaded) == 1


def test_no_compiler_names_the_mend(tmp_path: Path) -> None:
    script = (
        "import torch, warnings; warnings.simplefilter('ignore')\n"
        "from fuselab.errors import BuildError\n"
        "from fuselab.runtime.cpp_source import CppSource\n"
        f"source = CppSource({str(HERE / 'kernels.cpp')!r})\n"
        "try: source.launch('openmp_threads', (torch.zeros(1),))\n"
        "except BuildError as error: print(error)\n"
    )
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "CXX": "",
        "FUSELAB_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert "install g++" in result.stdout, result.stderr

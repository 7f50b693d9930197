"""``fuselab doctor``: each thing that can be missing is noticed and its mend is named."""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fuselab.cli import doctor
from fuselab.cli.main import run
from fuselab.device import ceiling, environment
from fuselab.device.ceiling import Ceilings
from fuselab.errors import BuildError, MissingDependencyError
from fuselab.ops.hash_indices import op as hash_indices
from fuselab.prove import cpu_builds, cpu_times
from fuselab.runtime import (
    autograd_node,
    cpp_library,
    cpu_choice,
    cuda_source,
    launch_plans,
    process_choice,
)

EXTENSIONS = (autograd_node.EXTENSION, launch_plans.EXTENSION)

CEILINGS = Ceilings(
    device="a device",
    torch=torch.__version__,
    driver="none",
    measured="2026-01-01T00:00:00+00:00",
    copy_gbps={"1048576": 31.25, "268435456": 40.5},
    matmul_tflops={"fp32": 0.1976},
    launch_us=1.198,
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Ceilings come from here; whether each request asked to measure again is kept."""
    requests: list[bool] = []

    def measured_ceilings(device: torch.device, refresh: bool = False) -> Ceilings:
        requests.append(refresh)
        return CEILINGS

    monkeypatch.setattr(ceiling, "measured_ceilings", measured_ceilings)
    return requests


def checks_on_cpu() -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.examine(torch.device("cpu"))}


def test_this_machine_has_what_is_essential(
    asked: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["doctor", "--device", "cpu", "--json", str(tmp_path / "doctor.json")]
    assert run(command) == 0
    screen = capsys.readouterr().out
    written = json.loads((tmp_path / "doctor.json").read_text())
    works = {check["name"] for check in written["checks"] if check["status"] == "works"}
    assert works >= {
        "Python",
        "torch",
        "triton",
        "C++ compiler",
        "Python.h",
        "cache folder",
        "C++ launcher",
    }
    assert written["ceilings"]["copy_gbps"] == dict(CEILINGS.copy_gbps)
    for text in ("31.25 GB/s", "40.5 GB/s", "0.1976 TFLOP/s", "1.198 us", "a device"):
        assert text in screen
    assert screen.endswith("All that is essential works on cpu.\n")
    assert asked == [False]


def test_ceilings_of_a_busy_machine_are_said_to_be_too_low(
    capsys: pytest.CaptureFixture[str],
) -> None:
    doctor.show_ceilings(CEILINGS)
    assert "other processes" not in capsys.readouterr().out
    doctor.show_ceilings(replace(CEILINGS, busy=True))
    assert "other processes held the cores meanwhile" in capsys.readouterr().out


def test_measure_times_ceilings_and_operators(
    asked: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The operators' times are made up: measuring them takes minutes."""
    points = [[512, {"reference": 9.0, "cpp": 3.0}], [4096, {"reference": 9.0, "cpp": 12.0}]]

    def measure_in_process(file: Path, arguments: Sequence[str]) -> int:
        table = {"inference": {"float32": {"rows": points}}}
        file.write_text(json.dumps({"schema": cpu_choice.SCHEMA, "operators": {"softmax": table}}))
        return 0

    monkeypatch.setattr(cpu_times, "measure_in_process", measure_in_process)
    monkeypatch.setattr(cpu_choice, "own_file", lambda: tmp_path / "own.json")
    assert run(["doctor", "--device", "cpu", "--measure"]) == 0
    assert asked == [True]
    screen = capsys.readouterr().out
    assert re.search(r"softmax +1 of 2 +our kernel", screen)
    assert "own.json; delete it for the times that ship with fuselab" in " ".join(screen.split())
    monkeypatch.undo()
    cpu_choice.forget()


def test_build_compiles_ahead_what_auto_takes(
    asked: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One small operator, in an empty cache; the launcher is not compiled again for it."""
    warm = {extension: extension.library() for extension in EXTENSIONS}
    for extension, library in warm.items():
        monkeypatch.setattr(extension, "library", lambda library=library: library)
    monkeypatch.setattr(cpu_builds, "timed_operators", lambda: ["hash_indices"])
    # What an earlier test of this process has called is loaded, and would not be compiled again.
    monkeypatch.setattr(hash_indices.CPP, "_entries", {})
    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path / "cache"))
    taken: list[set[str]] = [{"cpp"}]
    monkeypatch.setattr(cpu_choice, "can_take", lambda *kind: taken[0])

    command = ["doctor", "--device", "cpu", "--build", "--json", str(tmp_path / "doctor.json")]
    for libraries in (1, 0):
        assert run(command) == 0
        captured = capsys.readouterr()
        built = json.loads((tmp_path / "doctor.json").read_text())["built"]
        assert (built["libraries"], built["operators"]) == (libraries, ["hash_indices"])
        assert built["failed"] == []
        assert f"built {libraries} libraries in " in captured.out
        assert "3 of 3, " in captured.err
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 1

    taken[0] = set()
    assert run(command) == 0
    assert json.loads((tmp_path / "doctor.json").read_text())["built"]["operators"] == []


def test_build_says_what_does_not_compile(
    asked: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse() -> None:
        raise BuildError("autograd_node.cpp does not compile: error: x.")

    monkeypatch.setattr(autograd_node.EXTENSION, "library", refuse)
    monkeypatch.setattr(cpu_builds, "timed_operators", list)
    assert run(["doctor", "--device", "cpu", "--build"]) == 1
    assert "not built: autograd_node.cpp: autograd_node.cpp does not compile" in " ".join(
        capsys.readouterr().out.split()
    )


def test_something_essential_missing_is_status_1_and_measures_nothing(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object) -> None:
        raise BuildError("no C++ compiler was found.")

    monkeypatch.setattr(cpp_library, "compile_library", refuse)
    assert run(["doctor", "--device", "cpu"]) == 1
    screen = capsys.readouterr().out
    assert "missing  C++ compiler  no C++ compiler was found\n" in screen
    assert "get it: sudo apt install g++" in screen
    assert screen.endswith("Something essential is missing: C++ compiler.\n")
    assert asked == []


def test_a_path_with_spaces_breaks_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._inductor_path().status == "works"
    monkeypatch.setattr(torch, "__file__", "/my clone/torch/__init__.py")
    check = doctor._inductor_path()
    assert check.status == "absent"
    assert check.detail.endswith("spaces: /my clone/torch")
    assert check.mend == "install torch under a path without spaces"


def test_a_launcher_that_does_not_build_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise BuildError("launcher.cpp does not compile: error: x.")

    monkeypatch.setattr(launch_plans.EXTENSION, "library", refuse)
    check = doctor._launcher()
    assert check.status == "absent"
    assert check.detail == "small tensors take longer: launcher.cpp does not compile: error: x"


def test_nvrtc_is_essential_only_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise MissingDependencyError("CUDA C++ needs NVRTC.")

    monkeypatch.setattr(cuda_source.CudaSource, "compile", refuse)
    assert doctor._nvrtc(torch.device("cpu")).status == "absent"
    found = doctor._nvrtc(torch.device("cuda", 0))
    assert found.status == "missing"
    assert found.mend is not None
    assert found.mend.startswith("pip install cuda-bindings nvidia-cuda-nvrtc")


@pytest.mark.parametrize(
    ("version", "status", "detail"),
    [
        (None, "missing", "not installed"),
        ("3.5.1", "absent", "3.5.1 was not tried with fuselab"),
        ("3.6.0", "works", "3.6.0, "),
        ("3.9.0+git1a2b", "works", "3.9.0+git1a2b, "),
        ("3.10.0", "absent", "3.10.0 was not tried with fuselab"),
    ],
)
def test_versions_outside_the_range(
    monkeypatch: pytest.MonkeyPatch, version: str | None, status: str, detail: str
) -> None:
    monkeypatch.setattr(
        environment,
        "version",
        lambda distribution: version if distribution == "triton" else torch.__version__,
    )
    check = checks_on_cpu()["triton"]
    assert check.status == status
    assert check.detail.startswith(detail)
    assert check.mend == (None if status == "works" else "pip install 'triton>=3.6,<3.10'")


def test_missing_headers_of_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    check = doctor._python_headers()
    assert (check.status, check.mend) == (
        "missing",
        "sudo apt install python3-dev, or sudo dnf install python3-devel",
    )


def test_a_cache_folder_that_cannot_be_written_or_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path / "file" / "cache"))
    check = doctor._cache_folder()
    assert check.status == "missing"
    assert "cannot be written" in check.detail

    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path / "cache"))
    assert doctor._cache_folder().status == "works"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    check = doctor._cache_folder()
    assert check.status == "missing"
    assert check.detail.endswith("0.5 GiB free; 1 GiB is needed")


@pytest.fixture
def read_anew() -> Iterator[None]:
    process_choice._value.cache_clear()
    yield
    process_choice._value.cache_clear()


@pytest.mark.usefixtures("read_anew")
@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ("auto", None),
        ("reference", "FUSELAB_IMPLEMENTATION is set: every operator runs reference"),
        (
            "triton",
            "FUSELAB_IMPLEMENTATION is set: every operator runs triton where that supports the "
            "arguments, and the reference elsewhere",
        ),
    ],
)
def test_the_choice_for_a_whole_process_is_shown(
    value: str, detail: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSELAB_IMPLEMENTATION", value)
    shown = [] if detail is None else [doctor.Check("auto", "works", detail)]
    assert list(doctor._process_choice()) == shown


@pytest.mark.usefixtures("read_anew")
def test_a_choice_that_no_operator_has_is_one_sentence_and_status_1(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSELAB_IMPLEMENTATION", "tritn")
    assert run(["doctor", "--device", "cpu"]) == 1
    screen = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"missing auto unknown FUSELAB_IMPLEMENTATION 'tritn'; known: auto, [\w, ]+\. Did you mean "
        r"'triton'\? get it: unset FUSELAB_IMPLEMENTATION, or set it to a known name",
        screen,
    )
    assert screen.endswith("Something essential is missing: auto.")
    assert asked == []


@pytest.mark.gpu
def test_the_gpu_is_described() -> None:
    check = doctor._gpu(torch.device("cuda", 0))
    assert check.status == "works"
    assert torch.cuda.get_device_name(0) in check.detail

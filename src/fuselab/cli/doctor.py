"""``fuselab doctor``: what works here, what is missing and how to get it; measured ceilings;
kernels compiled ahead."""

from __future__ import annotations

import contextlib
import platform
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fuselab.cli.options import Device, Json, flag, option
from fuselab.errors import ArgumentError, FuselabError, OutputError, UnknownNameError
from fuselab.report.progress import Progress, say
from fuselab.report.screen import cut, print_folded

if TYPE_CHECKING:
    import torch

    from fuselab.device.ceiling import Ceilings
    from fuselab.prove.cpu_builds import Built

Status = Literal["works", "missing", "absent"]

# The ranges that pyproject.toml allows; other versions are untested.
TORCH = ((2, 11), (2, 14))
TRITON = ((3, 6), (3, 10))
TUNED_CAPABILITY = (8, 0)
# Compiled kernels take a few MB; a report and its trace take some hundred.
NEEDED_DISK_BYTES = 1 << 30
# The calls that --measure times: larger ones behave alike, and all dtypes would take an hour.
MEASURED_DTYPES = ("--dtype", "float32", "--dtype", "bfloat16")
MEASURED = ("--most-bytes", str(9 << 20), *MEASURED_DTYPES)

# The verbs that need each optional package, and the name by which pip installs it.
OPTIONAL_PACKAGES = {
    "matplotlib": ("bench, data describe --plot; export --graph", "'fuselab[report]'"),
    "jinja2": ("the page that study writes", "'fuselab[report]'"),
    "pyarrow": ("parquet files in data", "'fuselab[data]'"),
    "nvidia-ml-py": ("joules per call in bench", "'fuselab[energy]'"),
    "tensorboard": ("profile and train --tensorboard", "'fuselab[tensorboard]'"),
    "safetensors": ("train --checkpoint, files of adapters", "'fuselab[checkpoints]'"),
    "onnxruntime": ("export (with onnx and onnxscript)", "'fuselab[onnx]'"),
    "scikit-learn": ("the digits of train lora", "'fuselab[digits]'"),
    "liger-kernel": ("a peer to time in bench", "liger-kernel"),
}

_OTHER_CACHE = "set FUSELAB_CACHE to a folder on another disk"
_PROBE_CPP = "#include <cmath>\ntemplate <typename T> T twice(T value) { return value + value; }\n"
_PROBE_CU = (
    "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <cstdint>\n"
    "template <typename T> __global__ void probe(T* output, int64_t numel) {\n"
    "  if (threadIdx.x < numel) output[threadIdx.x] = T(1.0f);\n}\n"
)


@dataclass(frozen=True)
class Check:
    """The result of one check of the installation.

    ``status`` is ``works``, ``missing`` (essential, so the verb fails) or ``absent`` (fuselab works
    without it). ``mend`` is the command or step that installs it.
    """

    name: str
    status: Status
    detail: str
    mend: str | None = None


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(doctor)


def doctor(
    measure: Annotated[
        bool,
        flag(
            "--measure",
            "Measure the ceilings again; on a CPU every operator too, for what auto takes.",
        ),
    ] = False,
    operator: Annotated[
        list[str] | None,
        option("With --measure: only this operator or package; repeatable.", "OP"),
    ] = None,
    build: Annotated[
        bool,
        flag(
            "--build", "Compile the launcher and every C++ kernel that auto can take, on all cores."
        ),
    ] = False,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Say what works, what is missing, how to get it; show ceilings."""
    from fuselab.device.select import select
    from fuselab.report.result import write_result

    chosen = select(device)
    if operator:
        _check_operators(operator, measure, chosen)
    checks = []
    for check in examine(chosen):
        checks.append(check)
        show(check)
    missing = [check for check in checks if check.status == "missing"]
    built = build_all() if build and not missing else None
    ceilings = None if missing else measured(chosen, measure and not operator)
    if ceilings is not None:
        show_ceilings(ceilings)
    if measure and not missing and chosen.type == "cpu":
        measure_operators(operator or ())
    print()
    print(verdict(missing, chosen))
    facts = {
        "checks": [asdict(check) for check in checks],
        "ceilings": None if ceilings is None else asdict(ceilings),
        "built": None if built is None else asdict(built),
    }
    write_result(json, "doctor", facts, chosen)
    if missing or (built is not None and built.failed):
        raise typer.Exit(1)


def examine(device: torch.device) -> Iterator[Check]:
    """Yield every check, each one after those that it depends on."""
    yield Check("Python", "works", f"{platform.python_version()} at {sys.executable}")
    yield from _packages()
    yield _cache_folder()
    yield _compiler()
    yield _python_headers()
    yield _inductor_path()
    yield _launcher()
    yield _nvrtc(device)
    yield _disassembler()
    yield _gpu(device)
    yield from _process_choice()
    for distribution, (purpose, installed_by) in OPTIONAL_PACKAGES.items():
        yield _optional(distribution, purpose, installed_by)


def _packages() -> Iterator[Check]:
    import torch

    yield _in_range(
        "torch", TORCH, f"built for {_torch_build()}, {torch.get_num_threads()} threads"
    )
    yield _in_range("triton", TRITON, "Triton kernels, and assembly without a GPU")


def _torch_build() -> str:
    import torch

    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"


def _in_range(distribution: str, span: tuple[tuple[int, int], tuple[int, int]], use: str) -> Check:
    from fuselab.device.environment import version

    low, high = (".".join(map(str, end)) for end in span)
    mend = f"pip install '{distribution}>={low},<{high}'"
    found = version(distribution)
    if found is None:
        return Check(distribution, "missing", "not installed", mend)
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if not span[0] <= numbers < span[1]:
        return Check(distribution, "absent", f"{found} was not tried with fuselab", mend)
    return Check(distribution, "works", f"{found}, {use}")


def _compiler() -> Check:
    """Compile a probe with the options that kernels get, since a compiler may lack OpenMP."""
    from fuselab.runtime import cpp_library
    from fuselab.runtime.compiler import compiler_version

    mend = "sudo apt install g++, or sudo dnf install gcc-c++, or set CXX"
    with tempfile.TemporaryDirectory(prefix="fuselab-doctor-") as folder:
        library = Path(folder) / "probe.so"
        built = _why_not(
            lambda: cpp_library.compile_library(
                _PROBE_CPP, library, cpp_library.options(), "a probe"
            )
        )
    if built is not None:
        return Check("C++ compiler", "missing", built, mend)
    return Check("C++ compiler", "works", compiler_version())


def _python_headers() -> Check:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return Check("Python.h", "works", str(header))
    return Check(
        "Python.h",
        "missing",
        f"{header} is not there; torch.compile and the launcher are built with it",
        "sudo apt install python3-dev, or sudo dnf install python3-devel",
    )


def _inductor_path() -> Check:
    """Check torch's folder for spaces, since Inductor passes it to the linker unquoted (torch
    2.13)."""
    import torch

    folder = Path(torch.__file__).parent
    if any(letter.isspace() for letter in str(folder)):
        detail = f"for the CPU it fails under a path with spaces: {folder}"
        mend = "install torch under a path without spaces"
        return Check("torch.compile", "absent", detail, mend)
    return Check("torch.compile", "works", "torch lies where Inductor can link it")


def _launcher() -> Check:
    """Build the launcher on the first call; later ones find it in the cache."""
    from fuselab.runtime import launch_plans

    failed = _why_not(launch_plans.EXTENSION.library)
    if failed is not None:
        return Check("C++ launcher", "absent", f"small tensors take longer: {failed}")
    return Check("C++ launcher", "works", "launches small tensors without Python's overhead")


def _nvrtc(device: torch.device) -> Check:
    """Compile to a cubin for Hopper with the 16-bit headers, which needs no GPU."""
    from fuselab.runtime import cuda_source

    mend = "pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl"
    with tempfile.TemporaryDirectory(prefix="fuselab-doctor-") as folder:
        file = Path(folder) / "probe.cu"
        file.write_text(_PROBE_CU)
        source = cuda_source.CudaSource(file)
        failed = _why_not(lambda: source.compile("probe<__half>", "sm_90"))
    if failed is not None:
        return Check("NVRTC", "missing" if device.type == "cuda" else "absent", failed, mend)
    headers = cuda_source.header_folders()[0]
    with contextlib.suppress(ValueError):
        headers = headers.relative_to(Path(sysconfig.get_path("purelib")).parent)
    return Check("NVRTC", "works", f"compiles CUDA C++ for sm_90; headers in {headers}")


def _disassembler() -> Check:
    from fuselab.inspect.assembly import tools

    failed = _why_not(lambda: (tools.path_of(tools.NVDISASM), tools.path_of(tools.CUOBJDUMP)))
    if failed is not None:
        return Check("nvdisasm", "absent", failed, "pip install triton")
    return Check("nvdisasm", "works", "asm shows machine code for sm_75 to sm_121, without a GPU")


def _gpu(device: torch.device) -> Check:
    from fuselab.device import environment
    from fuselab.device.select import why_no_cuda

    if device.type != "cuda":
        import torch

        if torch.cuda.is_available():
            return Check("GPU", "absent", f"not looked at: --device {device}")
        return Check(
            "GPU",
            "absent",
            f"{why_no_cuda()}; kernels for it are compiled and disassembled, not run",
            None if torch.version.cuda else "a CUDA build of torch: see pytorch.org/get-started",
        )
    facts = environment.describe(device)
    memory = facts["device_memory_bytes"] / 2**30
    detail = (
        f"{facts['device_name']}, capability {facts['cuda_capability']}, {memory:.0f} GiB, "
        f"driver {facts['driver'] or 'unknown'}"
    )
    capability = tuple(int(part) for part in facts["cuda_capability"].split("."))
    if capability < TUNED_CAPABILITY:
        detail += "; older than 8.0: kernels run but are not tuned for it"
    return Check("GPU", "works", detail)


def _process_choice() -> Iterator[Check]:
    """Yield what ``auto`` takes if an environment variable decides it; else nothing."""
    from fuselab.runtime import process_choice

    try:
        name = process_choice.checked()
    except UnknownNameError as error:
        mend = f"unset {process_choice.VARIABLE}, or set it to a known name"
        yield Check("auto", "missing", str(error), mend)
        return
    if name is not None:
        detail = f"{process_choice.VARIABLE} is set: every operator runs {name}"
        if name != "reference":
            detail += " where that supports the arguments, and the reference elsewhere"
        yield Check("auto", "works", detail)


def _cache_folder() -> Check:
    """Check the folder for compiled kernels: it must be writable and have space."""
    from fuselab.runtime import cache

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = cache.folder()
    if caught:
        return Check("cache folder", "missing", str(caught[0].message))
    free = shutil.disk_usage(folder).free
    detail = f"{folder}, {free / 2**30:.1f} GiB free"
    if free < NEEDED_DISK_BYTES:
        return Check("cache folder", "missing", f"{detail}; 1 GiB is needed", _OTHER_CACHE)
    return Check("cache folder", "works", detail)


def _optional(distribution: str, purpose: str, installed_by: str) -> Check:
    from fuselab.device.environment import version

    found = version(distribution)
    if found is None:
        return Check(distribution, "absent", purpose, f"pip install {installed_by}")
    return Check(distribution, "works", f"{found}, {purpose}")


def _why_not(probe: Callable[[], object]) -> str | None:
    """Return None if the probe runs, otherwise the message of its FuselabError."""
    try:
        probe()
    except FuselabError as error:
        return str(error).removesuffix(".")
    return None


def build_all() -> Built:
    """Compile ahead what the first calls on this machine would compile, and say what that was."""
    from fuselab.prove import cpu_builds
    from fuselab.runtime import cache

    say("doctor: compiling the launcher and the C++ kernels; some minutes, once")
    progress = Progress()
    built = cpu_builds.build_all(lambda line: progress.show(cut(f"doctor: {line}", 79)))
    progress.end()
    print(
        f"\nbuilt {built.libraries} libraries in {built.seconds:.0f} s: the launcher, and the "
        f"kernels of {len(built.operators)} operators"
    )
    print_folded("", f"kept in {cache.folder()}; what was there before was not built again")
    for failure in built.failed:
        print_folded("", f"not built: {failure}")
    return built


def measured(device: torch.device, refresh: bool) -> Ceilings:
    from fuselab.device.ceiling import measured_ceilings

    say("doctor: ceilings, measured once (some ten seconds) and kept")
    return measured_ceilings(device, refresh=refresh)


def _check_operators(operators: Sequence[str], measure: bool, device: torch.device) -> None:
    """Raise an error unless these operators can be timed on the device."""
    from fuselab.prove.load import load

    if not measure:
        raise ArgumentError("--operator says what --measure times; add --measure.")
    if device.type != "cpu":
        raise ArgumentError("--operator times C++ kernels for a CPU; add --device cpu.")
    for one in operators:
        load(one)


def measure_operators(operators: Sequence[str] = ()) -> None:
    """Time the operators named, or every operator of the library with a C++ kernel, against
    PyTorch, and save the table that ``auto`` reads."""
    from fuselab.prove import cpu_times
    from fuselab.runtime import cpu_choice

    say(
        "doctor: operators on this CPU, many minutes if kernels must be compiled first;\n"
        "doctor: nothing else should run meanwhile"
    )
    file = cpu_choice.own_file()
    words = [word for one in operators for word in ("--operator", one)]
    words += MEASURED_DTYPES if operators else MEASURED
    if cpu_times.measure_in_process(file, words) != 0:
        raise OutputError(f"the operators' times could not be measured and written to {file}.")
    cpu_choice.forget()
    print("\nwhat auto takes on this CPU, of the calls measured")
    for name, (ours, points) in cpu_choice.summary(file).items():
        print(f"{'':9}{name:34}{ours:>5} of {points:<5}our kernel")
    print_folded("", f"kept in {file}; delete it for the times that ship with fuselab")


def show(check: Check) -> None:
    print_folded(f"{check.status:8} {check.name:14}", check.detail)
    if check.mend and check.status != "works":
        print_folded(" " * 23, f"get it: {check.mend}")


def show_ceilings(ceilings: Ceilings) -> None:
    print(f"\nceilings of {ceilings.device}, measured {ceilings.measured}")
    for moved, rate in ceilings.copy_gbps.items():
        print(f"{'':9}{f'copy, {int(moved) >> 20} MiB moved':24}{rate:>10g} GB/s")
    for unit, rate in ceilings.matmul_tflops.items():
        print(f"{'':9}{f'matmul, {unit}':24}{rate:>10g} TFLOP/s")
    print(f"{'':9}{'one small operator':24}{ceilings.launch_us:>10g} us on the host")
    if ceilings.busy:
        print_folded(
            " " * 9,
            "other processes held the cores meanwhile, so this device does better; measured again "
            "when a core is free, or now with --measure",
        )


def verdict(missing: list[Check], device: torch.device) -> str:
    if missing:
        names = ", ".join(check.name for check in missing)
        return f"Something essential is missing: {names}."
    return f"All that is essential works on {device}."

"""NVIDIA's binary tools: nvdisasm, cuobjdump and ptxas, which Triton's wheel carries.

Each is also taken from the PATH or a CUDA toolkit where the wheel does not have it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fuselab.errors import BuildError, MissingDependencyError

NVDISASM, CUOBJDUMP, PTXAS = "nvdisasm", "cuobjdump", "ptxas"
_TIMEOUT_S = 300.0
# The byte of an ELF header that tells binaries of a CUDA 13 assembler (8) from those of 12 (7).
_ABI_VERSION, _CUDA_13 = 8, 8


@functools.cache
def path_of(tool: str) -> Path:
    """Return the path of a tool. Raises MissingDependencyError, which says what works without."""
    found = shutil.which(tool, path=os.pathsep.join(map(str, _folders())))
    if found is None:
        raise MissingDependencyError(
            f"{tool} is in none of Triton's wheel, the PATH and CUDA_HOME: pip install triton "
            "brings it; the stages ttir, ttgir, llir and ptx work without it."
        )
    return Path(found)


def _folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("triton")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(root) / "backends" / "nvidia" / "bin"
    yield from map(Path, os.environ.get("PATH", "").split(os.pathsep))
    yield Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"


def _run(tool: str, image: bytes, suffix: str, options: Sequence[str]) -> str:
    """Return what a tool prints of a file with ``image`` in it. Raises BuildError."""
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(image)
        file.flush()
        done = subprocess.run(
            [str(path_of(tool)), *options, file.name],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise BuildError(f"{tool} failed: {said[-1] if said else done.returncode}", done.stderr)
    return done.stdout


def disassembled(cubin: bytes) -> str:
    """Return nvdisasm's text of the code in a cubin, with the source line of each instruction."""
    return _run(NVDISASM, cubin, ".cubin", ("-c", "-g"))


def disassembled_by_ptx(cubin: bytes) -> str:
    """Return nvdisasm's text with the line of the PTX behind each instruction."""
    return _run(NVDISASM, cubin, ".cubin", ("-c", "-gp"))


def live_counts(cubin: bytes, function: str) -> dict[int, int] | None:
    """Return the live general registers at each address of ``function``, as nvdisasm counts them;
    None if it cannot follow the code's flow, as of cubins that an older ptxas wrote."""
    if cubin[_ABI_VERSION] < _CUDA_13:
        return None
    try:
        text = _run(NVDISASM, cubin, ".cubin", ("-c", "-lrm", "count"))
    except BuildError:
        return None
    body = text.partition(f".text.{function}:")[2].partition("//-----")[0]
    rows = re.findall(r"/\*([0-9a-f]{4,})\*/.*?;\s*// \|\s*(\d*) ", body)
    return {int(address, 16): int(count or 0) for address, count in rows}


def resource_usage(cubin: bytes) -> dict[str, dict[str, int]]:
    """Return REG, STACK, SHARED, LOCAL, ... of each function in a cubin, by cuobjdump."""
    text = _run(CUOBJDUMP, cubin, ".cubin", ("-res-usage",))
    return {
        name: {key: int(value) for key, value in re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", line)}
        for name, line in re.findall(r"Function (\S+):\n\s*(.*)", text)
    }


def assembled(ptx: str, arch: str, newest: bool = False) -> tuple[bytes, str]:
    """Return the cubin of a PTX text for ``arch``, and what ptxas says of it. Raises BuildError.

    Triton's wheel has two assemblers: the newer one is for sm_100 and above, and for the PTX of
    NVRTC, which is of CUDA 13 (``newest``).
    """
    number = int(re.sub(r"\D", "", arch))
    newer = (newest or number >= 100) and _has("ptxas-blackwell")
    tool = "ptxas-blackwell" if newer else PTXAS
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        file.write_text(ptx)
        call = [str(path_of(tool)), "-v", "-lineinfo", f"--gpu-name={arch}", str(file)]
        done = subprocess.run(
            [*call, "-o", str(output)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise BuildError(f"ptxas does not assemble the PTX for {arch}.", done.stderr)
        return output.read_bytes(), done.stderr


def _has(tool: str) -> bool:
    try:
        path_of(tool)
    except MissingDependencyError:
        return False
    return True


def spilled_bytes(said: str, function: str) -> tuple[int, int] | None:
    """Return the bytes of spill stores and loads of ``function`` in what ptxas said, or None."""
    match = re.search(
        rf"Function properties for {re.escape(function)}\n.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads",
        said,
    )
    return (int(match[1]), int(match[2])) if match else None


def sections(image: bytes) -> dict[str, bytes]:
    """Return the sections of a 64-bit ELF file by name."""
    (offset,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, offset + i * size) for i in range(count)]
    text = headers[names][4]
    found = {}
    for header in headers:
        start = text + header[0]
        name = image[start : image.index(b"\0", start)].decode()
        found[name] = image[header[4] : header[4] + header[5]]
    return found

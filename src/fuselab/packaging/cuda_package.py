"""A user's CUDA C++ kernel as an implementation: the device code, and the launcher in ``op.py``."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fuselab.errors import ArgumentError, BuildError, MissingTargetError, TargetError
from fuselab.packaging import arguments, cuda_text
from fuselab.packaging.arguments import KernelParameter, Launch
from fuselab.packaging.cuda_block import Asked, Block, block_of
from fuselab.packaging.cuda_text import HostLaunch, Kernel
from fuselab.packaging.definition import Definition
from fuselab.packaging.own_headers import with_own_headers
from fuselab.packaging.triton_package import Written
from fuselab.runtime.cuda_source import CudaSource

ARCHITECTURE = "sm_80"
# The dtypes that a template is tried with, and their names in CUDA C++.
CUDA_NAMES = {
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float64": "double",
}
_DTYPES = {
    **{name: dtype for dtype, name in CUDA_NAMES.items()},
    "half": "float16",
    "nv_bfloat16": "bfloat16",
    "int": "int32",
    "int32_t": "int32",
    "int64_t": "int64",
    "long long": "int64",
    "uint8_t": "uint8",
    "bool": "bool",
}
_BACKWARD = re.compile(r"backward|bwd|grad", re.IGNORECASE)
_HEADERS = {"__half": "cuda_fp16.h", "__nv_bfloat16": "cuda_bf16.h"}


@dataclass(frozen=True)
class Source:
    """A ``.cu`` file and the kernel of it that becomes the operator. ``code`` is what NVRTC
    compiles, ``host`` the launch that the file itself has, ``block`` the threads of a block."""

    path: Path
    kernel: Kernel
    code: str
    host: HostLaunch | None
    block: Block
    dtypes: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def parameters(self) -> tuple[KernelParameter, ...]:
        return self.kernel.parameters


def read(path: Path, chosen: str, asked: Asked) -> Source:
    """Return the kernel of a ``.cu`` file: the ``chosen`` one, or the only one that is no backward.

    Raises TargetError where there is none, several, or one with parameters that no launch of
    fuselab passes; ArgumentError where the file does not say its block or a constant of its
    template, and the user neither; BuildError where its code does not compile without the host's.
    """
    if not path.is_file():
        raise MissingTargetError(f"{path}: no such file; give FILE.cu.")
    text = with_own_headers(path)
    kernels = cuda_text.kernels_in(text)
    if not kernels:
        raise TargetError(f"{path} has no __global__ function with a body.")
    if chosen:
        named = [one for one in kernels if one.name == chosen]
        if not named:
            raise TargetError(
                f"{path} has no kernel '{chosen}'; it has {cuda_text.names_of(kernels)}."
            )
    else:
        named = [one for one in kernels if not _BACKWARD.search(one.name)] or kernels
        if len(named) > 1:
            raise TargetError(
                f"{path} has several kernels ({cuda_text.names_of(named)}); name one: "
                f"{path}:{named[0].name}."
            )
    kernel = named[0]
    if kernel.unknown:
        raise TargetError(
            f"{kernel.name} in {path} takes '{kernel.unknown[0]}'; a launch passes pointers and "
            "numbers of a stated width (int, int64_t, float, double)."
        )
    host = cuda_text.host_launch(text, kernel)
    block = block_of(path, text, kernel, host, asked)
    code = _with_headers(cuda_text.device_code(text), kernel)
    return Source(path, kernel, code, host, block, _dtypes(path, kernel, code, block))


def _with_headers(code: str, kernel: Kernel) -> str:
    """Return device code with the headers of the 16-bit types, which a template may be made of."""
    wanted = (
        _HEADERS
        if _is_template(kernel)
        else {name: header for name, header in _HEADERS.items() if re.search(rf"\b{name}\b", code)}
    )
    missing = [f"#include <{header}>" for header in wanted.values() if header not in code]
    return "\n".join([*missing, "", code]) if missing else code


def _is_template(kernel: Kernel) -> bool:
    return any(kind == "type" for kind, _, _ in kernel.template)


def _dtypes(path: Path, kernel: Kernel, code: str, block: Block) -> tuple[str, ...]:
    """Return the dtypes that the kernel takes: of a template those that compile."""
    pointed = [
        _DTYPES.get(kernel.pointed[one.name])
        for one in kernel.parameters
        if one.name in kernel.pointed
    ]
    known = [one for one in pointed if one is not None]
    fixed = tuple(dict.fromkeys(one for one in known if "int" not in one and one != "bool"))
    tried = tuple(CUDA_NAMES) if _is_template(kernel) else fixed[:1] or tuple(known[:1])
    if not tried:
        pointed_to = ", ".join(dict.fromkeys(kernel.pointed.values())) or "nothing"
        raise TargetError(
            f"{kernel.name} in {path} points to {pointed_to}; a tensor's elements are "
            f"{', '.join(_DTYPES)}. Take a pointer to elements, and read vectors of them (float4, "
            "__half2) through a reinterpret_cast in the kernel."
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path.stem / "cuda_kernels.cu"  # which a line on the screen names
        file.parent.mkdir()
        file.write_text(code, encoding="utf-8")
        source = CudaSource(file)
        compiled, failure = [], None
        for dtype in tried:
            try:
                source.compile(_expression(kernel, block, CUDA_NAMES.get(dtype, "")), ARCHITECTURE)
                compiled.append(dtype)
            except BuildError as error:
                failure = failure or error
    if not compiled and failure is not None:
        line = next((one for one in failure.log.splitlines() if "error" in one), str(failure))
        raise BuildError(
            f"{kernel.name} of {path} does not compile without the host's code: "
            f"{line.split('): ')[-1].rstrip('.')}.",
            failure.log,
        )
    return tuple(compiled)


def _expression(kernel: Kernel, block: Block, scalar: str) -> str:
    """Return an instantiation; ``scalar`` stands for its types."""
    if not kernel.template:
        return kernel.qualified
    values = []
    for kind, name, default in kernel.template:
        if kind == "type":
            is_wide = re.search(r"acc|opmath|compute|wide", name, re.IGNORECASE)
            values.append(default or "float" if is_wide else scalar)
        else:
            values.append(block.constants[name])
    return f"{kernel.qualified}<{','.join(values)}>"


def written(source: Source, definition: Definition) -> Written:
    """Return the package's part for a CUDA kernel: its launcher is written."""
    kernel, host = source.kernel, source.host
    launch = arguments.arranged(kernel.parameters, definition)
    _from_host(source, launch)
    block, grid = _shape(source, launch)
    shared = _shared(source, launch)
    lines = [*launch.allocations]
    for name, told in launch.blanks:
        said = f"; the host code has {host.written}" if host is not None and name == "grid" else ""
        lines += [f"# FILL IN: {told}{said}", f"{name} = None"]
    args = [
        f"{one.code}({launch.given[one.name]})" if one.code else launch.given[one.name]
        for one in kernel.parameters
    ]
    template = _is_template(kernel)
    typed = _typed(kernel, launch, definition)
    first = typed[0] if typed else launch.outputs[0]
    named = _expression(kernel, source.block, f"{{CUDA_NAMES[{first}.dtype]}}")
    returned = f"return {', '.join(launch.outputs)}"
    if not any(one.kind == arguments.ADDED for one in kernel.parameters) and not launch.blanks:
        lines += [f"if not {launch.outputs[0]}.numel():", f"    {returned}"]
    if grid != "grid":
        lines.append(f"grid = {grid}")
    given = f"grid, {block}, ({', '.join(args)},){shared}"
    lines += [
        "if 0 not in grid:  # a launch has at least one block",
        f'    SOURCE.launch({"f" * template}"{named}", {given})',
        returned,
    ]
    codes = sorted({one.code for one in kernel.parameters if one.code})
    likes = [one for one in ("output_like", "outputs_like") if f"{one}(" in "\n".join(lines)]
    head = ['SOURCE = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))']
    dtypes = ", ".join(f"torch.{one}" for one in source.dtypes)
    head.append(f"DTYPES = ({dtypes},)")
    if template:
        entries = ", ".join(f'torch.{one}: "{CUDA_NAMES[one]}"' for one in source.dtypes)
        head.append(f"CUDA_NAMES = {{{entries}}}")
    expressions = ", ".join(
        f'"{_expression(kernel, source.block, CUDA_NAMES.get(one, ""))}"' for one in source.dtypes
    )
    head += ["# For commands that compile without a GPU.", f"CUDA_EXPRESSIONS = ({expressions},)"]
    return Written(
        files={"cuda_kernels.cu": source.code},
        launcher="\n".join(f"    {line}" for line in lines),
        imports=[
            "from pathlib import Path",
            f"from fuselab.runtime.cuda_source import {', '.join(['CudaSource', *codes])}",
            *(f"from fuselab.runtime.signature import {one}" for one in likes),
        ],
        blanks=[told for _, told in launch.blanks],
        guesses=launch.guesses,
        head="\n".join(head),
        dtypes="DTYPES",
        typed=typed,
    )


def _typed(kernel: Kernel, launch: Launch, definition: Definition) -> list[str]:
    """Return the operator's tensors whose dtype is the kernel's: those that point to the type of a
    template, or to floating numbers."""
    types = [name for kind, name, _ in kernel.template if kind == "type"]
    types = types[:1] or [name for name in kernel.pointed.values() if _is_floating(name)]
    found = [
        launch.given[one.name]
        for one in kernel.parameters
        if kernel.pointed.get(one.name) in types[:1]
    ]
    known = [name for name in dict.fromkeys(found) if name in definition.tensors]
    return known or list(definition.tensors[:1])


def _is_floating(name: str) -> bool:
    return "int" not in _DTYPES.get(name, "int") and _DTYPES[name] != "bool"


def _from_host(source: Source, launch: Launch) -> None:
    """Take sizes as the file's own launch computes them."""
    host = source.host
    if host is None or len(host.given) != len(source.parameters):
        return
    for one, said in zip(source.parameters, host.given, strict=True):
        if one.kind != arguments.NUMBER or said is None or one.code in ("f32", "f64"):
            continue
        text = _renamed(said, source, launch)
        if text is not None:
            launch.given[one.name] = text
            launch.blanks = [each for each in launch.blanks if each[0] != one.name]
            launch.guesses = [
                each for each in launch.guesses if not each.startswith(f"{one.name} ")
            ]


def _renamed(said: str, source: Source, launch: Launch) -> str | None:
    """Return a text of the host's tensors with the launcher's names; None if one is not known."""
    host = source.host
    assert host is not None
    names = {
        given: launch.given[one.name]
        for one, given in zip(source.parameters, host.given, strict=False)
        if given in host.tensors and one.kind != arguments.NUMBER
    }
    used = {word for word in re.findall(r"[A-Za-z_]\w*", said) if word in host.tensors}
    if not used <= names.keys():
        return None
    return re.sub(r"\b[A-Za-z_]\w*\b", lambda match: names.get(match[0], match[0]), said)


def _shape(source: Source, launch: Launch) -> tuple[str, str]:
    """Return the texts of the block and of the grid: the host's, or those that the kernel's own
    positions show."""
    kernel, host = source.kernel, source.host
    found = [_renamed(one, source, launch) if host else one for one in source.block.threads]
    if None in found:
        raise ArgumentError(
            f"{kernel.name} runs in blocks of {host.block_text if host else ''}, which its "
            "launcher cannot compute; give --block 256 or what it needs."
        )
    block = tuple(map(str, found))
    if source.block.note is not None:
        launch.guesses.append(source.block.note)
    block_text = f"({', '.join((*block, '1', '1')[:3])})"
    if host is not None and host.grid is not None:
        axes = [_renamed(one, source, launch) for one in host.grid]
        if None not in axes:
            return block_text, f"({', '.join((*map(str, axes), '1', '1')[:3])})"
    return block_text, _grid_by_text(kernel, launch, block)


def _grid_by_text(kernel: Kernel, launch: Launch, block: tuple[str, ...]) -> str:
    """Return the text of the grid of a kernel in which each thread has one element, or each block
    one row; else a variable to fill in."""
    body = re.sub(r"\((?:\w+|long long)\)(?=blockIdx|blockDim|threadIdx)", "", kernel.body)
    body = re.sub(r"\s+|static_cast<\w+>", "", body)
    body = re.sub(r"\((blockIdx\.x|blockDim\.x|threadIdx\.x)\)", r"\1", body)
    numbers = [one.name for one in kernel.parameters if one.kind == arguments.NUMBER]
    limits = [name for name in numbers if re.search(rf"(?:<|>=){name}\b", body)]
    limits = [name for name in limits if not _is_blank(launch, name)]
    if limits and len(block) == 1 and not re.search(r"(?:blockIdx|threadIdx)\.[yz]", body):
        if re.search(r"blockIdx\.x\*blockDim\.x\+threadIdx\.x", body) or re.search(
            r"threadIdx\.x\+(?:blockIdx\.x\*blockDim\.x|blockDim\.x\*blockIdx\.x)", body
        ):
            launch.guesses.append(f"{kernel.name} runs one thread per {limits[0]}")
            size = block[0] if block[0].isdigit() else f"({block[0]})"
            return f"(-(-{launch.given[limits[0]]} // {size}), 1, 1)"
        width = launch.given[limits[-1]]
        tensor = width.partition(".")[0]
        if "blockIdx.x" in body and width == f"{tensor}.shape[-1]":
            launch.guesses.append(f"{kernel.name} runs one block per row of {tensor}")
            return f"({tensor}.numel() // max({width}, 1), 1, 1)"
    return launch.blank("grid", f"how many blocks of {kernel.name} run: (x, y, z)")


def _is_blank(launch: Launch, name: str) -> bool:
    return any(one == name for one, _ in launch.blanks)


def _shared(source: Source, launch: Launch) -> str:
    """Return the text of the dynamic shared memory, if the kernel has some."""
    if not re.search(r"extern\s+__shared__", source.kernel.body):
        return ""
    host = source.host
    said = _renamed(host.shared, source, launch) if host is not None else None
    if said is None or said == "0":
        launch.blank("shared_bytes", "the bytes of dynamic shared memory of a block")
        return ", shared_bytes=shared_bytes"
    return f", shared_bytes={said}"

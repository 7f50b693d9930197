"""Find how many threads a block of a user's CUDA kernel has, and the constants of its template."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fuselab.errors import ArgumentError
from fuselab.packaging import cuda_text
from fuselab.packaging.cuda_text import HostLaunch, Kernel

MOST_THREADS = 1024
# For kernels that read their block's size, so that any is right: by the axes that they use.
_USUAL = {1: ("256",), 2: ("16", "16"), 3: ("8", "8", "4")}
_SIZE = r"([A-Za-z_]\w*|\d+)"


@dataclass(frozen=True)
class Asked:
    """The user's word on a ``.cu`` kernel: ``block`` threads per axis, and ``constants`` of its
    template by name."""

    block: tuple[int, ...] = ()
    constants: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Block:
    """The threads of a block per axis, as Python expressions of the host code's tensors; the values
    of the template's constants in CUDA C++; and a sentence for the user if one of them is not
    certain."""

    threads: tuple[str, ...]
    constants: Mapping[str, str]
    note: str | None = None


def block_of(path: Path, text: str, kernel: Kernel, host: HostLaunch | None, asked: Asked) -> Block:
    """Return the block that a kernel runs in: the user's, that of the file's own launch, the one
    that the kernel's text or its ``__launch_bounds__`` say, or any, if the kernel reads its size.

    Raises ArgumentError, which says what to give, where the file does not say it, and where it says
    something else than the user.
    """
    constants = _constants(path, kernel, host, asked)
    said = _said(kernel)
    by_text = [cuda_text.constant(text, one, constants) for one in said]
    threads = _threads(path, text, kernel, host, asked, constants, by_text)
    sizes = [*zip(said, threads.threads, strict=False)]
    if kernel.bound and len(threads.threads) == 1:
        sizes.append((kernel.bound, threads.threads[0]))
    for name, value in sizes:
        if name in _names(kernel) and (asked.block or name not in constants):
            if name in (asked.constants or {}) and constants[name] != value:
                raise ArgumentError(
                    f"--set {name}={constants[name]} and --block {value}: the block of "
                    f"{kernel.name} is its {name}; give one of them."
                )
            constants[name] = value
    missing = [name for name in _names(kernel) if name not in constants]
    if missing:
        raise ArgumentError(
            f"{path} does not say what {', '.join(missing)} of {kernel.name}'s template is; give "
            f"{' '.join(f'--set {name}=VALUE' for name in missing)}."
        )
    return Block(threads.threads, constants, threads.note)


def _names(kernel: Kernel) -> list[str]:
    """Return the names of the template's constants."""
    return [name for kind, name, _ in kernel.template if kind != "type"]


def _constants(path: Path, kernel: Kernel, host: HostLaunch | None, asked: Asked) -> dict[str, str]:
    """Return the template's constants that the user, the file's own launch or a default give."""
    given = dict(asked.constants or {})
    for name in given:
        if name not in _names(kernel):
            has = f"has the constants {', '.join(_names(kernel))}"
            raise ArgumentError(
                f"--set {name}: the template of {kernel.name} in {path} {has}."
                if _names(kernel)
                else f"--set {name}: {kernel.name} in {path} has no constants; leave --set out."
            )
    found = {}
    for place, (kind, name, default) in enumerate(kernel.template):
        said = host.template[place] if host and place < len(host.template) else None
        if kind == "type":
            continue
        if name in given:
            found[name] = given[name]
        elif said is not None and cuda_text.value_of(said) is not None:
            found[name] = said
        elif default is not None:
            found[name] = default
    return found


def _threads(
    path: Path,
    text: str,
    kernel: Kernel,
    host: HostLaunch | None,
    asked: Asked,
    constants: Mapping[str, str],
    by_text: Sequence[int | None],
) -> Block:
    bound = cuda_text.constant(text, kernel.bound, constants) if kernel.bound else None
    if asked.block:
        for axis, (one, other) in enumerate(zip(asked.block, by_text, strict=False)):
            is_free = _said(kernel)[axis] in _names(kernel)
            if other is not None and one != other and not is_free:
                raise ArgumentError(
                    f"--block {','.join(map(str, asked.block))}: the text of {kernel.name} in "
                    f"{path} says {other} threads along {'xyz'[axis]}; leave --block out."
                )
        is_fixed = kernel.bound not in _names(kernel)
        if bound is not None and is_fixed and math.prod(asked.block) > bound:
            raise ArgumentError(
                f"--block {','.join(map(str, asked.block))}: __launch_bounds__ of {kernel.name} in "
                f"{path} allow {bound} threads."
            )
        return Block(tuple(map(str, asked.block)), {})
    if host is not None and host.block is not None:
        return Block(host.block, {})
    axes = _axes(kernel.body)
    known = [str(one) if one is not None else None for one in by_text]
    if axes and None not in known and len(known) == axes:
        return _noted(kernel, [str(one) for one in known], "as its text says")
    if bound is not None and axes <= 1:
        return _noted(kernel, [str(bound)], "as its __launch_bounds__ allow")
    device = cuda_text.device_code(text)
    if not re.search(r"\b(threadIdx|blockDim|thread_rank|thread_index)\b", device):
        return _noted(kernel, ["1"], "since its code reads no threadIdx")
    is_read = all(re.search(rf"\bblockDim\.{axis}\b", kernel.body) for axis in "xyz"[:axes])
    usual = _USUAL.get(axes, ())
    is_open = not any(_said(kernel)) and (bound is not None or not kernel.bound)
    if axes and is_read and is_open and (bound is None or math.prod(map(int, usual)) <= bound):
        return _noted(kernel, usual, "and takes any, since it reads blockDim")
    launched = f" ('{host.block_text}')" if host is not None and host.block_text else ""
    raise ArgumentError(
        f"{path} does not say how many threads{launched} a block of {kernel.name} has; give "
        f"--block {','.join(_USUAL.get(axes, ('256',)))} or what it needs."
    )


def _noted(kernel: Kernel, threads: Sequence[str], why: str) -> Block:
    count = " x ".join(threads)
    plural = "" if count == "1" else "s"
    return Block(
        tuple(threads), {}, f"{kernel.name} runs in blocks of {count} thread{plural}, {why}"
    )


def _axes(body: str) -> int:
    """Return how many axes of the block a kernel's text uses."""
    return max(
        (1 + "xyz".index(one) for one in re.findall(r"\b(?:threadIdx|blockDim)\.([xyz])", body)),
        default=0,
    )


def _said(kernel: Kernel) -> list[str]:
    """Return, by axis, the number or the constant that a kernel's text takes for the block's size;
    an empty text where it takes none.

    Signs are positions (``blockIdx.x * TILE + threadIdx.x``), the step of a loop that begins at
    ``threadIdx.x``, and shared memory that ``threadIdx.x`` indexes. A number that the kernel takes,
    as in ``blockIdx.x * columns + threadIdx.x``, is the length of a row, and no sign.
    """
    taken = {one.name for one in kernel.parameters}
    body = re.sub(r"static_cast<[^<>]*>", "", kernel.body)
    body = re.sub(r"\((?:const)?\s*(?:unsigned|int|long|long long|size_t|\w+_t)\s*\)", "", body)
    body = re.sub(r"\((threadIdx\.[xyz]|blockIdx\.[xyz]|blockDim\.[xyz])\)", r"\1", body)
    aliases = re.findall(r"\b(\w+)\s*=\s*((?:threadIdx|blockIdx)\.[xyz])\s*[;,]", body)
    for name, value in dict(aliases).items():
        body = re.sub(rf"(?<![.\w]){name}\b(?!\s*=[^=])", value, body)
    sizes = dict(re.findall(r"__shared__\s+[\w:]+\s+(\w+)\s*((?:\[[^\]]+\]\s*)+)", body))
    body = re.sub(r"\s+", "", body)
    return [_size_of(axis, body, sizes, taken) for axis in "xyz"[: _axes(kernel.body)]]


def _size_of(axis: str, body: str, shared: Mapping[str, str], taken: Collection[str]) -> str:
    thread, block = rf"threadIdx\.{axis}", rf"blockIdx\.{axis}"
    for pattern in (
        rf"{block}\*{_SIZE}\+{thread}\b",
        rf"(?<![\w.]){_SIZE}\*{block}\+{thread}\b",
        rf"{thread}\+{block}\*{_SIZE}",
        rf"{thread}\+{_SIZE}\*{block}",
        rf"for\([^;]*={thread};[^;]*;[\w.]+\+={_SIZE}\)",
    ):
        for found in re.finditer(pattern, body):
            if found[1] not in taken and not found[1].startswith("blockDim"):
                return str(found[1])
    for name, sizes in shared.items():
        dimensions = re.findall(r"\[([^\]]+)\]", re.sub(r"\s+", "", sizes))
        dimensions = [one.removesuffix("+1") for one in dimensions]  # against bank conflicts
        for used in re.findall(rf"\b{name}((?:\[[^\[\]]+\])+)", body):
            indices = re.findall(r"\[([^\]]+)\]", used)
            for index, size in zip(indices, dimensions, strict=False):
                is_size = re.fullmatch(_SIZE, size) and size not in taken
                if index == f"threadIdx.{axis}" and is_size:
                    return str(size)
    return ""


def asked_of(block: str | None, constants: Sequence[str]) -> Asked | None:
    """Return what ``--block 32,8`` and ``--set NAME=VALUE`` ask for; None if they are not given.
    Raises ArgumentError."""
    if block is None and not constants:
        return None
    sizes = block.split(",") if block is not None else []
    if len(sizes) > 3 or not all(re.fullmatch(r"\s*[1-9]\d*\s*", one) for one in sizes):
        raise ArgumentError(f"--block {block}: write the threads per axis, 256 or 32,8.")
    threads = tuple(map(int, sizes))
    if math.prod(threads) > MOST_THREADS:
        raise ArgumentError(f"--block {block}: a block has at most {MOST_THREADS} threads.")
    found = {}
    for text in constants:
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(-?\d+|true|false)\s*", text)
        if match is None:
            raise ArgumentError(
                f"--set {text}: write NAME=VALUE, a number, true or false, for example --set "
                "UNROLL=4."
            )
        found[match[1]] = match[2]
    return Asked(threads, found)

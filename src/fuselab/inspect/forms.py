"""Compare the kernels of an ejected function's two forms: its operators, and the one kernel of the
whole. They are compiled for a GPU that need not be there."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import triton

from fuselab.composition import Composition
from fuselab.ejection.folder import write_folder
from fuselab.errors import FuselabError
from fuselab.inspect.assembly import launches
from fuselab.inspect.assembly.architectures import architecture
from fuselab.inspect.assembly.kernel import Kernel
from fuselab.inspect.assembly.summary import summarised
from fuselab.prove import load as loading

_GPU = "sm_90"
_DTYPE = torch.bfloat16


def section(files: Mapping[str, str], name: str) -> str:
    """Return the part of a page with the registers, the shared memory and the occupancy of each
    forward kernel, in bfloat16 at the example's sizes; a sentence why where they are not known.

    ``files`` are those of a composition, and ``name`` is that of the folder.
    """
    heading = f"\n## Compiled for {_GPU}, in bfloat16\n\n"
    try:
        kernels = _kernels(files, name)
        rows = list(map(_row, kernels))
    except FuselabError as error:
        return f"{heading}Not known here: {error}\n"
    lines = [
        "| kernel | registers | spills | shared memory | warps | matrix instructions |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"Triton {triton.__version__}, at the sizes of the example. *Warps* are those that a",
        "multiprocessor holds of those that it can hold. Products that stay PyTorch calls are a",
        "library's kernels.",
    ]
    return heading + "\n".join(lines) + "\n"


def _kernels(files: Mapping[str, str], name: str) -> list[Kernel]:
    with tempfile.TemporaryDirectory(prefix="fuselab-") as parent:
        folder = Path(parent) / name
        write_folder(folder, files, {})
        found = loading.load(str(folder))
        assert isinstance(found, Composition)
        kernels: list[Kernel] = []
        for op in found.operators:
            recorded, _ = launches.of_operator(
                op, architecture(_GPU), implementation="triton", dtype=_DTYPE
            )
            kernels += [one for one in recorded.kernels if one.launched_by == "triton forward"]
        return kernels


def _row(kernel: Kernel) -> str:
    found = summarised(kernel)
    stored = sum(found.spills) if found.spills else 0
    held = found.occupancy
    warps = f"{held.warps} of {held.most_warps}" if held else "not known"
    matrix = sum(found.matrix.values())
    cells = (
        kernel.name,
        found.registers,
        f"{stored} B",
        f"{found.shared_bytes:,} B",
        warps,
        matrix,
    )
    return "| " + " | ".join(map(str, cells)) + " |"

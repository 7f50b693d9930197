"""``fuselab asm``: the assembly of kernels for any GPU, and what it says about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuselab.cli.options import FOLDER, Json, dtype_of, flag, option, output_option

if TYPE_CHECKING:
    from fuselab.inspect.assembly.subjects import Compiled


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("asm")(asm)


def asm(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="OP|FOLDER|FILE",
            help="An operator, a kernel package, FILE.py[:NAME] with Triton kernels, or FILE.cu.",
        ),
    ],
    arch: Annotated[str, option("sm_75 to sm_121, or gfx942.")] = "sm_90",
    stage: Annotated[
        str, option("summary, ttir, ttgir, llir, ptx, sass; amdgcn of AMD.")
    ] = "summary",
    kernel: Annotated[
        str | None, option("Only this one; of a .cu file an instantiation, NAME<float>.", "NAME")
    ] = None,
    signature: Annotated[
        str | None, option("A bare Triton kernel's: '*fp32, i32:16, 1024'.", "TYPES")
    ] = None,
    dtype: Annotated[str | None, option("An operator's dtype; its first by default.")] = None,
    case: Annotated[str | None, option("An operator's case, for its sizes.")] = None,
    implementation: Annotated[str | None, option("Only this one of an operator's.")] = None,
    setting: Annotated[
        list[str] | None,
        option("A Triton kernel's constexpr, num_warps or num_stages.", "NAME=VALUE", "--set"),
    ] = None,
    threads: Annotated[
        str | None, option("Threads per block of a .cu file's kernels: 256 or 16,16.", "N[,N]")
    ] = None,
    annotate: Annotated[
        bool, flag("--annotate", "SASS with source lines and live registers.")
    ] = False,
    diff: Annotated[
        str | None,
        option(
            "Compare with another architecture, dtype, implementation, setting or subject.",
            "OTHER",
        ),
    ] = None,
    output: Annotated[
        Path | None, output_option("Write every stage of every kernel there.", "DIR", FOLDER)
    ] = None,
    json: Json = None,
) -> None:
    """Show any kernel's assembly, and what it says; needs no GPU.

    A Triton kernel in a plain file is compiled for the arguments that get_inputs() of the file
    returns, or for --signature. Registers, shared memory, occupancy, the width of every access,
    sectors per request, matrix instructions.
    """
    from fuselab.errors import ArgumentError
    from fuselab.inspect.assembly import asked, describe, subjects
    from fuselab.report.result import write_result

    asked.check_stage(stage)
    if annotate and (stage != asked.SUMMARY or diff is not None):
        raise ArgumentError("--annotate has a text of its own; leave --stage and --diff out.")
    request = asked.request(
        subject,
        arch,
        setting or (),
        kernel=kernel,
        signature=signature,
        dtype=None if dtype is None else dtype_of(dtype),
        case=case,
        implementation=implementation,
        threads=asked.threads_of(threads),
    )
    found = subjects.compiled(request)
    if diff is not None:
        other = subjects.compiled(asked.varied(request, diff))
        facts = _show_both(found, other, stage, diff)
    elif annotate:
        facts = _show_annotated(found)
    elif stage == asked.SUMMARY:
        facts = _show_summary(found)
    else:
        facts = {"target": subject, "stage": stage, "kernels": _show_stage(found, stage)}
    if output is not None:
        _write_all(output, describe.files_of(found))
    write_result(json, "asm", facts)


def _show_summary(found: Compiled) -> dict[str, Any]:
    from fuselab.inspect.assembly.describe import facts_of
    from fuselab.report.asm_text import asm_text

    facts = facts_of(found)
    print(asm_text(facts))
    return facts


def _show_stage(found: Compiled, stage: str) -> list[dict[str, Any]]:
    from fuselab.inspect.assembly.describe import stage_text

    shown = []
    for kernel in found.kernels:
        text = stage_text(kernel, stage)
        print(f"// {kernel.title}, {stage} of {kernel.architecture.name}\n{text}")
        shown.append({"name": kernel.name, "launched_by": kernel.launched_by, "text": text})
    return shown


def _show_annotated(found: Compiled) -> dict[str, Any]:
    import shutil

    from fuselab.inspect.assembly.describe import annotated
    from fuselab.report.asm_text import annotated_text, short_path
    from fuselab.report.screen import WIDTH

    wide = shutil.get_terminal_size((WIDTH, 24)).columns
    kernels = []
    for place, kernel in enumerate(found.kernels):
        rows, lines = annotated(kernel)
        title = f"{kernel.title} on {kernel.architecture.name}, {short_path(kernel.file)}"
        print("\n" * bool(place) + annotated_text(title, rows, lines, max(wide, WIDTH)))
        kernels.append({"name": kernel.name, "instructions": rows, "lines": lines})
    return {"target": found.spec, "architecture": found.architecture.name, "kernels": kernels}


def _show_both(left: Compiled, right: Compiled, stage: str, varied: str) -> dict[str, Any]:
    import difflib

    from fuselab.inspect.assembly.asked import SUMMARY
    from fuselab.inspect.assembly.describe import facts_of, stage_text
    from fuselab.report.asm_text import diff_text

    first, second = facts_of(left), facts_of(right)
    if stage == SUMMARY:
        names = [f"{each.spec} on {each.architecture.name}" for each in (left, right)]
        if names[0] == names[1]:
            names[1] += f", {varied}"
        print(diff_text(first, second, (names[0], names[1])))
    else:
        for one, two in zip(left.kernels, right.kernels, strict=False):
            before, after = (stage_text(each, stage).splitlines() for each in (one, two))
            names = [f"{each.title} {each.architecture.name}" for each in (one, two)]
            lines = difflib.unified_diff(before, after, names[0], names[1], lineterm="")
            print("\n".join(lines))
    return {"left": first, "right": second, "compared_with": varied}


def _write_all(folder: Path, texts: Iterator[tuple[str, str]]) -> None:
    from fuselab.report import files
    from fuselab.report.progress import say

    with files.folder_for_results(folder) as made:
        for name, text in texts:
            files.write_text(made / name, text)
            say(f"fuselab: wrote {made / name}")

"""A request as it is written on the command line, and the variation that ``--diff`` names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fuselab import ops
from fuselab.errors import ArgumentError, UnknownNameError
from fuselab.inspect.assembly.architectures import architecture
from fuselab.inspect.assembly.kernel import STAGES
from fuselab.inspect.assembly.subjects import Request

SUMMARY = "summary"
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def request(spec: str, arch: str, settings: Sequence[str], **options: Any) -> Request:
    """Return a request. ``settings`` are ``NAME=VALUE`` texts. Raises ArgumentError,
    UnknownNameError."""
    return Request(spec, architecture(arch), settings=settings_of(settings), **options)


def threads_of(text: str | None) -> tuple[int, ...] | None:
    """Return the threads of a block per axis, as ``256`` or ``16,16``. Raises ArgumentError."""
    if text is None:
        return None
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*){0,2}", text):
        raise ArgumentError(f"--threads {text}: write the threads of a block, 256 or 16,16.")
    return tuple(map(int, text.split(",")))


def settings_of(texts: Sequence[str]) -> dict[str, Any]:
    """Return ``NAME=VALUE`` texts as values. Raises ArgumentError."""
    found = {}
    for text in texts:
        match = re.fullmatch(r"(\w+)=(.+)", text)
        if match is None:
            raise ArgumentError(f"--set {text}: write NAME=VALUE, for example --set num_warps=8.")
        found[match[1]] = _value(match[2])
    return found


def _value(text: str) -> Any:
    words: Mapping[str, Any] = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_stage(stage: str) -> None:
    """Raise UnknownNameError if there is no such stage."""
    if stage not in (SUMMARY, *STAGES):
        raise UnknownNameError("stage", stage, (SUMMARY, *STAGES))


def varied(asked: Request, other: str) -> Request:
    """Return the request that ``--diff OTHER`` compares with: another architecture, dtype, setting
    (``num_warps=8``), implementation or case of the same subject, or another subject.

    Raises ArgumentError if OTHER is none of these.
    """
    if re.fullmatch(r"sm_\d+[af]?|gfx\d+", other):
        return replace(asked, architecture=architecture(other))
    if other in _DTYPES:
        return replace(asked, dtype=getattr(torch, other))
    if re.fullmatch(r"\w+=.+", other):
        return replace(asked, settings={**asked.settings, **settings_of([other])})
    if _is_subject(other):
        return replace(asked, spec=other)
    names = _names_of(asked.spec)
    if other in names["implementation"]:
        return replace(asked, implementation=other)
    if other in names["case"]:
        return replace(asked, case=other)
    raise ArgumentError(
        f"--diff {other}: it is no architecture (sm_80), dtype (bfloat16), setting (num_warps=8), "
        "implementation or case of the operator, and no other subject."
    )


def _is_subject(text: str) -> bool:
    path = Path(text.partition(":")[0])
    return ops.has(text.removeprefix("fuselab::")) or path.suffix in (".py", ".cu") or path.is_dir()


def _names_of(spec: str) -> dict[str, list[str]]:
    """Return the names of an operator's implementations and cases; none of another subject."""
    from fuselab.errors import FuselabError
    from fuselab.prove.load import load_op

    try:
        op = load_op(spec)
    except FuselabError:
        return {"implementation": [], "case": []}
    return {"implementation": list(op.implementations), "case": [case.name for case in op.cases]}

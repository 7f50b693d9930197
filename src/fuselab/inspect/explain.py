"""Explain how torch.compile compiles a TARGET, and how much faster that makes it.

Everything runs in child processes with their own inductor cache, so that the compile is really
cold, the user's caches are untouched, and a compile that hangs can be stopped.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fuselab.errors import ArgumentError, FuselabError, MissingDependencyError, TargetError
from fuselab.inspect.assembly.architectures import Architecture
from fuselab.inspect.profile import significant_everywhere
from fuselab.inspect.targets import Target
from fuselab.measure.fresh import child_environment

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
SHAPES = ("static", "automatic", "dynamic")  # how torch.compile treats sizes
TIMEOUT_S = 900


@dataclass(frozen=True)
class Request:
    """The request to the child processes."""

    target: str
    device: str
    data: str | None
    backward: bool
    dynamic: bool
    mode: str
    architecture: str | None = None  # of a GPU that is not there
    shapes: str | None = None  # how sizes are treated: static, automatic or dynamic
    batches: tuple[int, ...] = ()  # batch sizes to call it with; some of its own choice if empty


@dataclass(frozen=True)
class Explanation:
    """The result of an explanation: ``facts`` for the JSON, ``files`` the generated sources by
    name."""

    facts: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the text that ``fuselab explain`` prints; without rich, the fields."""
        from fuselab.report.explain_text import explain_text

        try:
            return explain_text(self.facts)
        except MissingDependencyError:
            return repr(self)

    def describe(self) -> dict[str, Any]:
        return self.facts

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write every kernel, graph and wrapper as a file. Raises OutputError."""
        from fuselab.report.files import folder_for_results, write_text

        with folder_for_results(folder) as place:
            for name, text in self.files.items():
                write_text(place / name, text)
        return [place / name for name in self.files]


def explain_target(
    target: Target,
    *,
    backward: bool = False,
    dynamic: bool = False,
    mode: str = "default",
    batches: Sequence[int] = (),
    progress: Callable[[str], None] = lambda words: None,
) -> Explanation:
    """Compile a TARGET in a fresh process and return what torch.compile made of it.

    ``backward`` compiles and times the backward too (loss as in ``profile_target``); ``dynamic``
    also calls it with other batch sizes (``batches``, or some of its own choice) and records what
    recompiled with static, automatic and dynamic sizes; ``mode`` is ``torch.compile``'s, or several
    of them with commas, of which the first is shown in full.

    Raises ArgumentError for an unknown mode, TargetError if the target or its compile fails or
    takes longer than 15 minutes (the message names the stage it was in).
    """
    modes = tuple(dict.fromkeys(one.strip() for one in mode.split(",")))
    for one in modes:
        if one not in MODES:
            raise ArgumentError(f"mode '{one}' is unknown; torch.compile has {', '.join(MODES)}.")
    if any(size < 1 for size in batches):
        raise ArgumentError("a batch size is a whole number from 1 on.")
    request = Request(target.spec, str(target.device), target.data, backward, dynamic, modes[0])
    with tempfile.TemporaryDirectory(prefix="fuselab-explain-") as folder:
        progress("compiling with an empty cache")
        explanation = _ask("explain", request, Path(folder))
        progress("compiling again with the cache on disk")
        warm = _ask("warm", request, Path(folder))
    facts = explanation.facts
    facts["compile"]["warm_s"] = warm
    facts["modes"] = _modes(request, modes, facts, progress) if len(modes) > 1 else []
    if dynamic:
        facts["batches"] = _with_other_sizes(request, tuple(batches), progress)
    return Explanation(significant_everywhere(explanation.facts), explanation.files)


def _modes(
    request: Request, modes: Sequence[str], facts: dict[str, Any], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row for each mode of torch.compile, compiled in a process of its own; ``facts`` are
    those of the first."""
    rows = []
    for mode in modes:
        if mode != request.mode:
            progress(f"compiling with mode {mode}")
            with tempfile.TemporaryDirectory(prefix="fuselab-explain-") as folder:
                facts = _ask("explain", replace(request, mode=mode), Path(folder)).facts
        rows.append(
            {
                "mode": mode,
                "cold_s": facts["compile"]["cold_s"],
                "eager_us": facts["eager"]["us"],
                **facts["compiled"],
                "speedup": facts["speedup"],
                "verdict": facts["verdict"],
                "fused": sum(kernel["kind"] == "fused" for kernel in facts["kernels"]),
                "library_calls": sum(kernel["kind"] != "fused" for kernel in facts["kernels"]),
            }
        )
    return rows


def _with_other_sizes(
    request: Request, batches: tuple[int, ...], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Return what each way to treat sizes does with several, each compiled in a process of its
    own."""
    found = {}
    for shapes in SHAPES:
        progress(f"calling it with several batch sizes, {shapes}")
        with tempfile.TemporaryDirectory(prefix="fuselab-explain-") as folder:
            asked = replace(request, shapes=shapes, batches=batches)
            found[shapes] = _ask("sizes", asked, Path(folder))
    return found


def explain_without_gpu(
    target: Target,
    architecture: Architecture,
    *,
    backward: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> Explanation:
    """Return what torch.compile would write for a GPU that is not there.

    ``target`` is loaded on the CPU, where it also runs. The kernels are Inductor's Triton code for
    ``architecture``, with the bytes that each must move; nothing is compiled or timed. Raises
    TargetError as ``explain_target`` does.
    """
    request = Request(
        target.spec, "cpu", target.data, backward, False, "default", architecture.name
    )
    with tempfile.TemporaryDirectory(prefix="fuselab-explain-") as folder:
        progress(f"writing code for {architecture.name}")
        explanation: Explanation = _ask("without-gpu", request, Path(folder))
    return Explanation(significant_everywhere(explanation.facts), explanation.files)


def _ask(what: str, request: Request, folder: Path) -> Any:
    """Run one child process; return its answer or raise its error."""
    asked, answer, stage = folder / "request", folder / f"{what}-answer", folder / "stage"
    asked.write_bytes(pickle.dumps(request))
    command = [sys.executable, "-m", "fuselab.inspect.explain_runner", what, str(folder)]
    environment = child_environment(
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
        TRITON_CACHE_DIR=str(folder / "triton"),
        KINETO_LOG_LEVEL="99",
        TORCH_CPP_LOG_LEVEL="ERROR",
    )
    try:
        done = subprocess.run(
            command, env=environment, stdout=2, stderr=subprocess.PIPE, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        reached = stage.read_text() if stage.is_file() else "starting"
        raise TargetError(
            f"explaining {request.target} took longer than {TIMEOUT_S} s while {reached}; "
            "try a smaller input or another --mode."
        ) from error
    if not answer.is_file():
        words = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise TargetError(
            f"the process that compiled {request.target} ended with status {done.returncode} "
            f"while {stage.read_text() if stage.is_file() else 'starting'}: {words[0][:200]}."
        )
    outcome = pickle.loads(answer.read_bytes())  # written by our own child just now
    if isinstance(outcome, FuselabError):
        raise outcome
    return outcome

"""Checkpoints: one safetensors file per kept step, written whole or not at all, without pickle.

``DIR/step-00000500.safetensors`` contains named tensors, and in its metadata under ``fuselab`` a
JSON object: the format's name and version, the kind of model, the step, and whatever the run adds.
Any safetensors reader opens it. A run of several ranks writes ``DIR/step-00000500.dcp`` instead
(``fuselab.distributed.sharded_files``), with the same names; ``load`` reads both.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import textwrap
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import (
    CheckpointError,
    FuselabError,
    MissingCheckpointError,
    MissingDependencyError,
    OutputError,
)
from fuselab.report import files

FORMAT, VERSION = "fuselab-checkpoint", 1
SHARDED = ".dcp"  # suffix of a checkpoint that several ranks wrote
# the beginning of our header; eight hexadecimal digits follow
_SUM = b'{"__metadata__": {"crc32": "'
_KEPT = 2  # how many of the newest are kept: the last good one, and the one before it
_NAMES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint. ``facts`` are what the run stores beside the tensors: settings, position."""

    kind: str
    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors whose name begins with ``name/``, without that prefix."""
        begin = len(name) + 1
        return {
            key[begin:]: value for key, value in self.tensors.items() if key.startswith(f"{name}/")
        }


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write it, and remove all but the newest two; return the file.

    Raises:
        OutputError: the disk is full, or the folder cannot be written; older checkpoints stay.
    """
    path = folder / f"{name_of(checkpoint.step)}.safetensors"
    facts = described(checkpoint.kind, checkpoint.step, checkpoint.facts)
    with files.replacing(path) as temporary:
        _write(temporary, checkpoint.tensors, {"fuselab": json.dumps(facts)})
    remove_old(folder)
    return path


def name_of(step: int) -> str:
    """Return a checkpoint's name without its suffix."""
    return f"step-{step:08}"


def described(kind: str, step: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object that is kept beside the tensors."""
    return {"format": FORMAT, "version": VERSION, "kind": kind, "step": step, "facts": facts}


def remove_old(folder: Path) -> None:
    """Remove all checkpoints of the folder but the newest two."""
    for old in _files(folder)[:-_KEPT]:
        if old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)


def load(path: Path, kind: str) -> Checkpoint:
    """Read ``path``: a file, or the newest of a folder.

    Raises:
        CheckpointError: there is none, it is truncated, damaged or not a checkpoint, of another
            ``kind`` or version, or may not be read.
    """
    file = path
    # Path.is_dir raises if a folder above may not be entered
    if os.path.isdir(path) and path.suffix != SHARDED:
        newest = latest(path)
        if newest is None:
            raise CheckpointError(
                f"{path} holds no checkpoint, or may not be read; give a folder of --checkpoint."
            )
        file = newest
    if os.path.isdir(file):
        return _load_sharded(file, kind)
    safetensors = _safetensors()
    try:
        # safetensors would say that a file without read permission does not exist
        with file.open("rb"):
            pass
        with whole(file), safetensors.safe_open(file, "pt") as opened:
            facts = json.loads((opened.metadata() or {}).get("fuselab", "{}"))
            _check(file, facts, kind)
            _check_sum(file)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            return Checkpoint(facts["kind"], facts["step"], tensors, facts["facts"])
    except FileNotFoundError as error:
        raise MissingCheckpointError(f"{file} does not exist; name a checkpoint.") from error
    except PermissionError as error:
        raise CheckpointError(
            f"{file} may not be read; ask its owner, or name another checkpoint."
        ) from error
    except (safetensors.SafetensorError, json.JSONDecodeError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or no checkpoint ({error}); name another one, or move it out of "
            "its folder to go on from the one before it."
        ) from error


def _load_sharded(path: Path, kind: str) -> Checkpoint:
    from fuselab.distributed import sharded_files  # torch.distributed.checkpoint takes a second

    facts = sharded_facts(path, kind)
    return Checkpoint(facts["kind"], facts["step"], sharded_files.read(path), facts["facts"])


def sharded_facts(path: Path, kind: str) -> dict[str, Any]:
    """Return what ``described`` returned for the checkpoint of several ranks at ``path``.

    Raises CheckpointError.
    """
    from fuselab.distributed import sharded_files

    facts = sharded_files.read_facts(path)
    with whole(path):
        _check(path, facts, kind)
    return facts


@contextlib.contextmanager
def whole(file: Path | str) -> Iterator[None]:
    """Guard a block that reads from checkpoint ``file`` what every checkpoint has.

    Raises CheckpointError if something is missing, or of another type or shape.
    """
    try:
        yield
    except (FuselabError, json.JSONDecodeError, torch.OutOfMemoryError):
        raise
    # load_state_dict raises the last
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        found = (
            f"it lacks {error}"
            if isinstance(error, KeyError)
            else textwrap.shorten(str(error), 200)
        )
        raise CheckpointError(f"{file} is damaged: {found}; use the one before it.") from error


def latest(folder: Path) -> Path | None:
    """Return the checkpoint of the highest step, or None."""
    found = _files(folder)
    return found[-1] if found else None


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Prepare the folder for one run, and lock it while the block runs.

    The folder is created if needed, checked to be writable, and freed of a killed run's unfinished
    file. Raises OutputError, and CheckpointError if another process trains into it.
    """
    with files.folder_for_results(folder):
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except PermissionError as error:
            raise OutputError(
                f"cannot read in {folder}: no permission; choose another folder."
            ) from error
        try:
            _lock(folder, descriptor)
            for unfinished in folder.glob(".fuselab-*.safetensors"):
                unfinished.unlink(missing_ok=True)
            for unfinished in folder.glob(f".fuselab-*{SHARDED}"):
                shutil.rmtree(unfinished, ignore_errors=True)
            yield
        finally:
            os.close(descriptor)


def random_state() -> dict[str, Tensor]:
    """Return the states of torch's generators: the CPU's, and every GPU's in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {
            f"cuda{place}": state for place, state in enumerate(torch.cuda.get_rng_state_all())
        }
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    """Restore the states that ``random_state`` returned, except those of GPUs that are not here."""
    torch.set_rng_state(states["cpu"])
    for place in range(torch.cuda.device_count()):
        with contextlib.suppress(KeyError):
            torch.cuda.set_rng_state(states[f"cuda{place}"], place)


def _check(file: Path, facts: Any, kind: str) -> None:
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} is readable, but no checkpoint of fuselab; load it as a state_dict."
        )
    if facts["version"] != VERSION:
        raise CheckpointError(
            f"{file} has checkpoint version {facts['version']}, and this fuselab reads version "
            f"{VERSION}; use the fuselab that wrote it."
        )
    if facts["kind"] != kind:
        raise CheckpointError(f"{file} holds a {facts['kind']} model; expected {kind}.")


def _files(folder: Path) -> list[Path]:
    """Return the checkpoints by step; a step of nine digits comes after those of eight."""
    found = [*folder.glob("step-*.safetensors"), *folder.glob(f"step-*{SHARDED}")]
    return sorted(found, key=lambda file: (len(file.stem), file.stem, file.suffix))


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file (format of version 0.4).

    It has the header's length, the header, and the tensors, ordered by element size, which aligns
    all, then by name, so that equal checkpoints are equal files. safetensors' own writer keeps all
    of a GPU's tensors on the host at once, and leaves a file with a name of its own when it is
    killed.
    """
    order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"crc32": "0" * 8, **metadata}}
    end = 0
    for name, tensor in order:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        begun = len(text).to_bytes(8, "little") + text
        file.write(begun)
        found = zlib.crc32(begun)
        for _, tensor in order:
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            file.write(data)
            found = zlib.crc32(data, found)
        file.seek(8 + len(_SUM))
        file.write(b"%08x" % found)


def _check_sum(file: Path) -> None:
    """Check the sum of every byte, with zeros for the sum's digits; other writers' files have
    none."""
    with file.open("rb") as opened:
        begin, digits = opened.read(8 + len(_SUM)), opened.read(8)
        if begin[8:] != _SUM:
            return
        found = zlib.crc32(b"0" * 8, zlib.crc32(begin))
        while piece := opened.read(1 << 24):
            found = zlib.crc32(piece, found)
    if digits != b"%08x" % found:
        raise CheckpointError(
            f"{file} is damaged: its bytes are not those that were written; use the one before it."
        )


def _lock(folder: Path, descriptor: int) -> None:
    """Lock the folder until the descriptor is closed, which a kill does too."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(
            f"another process trains into {folder}; wait for it, or give another folder."
        ) from error
    except OSError:
        pass  # a file system without locks


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise MissingDependencyError.of_extra(
            "checkpoints need", "safetensors", "checkpoints"
        ) from error
    return safetensors

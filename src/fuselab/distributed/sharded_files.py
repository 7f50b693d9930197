"""Checkpoints of sharded tables by torch.distributed.checkpoint, read by any number of ranks.

``DIR/step-00000500.dcp`` is a folder as torch.distributed.checkpoint (DCP) writes it, with
``facts.json`` beside its files. Every rank writes its blocks, and each tensor has its global shape,
so the folder does not depend on the ranks that wrote it. It gets its name when all is written.
DCP's metadata is a pickle: read only folders from people whom you trust.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from fuselab.distributed.ranks import Ranks
from fuselab.distributed.sharding import Shard
from fuselab.errors import CheckpointError, OutputError
from fuselab.report import files

_FACTS = "facts.json"


class Blocks:
    """Blocks of one tensor of a shape, with the offset at which each begins."""

    def __init__(
        self,
        shape: tuple[int, ...],
        offsets: Sequence[tuple[int, ...]],
        values: Sequence[Tensor],
    ) -> None:
        self.shape, self.offsets, self.values = shape, offsets, values

    @classmethod
    def of_shards(
        cls, table: tuple[int, int], shards: Sequence[Shard], values: Sequence[Tensor]
    ) -> Blocks:
        """Return blocks of a table, or of a state with one number per row of it."""
        flat = values[0].dim() == 1
        offsets = [
            (each.first_row,) if flat else (each.first_row, each.first_column) for each in shards
        ]
        return cls(table[:1] if flat else table, offsets, values)

    # torch.distributed.checkpoint calls these three on any object that has them.
    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def __create_write_items__(self, name: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offset), value.shape),
                    properties=TensorProperties.create_from_tensor(value),
                    size=self.size(),
                ),
            )
            for offset, value in zip(self.offsets, self.values, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offset), value.shape)
            for offset, value in zip(self.offsets, self.values, strict=True)
        ]

    def at(self, index: MetadataIndex) -> Tensor:
        """Return the block that begins at the index's offset."""
        offset = index.offset or torch.Size([0] * len(self.shape))
        return self.values[list(self.offsets).index(tuple(offset))]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.at(index) if isinstance(found, Blocks) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # the default one leaves out values that are no tensors
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.at(index) if isinstance(found, Blocks) else super().lookup_tensor(index)


def save(
    path: Path,
    state: Mapping[str, Tensor | Blocks],
    facts: Mapping[str, Any],
    ranks: Ranks,
) -> Path:
    """Write the folder ``path``; all ranks call it together, each with what it holds.

    A plain tensor that several ranks have is written by one of them. Raises OutputError on every
    rank, naming the rank that could not write; nothing is left of the folder then.
    """
    unfinished = path.with_name(f".fuselab-{path.name}")
    if ranks.first:
        shutil.rmtree(unfinished, ignore_errors=True)
    ranks.wait()
    problem = None
    try:
        with _quiet():
            save_shards(
                dict(state),
                storage_writer=FileSystemWriter(unfinished),
                planner=_SavePlanner(),
                no_dist=ranks.world_size == 1,
            )
        if ranks.first:
            files.write_json(unfinished / _FACTS, facts)
    except CheckpointException as error:
        problem = _problem(error, path)
    except OSError as error:
        problem = f"rank {ranks.rank} cannot write {path}: {_reason(error)}"
    problem = ranks.told(problem)
    if ranks.first:
        if problem is None:
            shutil.rmtree(path, ignore_errors=True)
            os.replace(unfinished, path)
            _flush(path.parent)
        else:
            shutil.rmtree(unfinished, ignore_errors=True)
    ranks.wait()
    if problem is not None:
        raise OutputError(f"{problem} Older checkpoints stay.")
    return path


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a checkpoint's folder. Raises CheckpointError."""
    try:
        found = json.loads((path / _FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no whole checkpoint ({error}); name another one, or move it out of its "
            "folder to go on from the one before it."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} has no facts in {_FACTS}; name another one.")
    return found


def sizes(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of every tensor of a checkpoint. Raises CheckpointError."""
    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}); use the one before it."
        ) from error
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, whole, on the CPU; one process is enough.

    Raises CheckpointError.
    """
    state = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in sizes(path).items()}
    _load(path, state)
    return state


def read_into(path: Path, state: Mapping[str, Tensor | Blocks]) -> None:
    """Read into the tensors and blocks of ``state``, each rank what it holds.

    Raises CheckpointError, on the rank that could not read.
    """
    known = sizes(path)
    for name, wanted in state.items():
        size = tuple(wanted.shape)
        found = tuple(known[name][0]) if name in known else None
        if found != size:
            raise CheckpointError(
                f"{path} has {name} of shape {found}, and this run needs {size}; use the same "
                "configuration, or another folder."
            )
    _load(path, state)


def _load(path: Path, state: Mapping[str, Any]) -> None:
    try:
        with _quiet():
            load(
                dict(state),
                storage_reader=FileSystemReader(path),
                planner=_LoadPlanner(),
                no_dist=True,
            )
    except Exception as error:
        # DCP raises whatever its readers meet, as a pickle, a zip or a tensor
        text = str(error).strip().splitlines()
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {text[-1] if text else 'no message'}); "
            "use the one before it."
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence DCP's warning that one process alone reads or writes, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _problem(error: CheckpointException, path: Path) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    reason = _reason(cause) if isinstance(cause, OSError) else f"{type(cause).__name__}: {cause}"
    return f"rank {rank} cannot write {path}: {reason}"


def _reason(error: OSError) -> str:
    return files.reason(error, Path(error.filename or "checkpoint"))


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

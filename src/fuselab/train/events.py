"""Scalars for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuselab.errors import MissingDependencyError, OutputError


class Events:
    """Writes scalars into ``folder``, which is created if missing; None writes nothing.

    Scalars that an earlier run wrote after step ``begin`` are no longer shown. Raises
    MissingDependencyError without tensorboard, OutputError if the folder cannot be made.
    """

    def __init__(self, folder: Path | None, begin: int = 0) -> None:
        self.writer: Any = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependencyError.of_extra(
                "--tensorboard needs", "tensorboard", "tensorboard"
            ) from error
        try:
            self.writer = SummaryWriter(str(folder), purge_step=begin + 1)
        except OSError as error:
            raise OutputError(
                f"cannot write to {folder}: {(error.strerror or str(error)).lower()}; choose "
                "another folder."
            ) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

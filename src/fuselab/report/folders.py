"""Make the folder that a result of several files goes to."""

from __future__ import annotations

import os
from pathlib import Path

from fuselab.errors import OutputError


def make_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, made with its parents where it is missing. Raises OutputError."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OutputError(
            f"cannot make the folder {folder}: {reason}; choose another place."
        ) from error
    return folder

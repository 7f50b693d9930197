"""The meaning of ``--device``: auto, cpu, cuda or cuda:N."""

from __future__ import annotations

import re

import torch

from fuselab.errors import DeviceError


def select(name: str = "auto") -> torch.device:
    """Return the device that ``name`` means, with an index for CUDA.

    ``auto`` is the current CUDA device if there is one, else the CPU; ``cuda`` is the current CUDA
    device.

    Raises:
        DeviceError: the name is none of these, or the device is not there.
    """
    match = re.fullmatch(r"(auto|cpu|cuda)|cuda:(\d+)", name)
    if match is None:
        raise DeviceError(f"'{name}' is no device; use auto, cpu, cuda or cuda:N.")
    kind, index = match.groups()
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(f"'{name}' is not there: {why_no_cuda()}; use --device cpu.")
    if index is None:
        return torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.device_count()
    if int(index) >= count:
        present = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise DeviceError(f"'{name}' is not there; this machine has {present}.")
    return torch.device("cuda", int(index))


def why_no_cuda() -> str:
    """Return in a few words why ``torch.cuda`` has no device here."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:  # no driver, or one that is too old; torch says which
        return str(error).split(". ")[0].rstrip(".")
    return f"torch {torch.__version__} finds no NVIDIA GPU"

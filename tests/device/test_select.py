"""--device: each name's meaning, and the sentence for a device that is not there."""

from __future__ import annotations

import pytest
import torch

from fuselab.device.select import select
from fuselab.errors import DeviceError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("two_gpus")
def test_with_gpus() -> None:
    assert select("cpu") == torch.device("cpu")
    assert select() == select("auto") == select("cuda") == torch.device("cuda:1")
    assert select("cuda:0") == torch.device("cuda:0")
    with pytest.raises(DeviceError, match=r"'cuda:2'.*cuda:0 to cuda:1"):
        select("cuda:2")


@pytest.mark.usefixtures("no_gpu")
def test_without_gpu() -> None:
    assert select("auto") == select("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:0"):
        with pytest.raises(DeviceError, match=rf"'{name}' is not there: torch .*--device cpu"):
            select(name)


@pytest.mark.parametrize("name", ["", "gpu", "CUDA", "cpu:0", "cuda:", "cuda:-1", "cuda:0 "])
def test_no_such_name(name: str) -> None:
    with pytest.raises(DeviceError, match=f"'{name}' is no device"):
        select(name)

"""Checkpoints: what goes in comes out; whatever is wrong with a file is one sentence."""

from __future__ import annotations

import json
import resource
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuselab.errors import CheckpointError, OutputError
from fuselab.train import checkpoint as module
from fuselab.train.checkpoint import (
    Checkpoint,
    latest,
    load,
    own_folder,
    random_state,
    save,
    set_random_state,
    whole,
)


def _checkpoint(step: int = 7, numel: int = 6) -> Checkpoint:
    flat = torch.arange(float(numel))
    tensors = {"model/a": flat[:2], "model/b": flat[2:], "optimizer/a": flat.bfloat16()}
    return Checkpoint("dlrm", step, tensors, {"position": [1, 2], "mode": "eager"})


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    path = save(tmp_path, _checkpoint())
    assert path.name == "step-00000007.safetensors"
    found = load(path, "dlrm")
    assert (found.kind, found.step) == ("dlrm", 7)
    assert found.facts == {"position": [1, 2], "mode": "eager"}
    assert found.part("model")["b"].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert found.part("optimizer")["a"].dtype == torch.bfloat16
    assert set(load_file(path)) == {"model/a", "model/b", "optimizer/a"}  # by any reader


def test_equal_checkpoints_are_equal_files(tmp_path: Path) -> None:
    """Whatever order a mode names its tensors in; sets have another one in every process."""
    one = _checkpoint()
    other = Checkpoint("dlrm", 7, dict(reversed(one.tensors.items())), one.facts)
    first = save(tmp_path, one).read_bytes()
    (tmp_path / "step-00000007.safetensors").unlink()
    assert save(tmp_path, other).read_bytes() == first


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 100_000_000, 10):
        save(tmp_path, _checkpoint(step))
    (tmp_path / "notes.txt").touch()
    save(tmp_path, _checkpoint(99_999_999))
    steps = {int(file.stem.split("-")[1]) for file in tmp_path.glob("step-*")}
    assert steps == {99_999_999, 100_000_000}
    assert load(tmp_path, "dlrm").step == 100_000_000
    assert latest(tmp_path / "nowhere") is None


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = save(tmp_path, _checkpoint())
    whole = path.read_bytes()
    for length in (0, 4, 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"step-00000007.* truncated or no checkpoint"):
            load(path, "dlrm")


def test_a_flipped_bit_anywhere(tmp_path: Path) -> None:
    path = save(tmp_path, _checkpoint())
    whole = path.read_bytes()
    for place in range(whole.index(b'"crc32": "') + 10, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(CheckpointError):
            load(path, "dlrm")
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 64]))  # of a value, which no reader sees
    with pytest.raises(CheckpointError, match=r"step-00000007.* damaged: its bytes are not those"):
        load(path, "dlrm")


def test_another_model_version_or_file(tmp_path: Path) -> None:
    path = save(tmp_path, _checkpoint())
    with pytest.raises(CheckpointError, match=r"holds a dlrm model.*lora"):
        load(path, "lora")
    later = {"format": "fuselab-checkpoint", "version": 2, "kind": "dlrm", "step": 0, "facts": {}}
    save_file({"a": torch.zeros(1)}, path, {"fuselab": json.dumps(later)})
    with pytest.raises(CheckpointError, match="version 2, and this fuselab reads version 1"):
        load(path, "dlrm")
    for metadata in ({}, {"fuselab": "[1]"}):
        save_file({"a": torch.zeros(1)}, path, metadata)
        with pytest.raises(CheckpointError, match="no checkpoint of fuselab"):
            load(path, "dlrm")
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "step-1.safetensors", "dlrm")
    path.unlink()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(tmp_path, "dlrm")


def test_a_full_disk_leaves_the_last_one_whole(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the write stops in the middle."""
    save(tmp_path, _checkpoint(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OutputError, match=r"cannot write .*step-00000002"):
            save(tmp_path, _checkpoint(2, 1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000001.safetensors"]
    assert load(tmp_path, "dlrm").step == 1


def test_a_killed_runs_unfinished_file_goes(tmp_path: Path) -> None:
    (tmp_path / ".fuselab-0123.safetensors").touch()
    with own_folder(tmp_path):
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is a file"), own_folder(tmp_path / "file"):
        pass


def test_a_folder_is_one_runs(tmp_path: Path) -> None:
    with own_folder(tmp_path):
        unfinished = tmp_path / ".fuselab-0123.safetensors"
        unfinished.touch()
        with pytest.raises(CheckpointError, match="another process trains into"):  # noqa: SIM117
            with own_folder(tmp_path):
                pass
        assert unfinished.exists()
    with own_folder(tmp_path):
        pass


def test_every_dtype_layout_and_size(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensors = {
        "transposed": whole.t(),
        "columns": whole[:, ::2],
        "number": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "long": torch.tensor([2**40]),
        "half": torch.tensor([0.1, -0.0, torch.inf]).bfloat16(),
        "bool": torch.tensor([True, False]),
    }
    path = save(tmp_path, Checkpoint("dlrm", 1, tensors, {}))
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_damaged_facts_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001.safetensors"
    lacking = {"format": "fuselab-checkpoint", "version": 1, "kind": "dlrm", "step": 0}
    save_file({"a": torch.zeros(1)}, path, {"fuselab": json.dumps(lacking)})
    with pytest.raises(CheckpointError, match=r"step-00000001.* damaged: it lacks 'facts'"):
        load(path, "dlrm")
    with pytest.raises(CheckpointError, match=r"damaged: .*size mismatch for weight"), whole(path):
        torch.nn.Linear(2, 2).load_state_dict({"weight": torch.zeros(3), "bias": torch.zeros(2)})
    with pytest.raises(torch.OutOfMemoryError), whole(path):
        raise torch.OutOfMemoryError


def test_without_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``open`` refuses in place of the system, which refuses root nothing."""
    path = save(tmp_path, _checkpoint())

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"step-00000007.* may not be read"):
        load(path, "dlrm")
    monkeypatch.undo()
    monkeypatch.setattr(module.files, "folder_for_results", lambda folder: nullcontext(folder))
    monkeypatch.setattr(module.os, "open", refuse)
    with pytest.raises(OutputError, match="cannot read in"), own_folder(tmp_path):
        pass


def test_random_state(tmp_path: Path) -> None:
    states = random_state()
    first = torch.rand(3)
    set_random_state(states)
    assert torch.equal(torch.rand(3), first)

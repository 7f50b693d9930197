"""Results are written whole or not at all, and the disk's refusals become one sentence."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from fuselab.errors import OutputError
from fuselab.report import files


def test_text_replaces_what_was_there_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "result.txt"
    target.write_text("old and longer")
    files.write_text(target, "neu: é\n")
    assert target.read_bytes() == "neu: é\n".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["result.txt"]


def test_a_new_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_bytes(tmp_path / "result.bin", b"\x00\xff")
    finally:
        os.umask(before)
    assert (tmp_path / "result.bin").stat().st_mode & 0o777 == 0o640


def test_a_symbolic_link_stays_and_its_target_changes(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    link = tmp_path / "link.txt"
    link.symlink_to("real.txt")
    files.write_text(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"


def test_json_keeps_every_digit_and_spells_what_json_cannot(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Row:
        name: str
        time_us: float

    payload = {
        "row": Row("a", 0.1 + 0.2),
        "tiny": 5e-324,
        "special": (math.nan, math.inf, -math.inf, -0.0),
        "numpy": [numpy.float32(0.1), numpy.int64(2**40)],
        "none": None,
        "yes": True,
        "tags": frozenset({"b", "a"}),
        "path": Path("some/where"),
    }
    files.write_json(tmp_path / "result.json", payload)
    read = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert read["row"] == {"name": "a", "time_us": 0.30000000000000004}
    assert read["tiny"] == 5e-324
    assert read["special"][:3] == ["NaN", "Infinity", "-Infinity"]
    assert math.copysign(1.0, read["special"][3]) == -1.0
    assert read["numpy"] == [float(numpy.float32(0.1)), 2**40]
    assert read["none"] is None
    assert read["yes"] is True
    assert read["tags"] == ["a", "b"]
    assert read["path"] == "some/where"


@pytest.mark.parametrize("value", [object(), b"bytes", {1: "key"}])
def test_json_refuses_what_it_would_have_to_guess(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match=r"payload\.rows\[1\]"):
        files.write_json(tmp_path / "result.json", {"rows": [0, value]})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")

    def write_half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OutputError, match=r"report\.html: the disk is full"):
        files.write_text(target, "new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_the_last_steps_can_fail_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OutputError, match="the disk is full"):
        files.write_text(tmp_path / "result.txt", "text")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's own")
def test_a_device_is_written_directly_and_its_refusal_is_reported() -> None:
    with pytest.raises(OutputError, match="cannot write /dev/full: the disk is full"):
        files.write_text("/dev/full", "text")
    files.write_text("/dev/null", "text")
    assert not os.path.isfile("/dev/full")
    assert not os.path.isfile("/dev/null")


def test_a_missing_folder_a_folder_and_a_file_as_folder(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"the folder .*missing does not exist"):
        files.write_text(tmp_path / "missing" / "result.txt", "text")
    with pytest.raises(OutputError, match="it is a folder"):
        files.write_text(tmp_path, "text")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file is not a folder"):
        files.write_text(tmp_path / "file" / "result.txt", "text")


def test_no_permission_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:  # root may write anywhere, so the refusal is made here
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OutputError, match=f"no permission to write in {tmp_path}"):
        files.write_text(tmp_path / "result.txt", "text")


def test_replacing_keeps_the_suffix_and_drops_the_file_when_the_block_raises(
    tmp_path: Path,
) -> None:
    target = tmp_path / "plot.png"
    with files.replacing(target) as temporary:
        assert temporary.suffix == ".png"
        temporary.write_bytes(b"png")
        assert not target.exists()
    assert target.read_bytes() == b"png"

    with pytest.raises(KeyboardInterrupt), files.replacing(target) as temporary:
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt
    assert target.read_bytes() == b"png"
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]


def test_a_folder_for_results_goes_again_when_nothing_came_of_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError), files.folder_for_results(tmp_path / "a" / "b"):
        raise ValueError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError), files.folder_for_results(tmp_path / "a" / "b") as folder:
        (folder / "kept").write_text("")
        raise ValueError
    assert (tmp_path / "a" / "b" / "kept").exists()
    with files.folder_for_results(tmp_path / "c"):
        pass
    assert (tmp_path / "c").is_dir()


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OutputError, match="is a file"),
        files.folder_for_results(tmp_path / "file"),
    ):
        pass
    with (
        pytest.raises(OutputError, match="is not a folder"),
        files.folder_for_results(tmp_path / "file" / "below"),
    ):
        pass


def test_a_destination_is_refused_before_the_work(tmp_path: Path) -> None:
    files.check_destination(tmp_path / "result.json")
    with pytest.raises(OutputError, match="does not exist"):
        files.check_destination(tmp_path / "nowhere" / "result.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file is a file"):
        files.check_destination(tmp_path / "file" / "result.json")
    with pytest.raises(OutputError, match="is a folder"):
        files.check_destination(tmp_path)


def test_a_read_only_file_stays(tmp_path: Path) -> None:
    """Whoever runs it: a rename would replace the file, and root may write any."""
    kept = tmp_path / "rows.tsv"
    kept.write_text("rows")
    kept.chmod(0o444)
    for write in (files.check_destination, lambda path: files.write_text(path, "scores")):
        with pytest.raises(OutputError, match=r"rows\.tsv: that file is read-only"):
            write(kept)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.tsv"]
    assert kept.read_text() == "rows"


def test_a_folder_is_refused_before_the_work_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.check_folder(tmp_path / "new" / "deeper")
    assert not (tmp_path / "new").exists()
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(OutputError, match=f"{file} is a file"):
            files.check_folder(path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OutputError, match=f"no permission to write in {tmp_path}"):
        files.check_folder(tmp_path / "new" / "deeper")
    monkeypatch.chdir(tmp_path)  # and not "in .."
    with pytest.raises(OutputError, match=f"cannot write x: no permission to write in {tmp_path};"):
        files.check_destination("x")


def test_a_folder_below_one_that_may_not_be_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses root nothing, so Path does here, in all that asks it."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in ("exists", "is_dir", "mkdir"):
        monkeypatch.setattr(Path, name, refuse)
    with (
        pytest.raises(OutputError, match=f"no permission to write in {tmp_path}"),
        files.folder_for_results(tmp_path / "sealed" / "a"),
    ):
        pass

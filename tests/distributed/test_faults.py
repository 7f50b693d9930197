"""A rank that fails or is killed ends all ranks, with one sentence, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from fuselab.distributed.launch import _told
from fuselab.distributed.ranks import LOST, Ranks, _store, spoken
from fuselab.models.dlrm import DlrmConfig
from fuselab.train import checkpoint
from fuselab.train.dlrm import Plan, Run
from fuselab.train.dlrm_ranks import RankRun, Sharding

CONFIG = DlrmConfig((8,), 4, (8,), "dot", largest_table=50)


def _diverge(ranks: Ranks) -> None:
    with spoken(ranks):
        plan = Plan(CONFIG, "eager", rows=2000, batch_size=64, steps=5, lr=1e30)
        RankRun(plan, ranks.device, None, ranks, Sharding("table")).train()


def _fill_the_disk(ranks: Ranks, folder: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    plan = Plan(CONFIG, "eager", rows=2000, batch_size=64, steps=4)
    with spoken(ranks):
        run = RankRun(plan, ranks.device, folder, ranks, Sharding("table"))
        run.position = run.loader.position
        run.keep(2)
        if ranks.rank == 1:
            FileSystemWriter.write_data = full
        run.train()


def _raise_alone(ranks: Ranks) -> None:
    """Rank 1 finds bad data while the others wait for it in an exchange."""
    from fuselab.errors import DataError

    with spoken(ranks):
        if ranks.rank == 1:
            raise DataError("rows.tsv, line 7: expected 40 columns, found 3.")
        ranks.wait()


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (_diverge, "the loss of step 2 is"),
        (_fill_the_disk, "rank 1 cannot write {folder}/step-00000004.dcp: the disk is full;"),
        (_raise_alone, "rank 1: rows.tsv, line 7: expected 40 columns, found 3."),
    ],
)
def test_one_sentence_ends_all(
    start: Callable[..., list[Any]],
    tmp_path: Path,
    work: Callable[..., None],
    said: str,
) -> None:
    args = (tmp_path,) if work is _fill_the_disk else ()
    ended = start(2, work, *args, statuses=True)
    assert sorted(status for status, _ in ended) == [2, LOST]
    text = "\n".join(said for _, said in ended)
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if "fuselab:" in line]
    assert len(lines) == 1
    assert lines[0].startswith("fuselab: rank ")
    assert said.format(folder=tmp_path) in lines[0]
    if work is _fill_the_disk:
        # the last good checkpoint stays, and nothing of the other
        assert [each.name for each in tmp_path.glob("*step-*")] == ["step-00000002.dcp"]


def test_which_rank_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert _told({0: LOST, 2: -signal.SIGKILL, 1: -signal.SIGTERM}) == 2
    assert "rank 2 was killed by signal 9 (SIGKILL)" in capsys.readouterr().err
    assert _told({0: LOST, 1: 2}) == 2
    assert _told({0: 130, 1: 130}) == 130
    assert capsys.readouterr().err == ""


def test_a_restarted_rank_reads_no_address_of_a_killed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent keeps its store over restarts; each attempt gets a part of its own."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    first, rank, world_size = _store()
    assert (rank, world_size) == (0, 2)
    first.set("address", "of the killed")
    assert _store()[0].check(["address"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not _store()[0].check(["address"])


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [*_children(child), child]
    return found


def _pid_of_rank(launcher: int, rank: int) -> int:
    for pid in _children(launcher):
        with contextlib.suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    raise AssertionError(f"no rank {rank} runs")


def test_a_rank_that_ends_itself_on_sigterm_hides_no_killed_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _told({0: 128 + signal.SIGTERM, 1: -signal.SIGKILL}) == 2
    assert "rank 1 was killed by signal 9 (SIGKILL)" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds ranks in Linux's /proc")
def test_a_killed_rank_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    config, folder = tmp_path / "tiny.toml", tmp_path / "kept"
    config.write_text(
        'dense_mlp = "13-8-4"\nprediction_mlp = "8-1"\ninteraction = "dot"\nlargest_table = 50\n'
    )
    words = [sys.executable, "-m", "fuselab", "train", "dlrm", "--config", str(config)]
    words += ["--device", "cpu", "--rows", "3000", "--checkpoint", str(folder), "--mode", "eager"]
    words += ["--checkpoint-every", "5", "--ranks", "2", "--deterministic"]
    child = subprocess.Popen(
        [*words, "--steps", "1000000", "--epochs", "1000000"], stderr=subprocess.PIPE, text=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(folder.glob("step-*")) and time.monotonic() < deadline:
        assert child.poll() is None
        time.sleep(0.01)
    ranks = _children(child.pid)
    os.kill(_pid_of_rank(child.pid, 1), signal.SIGKILL)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 2
    told = [line for line in said.splitlines() if line.startswith("fuselab:")]
    assert told == [
        "fuselab: rank 1 was killed by signal 9 (SIGKILL), and all ranks have ended; --resume goes "
        "on from the last checkpoint."
    ]
    assert "Traceback" not in said
    assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []
    newest = checkpoint.latest(folder)
    assert newest is not None
    step = int(newest.stem.removeprefix("step-"))
    # one process goes on from what two ranks wrote
    plan = Plan(
        DlrmConfig((8,), 4, (8,), "dot", largest_table=50), "eager", rows=3000, steps=step + 3
    )
    run = Run(plan, torch.device("cpu"), folder)
    run.resume()
    assert run.begin == step
    assert run.train().course.steps == step + 3

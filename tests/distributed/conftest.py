"""Ranks for tests: processes that join through gloo, started from a server that imports once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., list[Any]]


def _run(rank: int, world: int, port: int, out: str, work: Callable[..., Any], args: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    # The server that forks this process keeps the stderr of the test that started it.
    said = os.open(f"{out}.{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 2)
    import torch

    from fuselab.distributed.ranks import joined

    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as ranks:
        found = work(ranks, *args)
    Path(f"{out}.{rank}").write_bytes(pickle.dumps(found))


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return ``start(world, work, *args)``: the results of ``work(ranks, *args)`` by rank.

    With ``statuses=True`` it returns every rank's exit status, whatever it is, and its stderr.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "fuselab.train.dlrm_ranks"])

    def start(
        world: int, work: Callable[..., Any], *args: Any, statuses: bool = False
    ) -> list[Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        out = str(tmp_path / f"out-{world}-{port}")
        processes = [
            context.Process(target=_run, args=(rank, world, port, out, work, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        said = [Path(f"{out}.{rank}.txt").read_text() for rank in range(world)]
        found = [process.exitcode for process in processes]
        if statuses:
            return list(zip(found, said, strict=True))
        assert found == [0] * world, "\n".join(said)
        return [pickle.loads(Path(f"{out}.{rank}").read_bytes()) for rank in range(world)]

    return start

"""The processes of a run: who they are, how they agree, and how they end when one is lost."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fuselab.errors import DeviceError, FuselabError

GRACE_S = 20.0  # what a rank that was asked to end has left; torchrun kills after 30 s
LOST = 75  # exit status of a rank that ended because another one was lost
_TIMEOUT = datetime.timedelta(minutes=10)  # of one exchange; a dead peer is noticed much earlier


@dataclass(frozen=True)
class Ranks:
    """A process among all of a run: ``rank`` of ``world_size``, on ``device``.

    ``ids`` is a second group of the same processes, so that ids travel beside vectors.
    """

    rank: int
    world_size: int
    device: torch.device
    ids: Any = None

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def add_up(self, values: Tensor) -> None:
        """Replace the values by their sums over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(values)

    def told(self, value: Any) -> Any:
        """Return what rank 0 has as ``value``; any JSON-like object."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, device=self.device)
        return box[0]

    def gathered(self, values: Tensor) -> Tensor | None:
        """Return all ranks' values, one after the other, on rank 0; None elsewhere.

        ``values`` are of one dtype and of any, also different, length.
        """
        if self.world_size == 1:
            return values
        lengths = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(values)
        self.add_up(lengths)
        longest = int(lengths.max())
        padded = values.new_zeros((longest, *values.shape[1:]))
        padded[: len(values)] = values
        found = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(found, padded)
        if not self.first:
            return None
        return torch.cat(
            [each[:count] for each, count in zip(found, lengths.tolist(), strict=True)]
        )

    def wait(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1, device=self.device))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def claim(self, what: str) -> bool:
        """Return whether this rank is the first to claim ``what``; the others get False."""
        if self.world_size == 1 or not dist.is_initialized():
            return True
        try:
            return bool(dist.distributed_c10d._get_default_store().add(f"fuselab/{what}", 1) == 1)
        except RuntimeError:  # the store ended with rank 0, which has said why
            return False


def launched() -> bool:
    """Return whether torchrun, or another launcher of its kind, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def place(device: torch.device) -> torch.device:
    """Return this process's own device of the asked kind: with CUDA, the GPU of its local rank.

    Raises DeviceError if the machine has fewer GPUs than processes.
    """
    if device.type != "cuda":
        return device
    local = int(os.environ.get("LOCAL_RANK", 0))
    if local >= torch.cuda.device_count():
        raise DeviceError(
            f"rank {os.environ.get('RANK', 0)} needs GPU {local} of {socket.gethostname()}, which "
            f"has {torch.cuda.device_count()}; start as many ranks as there are GPUs."
        )
    return torch.device("cuda", local)


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that the launcher started; leave them at the end of the block.

    Without a launcher this process is alone. On a GPU the exchange goes through NCCL, otherwise
    through gloo. While the block runs, SIGTERM leaves this process ``GRACE_S`` seconds even if an
    exchange blocks it.
    """
    where = place(device)
    if not launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield Ranks(0, 1, where)
        return
    if where.type == "cuda":
        torch.cuda.set_device(where)
    with _ends_in_time():
        backend = "nccl" if where.type == "cuda" else "gloo"
        store, rank, world_size = _store()
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT
        )
        ids = dist.new_group(timeout=_TIMEOUT)
        yield Ranks(dist.get_rank(), dist.get_world_size(), where, ids)
        # Only after a sound end: with a peer gone, this could wait for it.
        dist.barrier()
        dist.destroy_process_group()


def _store() -> tuple[Store, int, int]:
    """Return the launcher's store, and this process's rank of how many.

    torchrun's agent keeps one store over its restarts. Without a prefix of its own, a restarted
    rank can read the address of a peer that was killed, and fails to connect to it.
    """
    store, rank, world_size = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt-{restarts}-of-{world_size}", store), rank, world_size


@contextlib.contextmanager
def spoken(ranks: Ranks) -> Iterator[None]:
    """End this process if the block raises a foreseen error, with one sentence of all ranks.

    The first rank with an error of its own says it and ends with status 2. The others end with
    status ``LOST``, without a word, once they meet the same error or miss a rank. Nothing is waited
    for: the launcher ends the ranks that block. Alone, the error is raised as it is.
    """
    try:
        yield
    except FuselabError as error:
        if ranks.world_size == 1:
            raise
        if not ranks.claim("error"):
            _leave(LOST)
        print(f"fuselab: rank {ranks.rank}: {error}", file=sys.stderr)
        _leave(2)
    except RuntimeError as error:
        if ranks.world_size == 1 or not _is_of_a_lost_peer(error):
            raise
        _leave(LOST)


def _leave(status: int) -> NoReturn:
    """End at once: the ends of communicators would wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


_SIGNS = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "timed out waiting",
    "socket closed", "connection refused", "nccl", "connection was likely closed",
)  # fmt: skip


def _is_of_a_lost_peer(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistBackendError) or any(sign in text for sign in _SIGNS)


@contextlib.contextmanager
def _ends_in_time() -> Iterator[None]:
    """End this process ``GRACE_S`` seconds after SIGTERM, also while an exchange blocks it.

    Python runs a handler only between two of its instructions, so a thread reads the signal's
    number from the pipe into which the interpreter's C handler writes it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    handler = signal.getsignal(signal.SIGTERM)
    if handler in (signal.SIG_DFL, None):  # without any handler nothing would be written
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    ended = threading.Event()

    def watch() -> None:
        while number := os.read(read_end, 1):
            if number[0] == signal.SIGTERM and not ended.wait(GRACE_S):
                os._exit(128 + signal.SIGTERM)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGTERM, handler)
        os.close(write_end)
        watcher.join(1)
        os.close(read_end)

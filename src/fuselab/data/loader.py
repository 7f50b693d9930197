"""A loader that reads ahead, shuffles in windows, and has batches on the device in time.

A window of rows is read in file order by several threads, copied to the device, and put in its
shuffled order there by one gather; a batch is a slice of it. So the disk sees large sequential
reads, and a batch costs its consumer no launch. The order is a function of seed, epoch and window
(``fuselab.data.shuffle``), so a position is two numbers.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy
import numpy.typing
import torch
from torch import Tensor

from fuselab.data.dataset import Dataset, open_dataset
from fuselab.data.processes import available_cores
from fuselab.data.records import RECORD, WORDS, Batch, as_batch
from fuselab.data.shuffle import permutation
from fuselab.errors import ArgumentError, DeviceError

IN_ORDER_ROWS = 65_536  # rows of a window if nothing is shuffled
READERS = min(12, available_cores())  # threads that read
AHEAD = 2  # windows that are ready or being made while one is consumed


class Position(NamedTuple):
    """A loader's position: the epoch, and how many rows of it the loader's rank has yielded."""

    epoch: int = 0
    rows: int = 0


class _Window(NamedTuple):
    """``size`` consecutive rows of the rank.

    In their shuffled order, only those from ``skip`` to ``stop`` are yielded; ``done`` rows of the
    epoch come before them.
    """

    number: int
    first: int
    size: int
    skip: int
    stop: int
    done: int


class Loader:
    """An iterable over the batches of ``data``, epoch after epoch.

    Iterating yields the remaining batches of the current epoch; iterating again yields the next
    epoch's. After a loop was left early, the next one continues where it stopped. ``position`` is
    the place after the last batch yielded, whatever was read ahead: a loader made with
    ``start=position`` and otherwise equal arguments yields exactly the batches that this one would
    have yielded next.

    Args:
        data: a ``Dataset`` (``open_dataset(path).split("train")``), or a path, for all of its rows.
        batch_size: rows per batch; the last batch of an epoch may be smaller.
        shuffle_window: rows of a window, rounded up to a multiple of ``batch_size``. A window's
            rows come in a random order, windows come in the source's order. 0 keeps the source's
            order. The device holds up to four windows at a time (160 bytes a row).
        seed: of the order; every epoch and window has another order.
        rank, world_size: this rank yields the ``rank``-th of ``world_size`` consecutive parts,
            whose sizes differ by at most a row; together the ranks yield every row once.
        device: the device of the batches. On a GPU they are ready on the stream that is current
            when they are asked for, and the host never waits. Capture CUDA graphs before the first
            batch, or with ``capture_error_mode="thread_local"``, because a thread makes copies.
        drop_last: leave out the last, smaller batch; every rank then yields as many batches.
        start: the ``position`` to continue from.

    Raises ArgumentError for sizes below 1, a rank outside the world, or a position outside the
    epoch, DeviceError if the device is not there, and, from the iteration, DataError.
    """

    def __init__(
        self,
        data: Dataset | str | Path,
        batch_size: int,
        *,
        shuffle_window: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        drop_last: bool = False,
        start: Position = Position(),  # noqa: B008 - immutable
    ) -> None:
        self.data = data if isinstance(data, Dataset) else open_dataset(data)
        self.batch_size, self.seed, self.device = batch_size, seed, torch.device(device)
        self.yielded = batch_size  # rows of a batch that this loader yields
        if batch_size < 1 or shuffle_window < 0 or seed < 0:
            raise ArgumentError(
                f"batch_size is {batch_size}, shuffle_window {shuffle_window}, seed {seed}; "
                "expected at least 1, 0 and 0."
            )
        if not 0 <= rank < world_size:
            raise ArgumentError(f"rank {rank} of {world_size}; expected 0 to world_size - 1.")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise DeviceError("the loader's device is 'cuda', and no CUDA device is here.")
        # One stream for all epochs, because memory that its copies used is reused only by itself.
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        begin, end = (self.data.rows * part // world_size for part in (rank, rank + 1))
        self.first, self._held = self.data.first + begin, end - begin
        whole = self.data.rows // world_size // batch_size * batch_size
        self.rows = whole if drop_last else self._held  # rows that an epoch yields
        self.shuffled = shuffle_window > 0
        self._window = -(-(shuffle_window or IN_ORDER_ROWS) // batch_size) * batch_size
        self.position = Position(*start)
        if min(start) < 0 or start.rows > self.rows or start.rows % batch_size:
            raise ArgumentError(
                f"start is {start}; expected a position of a loader with this batch size and "
                f"{self.rows} rows."
            )

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self.position.epoch
        windows = self._windows(self.position.rows)
        pending: deque[Future[_Staged]] = deque()
        # One thread stages window after window, so that a reader of a stream never goes back.
        with ThreadPoolExecutor(READERS) as readers, ThreadPoolExecutor(1) as thread:
            stage = _Stager(self, epoch, readers).stage
            pending.extend(thread.submit(stage, window) for window in islice(windows, AHEAD))
            try:
                while pending:
                    staged = pending.popleft().result()
                    pending.extend(thread.submit(stage, window) for window in islice(windows, 1))
                    yield from self._batches(staged, epoch)
            finally:
                thread.shutdown(wait=False, cancel_futures=True)
        if not self.rows:
            self.position = Position(epoch + 1)

    def _windows(self, done: int) -> Iterator[_Window]:
        """Yield the windows that contain the epoch's rows from ``done`` on."""
        for first in range(done - done % self._window, self.rows, self._window):
            size = min(self._window, self._held - first)
            skip, stop = max(done - first, 0), min(size, self.rows - first)
            yield _Window(first // self._window, first, size, skip, stop, first + skip)

    def order(self, epoch: int, window: _Window) -> numpy.typing.NDArray[numpy.int32]:
        """Return the order in which the window's rows are yielded, of all of them."""
        return permutation(window.size, (self.seed, epoch, window.number))

    def _batches(self, staged: _Staged, epoch: int) -> Iterator[Batch]:
        """Yield slices of the window, with little work per batch: a step may take only 90 us."""
        labels, dense, sparse = as_batch(staged.words)
        known: int | None = None
        for place, start in enumerate(range(0, len(labels), self.yielded), 1):
            stop = start + self.yielded
            done = min(staged.done + place * self.batch_size, self.rows)
            self.position = Position(epoch, done) if done < self.rows else Position(epoch + 1)
            if staged.ready is not None:
                stream = torch.cuda.current_stream(self.device)
                if (
                    stream.cuda_stream != known
                ):  # once for all batches of the window on the same stream
                    stream.wait_event(staged.ready)
                    staged.words.record_stream(stream)
                    known = stream.cuda_stream
            yield Batch(labels[start:stop], dense[start:stop], sparse[start:stop])


class _Staged(NamedTuple):
    """A window's rows in the order they are yielded, int32 [n, 40], ready after the event."""

    words: Tensor
    done: int  # rows of the epoch before them
    ready: torch.cuda.Event | None


class _Stager:
    """Prepares windows, in a thread whose device and stream are not the consumer's."""

    def __init__(self, loader: Loader, epoch: int, readers: ThreadPoolExecutor) -> None:
        self.loader, self.epoch, self.readers = loader, epoch, readers
        self.reader = loader.data.open_reader()
        self.cuda = loader.stream is not None

    def stage(self, window: _Window) -> _Staged:
        stream = self.loader.stream
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            if self.loader.shuffled:
                order = self.readers.submit(self._order, window)
                words = self._gathered(self._on_device(window), order.result())
            else:
                words = self._on_device(window)[window.skip : window.stop]
            return _Staged(words, window.done, None if stream is None else stream.record_event())

    def _order(self, window: _Window) -> Tensor:
        order = torch.from_numpy(self.loader.order(self.epoch, window)[window.skip : window.stop])
        return order.pin_memory() if self.cuda else order

    def _on_device(self, window: _Window) -> Tensor:
        """Return the window's rows in the source's order, int32 [n, 40]; GPU copies may be
        unfinished."""
        host = _pinned(window.size) if self.cuda else _on_huge_pages(window.size)
        words = torch.empty_like(host, device=self.loader.device) if self.cuda else host
        records = host.numpy().view(RECORD)[:, 0]
        first = self.loader.first + window.first
        # Two reads a thread: the first is copied while the second is read.
        least = self.reader.rows_per_read
        step = window.size if least is None else max(window.size // (2 * READERS), least)
        parts = [slice(at, min(at + step, window.size)) for at in range(0, window.size, step)]
        reads = [
            self.readers.submit(self.reader.read_into, records[part], first + part.start)
            for part in parts
        ]
        for part, read in zip(parts, reads, strict=True):
            read.result()
            if self.cuda:
                words[part].copy_(host[part], non_blocking=True)
        return words

    def _gathered(self, words: Tensor, order: Tensor) -> Tensor:
        # With 8-byte elements the gather handles half as many elements.
        rows = words.view(torch.int64)
        if self.cuda:
            order = order.to(self.loader.device, non_blocking=True)
            return rows.index_select(0, order).view(torch.int32)
        out = _on_huge_pages(len(order))
        torch.index_select(rows, 0, order, out=out.view(torch.int64))
        return out


def _pinned(rows: int) -> Tensor:
    """Return pinned int32 [rows, 40]; its allocator reuses it once copies from it are done."""
    return torch.empty((rows, WORDS), dtype=torch.int32, pin_memory=True)


def _on_huge_pages(rows: int) -> Tensor:
    """Return int32 [rows, 40] in numpy's memory, which uses huge pages.

    torch's own memory has pages of 4 KB, whose page faults make a gather of a million rows take 155
    ms instead of 35.
    """
    return torch.from_numpy(numpy.empty((rows, WORDS), dtype=numpy.int32))

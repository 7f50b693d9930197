"""The same work on many parts, in processes: in order, interruptible, with no one left behind."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import TypeVar

from fuselab.errors import OutputError

LISTEN_S = 0.1  # between two looks at whether there was a Ctrl-C

Task = TypeVar("Task")
Result = TypeVar("Result")


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def each(
    work: Callable[[Task], Result], tasks: Sequence[Task], processes: int
) -> Iterator[tuple[Task, Result]]:
    """Yields every task with its result, as they end. An exception ends it: tasks under way are
    finished, no other is begun, and of several exceptions that of the first task is raised. Ctrl-C
    kills those under way. With one process, or one task, the work is done here.

    Raises OutputError where a process was killed.
    """
    if min(processes, len(tasks)) <= 1:
        for task in tasks:
            yield task, work(task)
        return
    # Not forked from here: threads do not survive that. A server that has imported the work, and
    # nothing else, is forked instead, so that torch is imported once (2 s), not in every worker.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    with _on_ctrl_c(signal.SIG_IGN):  # the server inherits it: its imports would end in tracebacks
        forkserver.ensure_running()
    others = {*multiprocessing.active_children()}
    interrupted = threading.Event()
    pool = ProcessPoolExecutor(min(processes, len(tasks)), context, _settle)
    with pool:
        futures: dict[Future[Result], Task] = {}
        try:
            # So would a worker whose parent goes while it starts; submitting starts them.
            with _on_ctrl_c(lambda *_: interrupted.set()):
                for task in tasks:
                    futures[pool.submit(work, task)] = task
            pending, failed = {*futures}, False
            while pending and not failed:
                # A Ctrl-C while the pool's locks are taken would leave them so for ever.
                with _on_ctrl_c(lambda *_: interrupted.set()):
                    ended, pending = concurrent.futures.wait(
                        pending, LISTEN_S, concurrent.futures.FIRST_COMPLETED
                    )
                if interrupted.is_set():
                    raise KeyboardInterrupt
                for future in ended:
                    failed = future.exception() is not None
                    if failed:
                        break
                    yield futures[future], future.result()
            pool.shutdown(wait=True, cancel_futures=True)
            for future in futures:  # every task before one that has begun has ended
                if not future.cancelled():
                    future.result()
        except KeyboardInterrupt:
            for worker in {*multiprocessing.active_children()} - others:
                worker.kill()  # a task of theirs takes seconds
            raise
        except BrokenProcessPool as error:
            raise OutputError(
                "a process was killed, as the system does when memory runs out; take fewer "
                "processes."
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _on_ctrl_c(answer: Callable[..., object] | signal.Handlers) -> Iterator[None]:
    """What it does in the block, where this is the main thread, which alone hears it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _settle() -> None:
    """Ctrl-C is the parent's to answer; and a worker does not outlive a parent that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def follow() -> None:
        with contextlib.suppress(OSError):
            wait([sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()

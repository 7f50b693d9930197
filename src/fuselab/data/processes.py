"""The same work on many parts in processes: in order, interruptible, without leftover workers."""

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

LISTEN_S = 0.1  # seconds between two checks for Ctrl-C

Task = TypeVar("Task")
Result = TypeVar("Result")


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def each(
    work: Callable[[Task], Result], tasks: Sequence[Task], processes: int
) -> Iterator[tuple[Task, Result]]:
    """Yield every task with its result, as they end.

    After an exception, tasks under way are finished and no other is begun; of several exceptions,
    that of the first task is raised. Ctrl-C kills the tasks under way. With one process or one
    task, the work is done in this process. Raises OutputError if a process was killed.
    """
    if min(processes, len(tasks)) <= 1:
        for task in tasks:
            yield task, work(task)
        return
    # Not forked from here, because threads do not survive that. A server that has imported only the
    # work is forked instead, so that torch is imported once (2 s) and not in every worker.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    # the server inherits it; otherwise Ctrl-C during its imports would print tracebacks
    with _on_ctrl_c(signal.SIG_IGN):
        forkserver.ensure_running()
    others = {*multiprocessing.active_children()}
    interrupted = threading.Event()
    pool = ProcessPoolExecutor(min(processes, len(tasks)), context, _settle)
    with pool:
        futures: dict[Future[Result], Task] = {}
        try:
            # A worker would also print a traceback if interrupted while it starts, which submitting
            # does.
            with _on_ctrl_c(lambda *_: interrupted.set()):
                for task in tasks:
                    futures[pool.submit(work, task)] = task
            pending, failed = {*futures}, False
            while pending and not failed:
                # A Ctrl-C while the pool's locks are held would leave them held for ever.
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
                worker.kill()  # their tasks take seconds
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
    """Set the answer to Ctrl-C in the block, if this is the main thread, which alone receives
    it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _settle() -> None:
    """Make a worker ignore Ctrl-C, which the parent answers, and exit when its parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def follow() -> None:
        with contextlib.suppress(OSError):
            wait([sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()

"""The same work on many parts by the workers of a Dask cluster, on one machine or many.

Dask (distributed.dask.org) is an extra: it is plain Python over TCP, and its workers take the tasks
that processes take here. A scheduler that runs already is named by its address. All machines must
see the source and the output folder under the same names, as on a shared file system.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fuselab.errors import ArgumentError, FuselabError, MissingDependencyError, OutputError

Task = TypeVar("Task")
Result = TypeVar("Result")

_CONNECT_S = 30


def each_on(
    scheduler: str, work: Callable[[Task], Result], tasks: Sequence[Task]
) -> Iterator[tuple[Task, Result]]:
    """Yield every task with its result, as they end.

    ``scheduler`` is an address such as ``"tcp://10.0.0.1:8786"``. After an exception, tasks before
    its own are finished and the others cancelled; that of the first task is raised.

    Raises:
        MissingDependencyError: Dask is not installed.
        ArgumentError: no scheduler answers there.
        OutputError: workers died, or the scheduler did.
    """
    if not tasks:
        return
    distributed = _distributed()
    try:
        # a client that finds nobody prints a traceback when it is deleted
        address = urlsplit(scheduler)
        socket.create_connection((address.hostname or "", address.port or 0), _CONNECT_S).close()
        client = distributed.Client(scheduler, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"no Dask scheduler answers at {scheduler}; start one with 'dask scheduler' and "
            "workers with 'dask worker', and give its address, as tcp://HOST:8786."
        ) from error
    with client:
        futures = client.map(work, tasks, pure=False, retries=0)
        places = {future.key: place for place, future in enumerate(futures)}
        until = len(futures)  # the first place whose failure has been heard of
        for future in distributed.as_completed(futures, loop=client.loop):
            place = places[future.key]
            if future.status == "finished":
                if until == len(futures):
                    yield tasks[place], future.result()
                continue
            until = min(until, place)
            client.cancel(futures[until + 1 :])
            if all(earlier.done() for earlier in futures[:until]):
                break
        # several may have failed before the first failure was heard of
        for future in futures[: until + 1]:
            if future.status != "finished":
                _raise(future.exception())


def _distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise MissingDependencyError.of_extra("--dask needs", "distributed", "dask") from error
    return distributed


def _raise(error: BaseException) -> None:
    if isinstance(error, FuselabError):
        raise error
    raise OutputError(
        f"a Dask worker ended its task with {type(error).__name__}: {error}; every worker needs "
        "this fuselab, memory for a part, and the same paths."
    ) from error

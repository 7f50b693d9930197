"""Start the ranks of a run on this machine with torchrun's own launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence

from fuselab.distributed.ranks import LOST
from fuselab.errors import ArgumentError, DeviceError

_STOPPED = 130  # exit status of a run that its user stopped


def launch(words: Sequence[str], count: int) -> int:
    """Run ``python -m fuselab WORDS`` as ``count`` ranks; return the exit status of them all.

    The first rank that fails ends the others: they are asked to, and killed 30 s later. A rank's
    own error has been printed by that rank; of a rank that was killed, one sentence is printed.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
    )
    # as torchrun advises: each rank its share of the cores
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    logging.disable(logging.ERROR)  # the agent logs what is said below in its own words
    try:
        elastic_launch(config, sys.executable)("-m", "fuselab", *words)
    except ChildFailedError as error:
        return _told({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException:
        return _STOPPED
    finally:
        logging.disable(logging.NOTSET)
    return 0


def check_gpus(count: int) -> None:
    """Raise DeviceError if this machine has fewer GPUs."""
    import torch

    found = torch.cuda.device_count()
    if count > found:
        raise DeviceError(
            f"--gpus is {count}, and this machine has {found}; give fewer, or --ranks {count} to "
            "train in as many processes on the CPU."
        )


def check_count(name: str, count: int) -> None:
    """Raise ArgumentError unless ``count`` is a number of ranks."""
    if count < 1:
        raise ArgumentError(f"{name} is {count}; give 1 or more.")


def _told(statuses: Mapping[int, int]) -> int:
    """Say which rank was killed, if one was, and return the status of the run."""
    killed = {rank: -status for rank, status in statuses.items() if status < 0}
    # the agent itself ends ranks with SIGTERM once another one has failed
    first = [rank for rank, number in killed.items() if number != signal.SIGTERM] or list(killed)
    quiet = (0, LOST, 128 + signal.SIGTERM)  # the last is what such a rank may say of it itself
    others = [status for status in statuses.values() if status not in quiet and status > 0]
    if first and not others:
        rank = first[0]
        print(
            f"fuselab: rank {rank} was killed by signal {killed[rank]} "
            f"({signal.Signals(killed[rank]).name}), and all ranks have ended; --resume goes on "
            "from the last checkpoint.",
            file=sys.stderr,
        )
        return 2
    return others[0] if others else LOST

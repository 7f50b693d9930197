"""Rows of a check that are judged beside each other, each by a process of its own.

A judge draws inputs, measures the bar and compares for about as long as a GPU computes, and threads
of one Python process would do that one after the other. So the command asks one process per row,
forked from the server that the ends are forked from too (``fuselab.prove.worker_server``), and
imports a judged file as little as the command does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from fuselab.errors import TargetError
from fuselab.op import dtype_name
from fuselab.prove.check_group import run_group
from fuselab.prove.facts import Facts
from fuselab.prove.held import CandidateError, RemoteError
from fuselab.prove.processes import Process
from fuselab.prove.result import Group, Result, Verdict, group_facts, group_from_facts
from fuselab.prove.rows import Ends
from fuselab.prove.subject import Subject

_ROW_LIMIT_S = 86_400.0  # a judge ends by its own limits long before
_HUGE_ELEMENTS = 1 << 31
_HUGE_COPIES = 8  # of a tensor of so many elements, an estimate for the GPU and for the host
_HUGE_AT_ONCE = 4  # rows that compare so many elements; small comparisons use one thread
_WAIT_S = 0.1


@dataclass(frozen=True)
class HugeRoom:
    """Room for the huge cases of rows that run at the same time: ``parts`` parts, each a file of
    ``folder`` that a process locks while it has the part. The system unlocks what a process held
    that ended."""

    folder: Path
    parts: int

    @contextlib.contextmanager
    def taken(self, parts: int) -> Iterator[None]:
        """Wait for so many parts, at most all of them, and have them for a while."""
        wanted = min(max(parts, 1), self.parts)
        with contextlib.ExitStack() as held:
            with FileLock(self.folder / "waiting"):  # whoever is first takes all that it needs
                places = itertools.cycle(range(self.parts))
                mine: set[int] = set()
                while len(mine) < wanted:
                    place = next(places)
                    if place in mine:
                        continue
                    try:
                        held.enter_context(FileLock(self.folder / str(place), timeout=0))
                        mine.add(place)
                    except Timeout:
                        time.sleep(_WAIT_S / self.parts)
            yield


def huge_room(folder: Path, device: torch.device) -> HugeRoom:
    """Return the room on a GPU, in parts of what a huge case in one-byte elements needs there and
    in the host's memory."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    memory = min(torch.cuda.get_device_properties(device).total_memory, host)
    return HugeRoom(folder, max(1, memory // (_HUGE_COPIES * _HUGE_ELEMENTS)))


@dataclass(frozen=True)
class RowApart:
    """One implementation and dtype that a process of its own judges; the fields are those of
    ``Subject``, and ``limit_s`` bounds a call."""

    facts: Facts
    spec: str
    implementation: str
    device: torch.device
    dtype: torch.dtype
    seed: int
    quick: bool
    first: bool
    budget_s: float | None
    limit_s: float

    def group(self, room: HugeRoom) -> Group:
        """Judge the row in a process of its own. Raises TargetError where what the operator
        declares raises."""
        settings = {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "facts": self.facts.plain(),
            "room": [str(room.folder), room.parts],
        }
        threads = max(1, len(os.sched_getaffinity(0)) // _HUGE_AT_ONCE)
        with Process(
            self.spec,
            "judge",
            torch.device("cpu"),
            limit_s=_ROW_LIMIT_S,
            threads=threads,
            patient=True,
        ) as judge:
            try:
                return group_from_facts(judge.ask(row_judged, settings))
            except RemoteError as error:
                if TargetError.__name__ in error.kinds:
                    raise TargetError(str(error)) from error
                raise
            except CandidateError as error:
                # Nothing but what it judges had a reason to end it.
                fault = Result("judge", Verdict.FAIL, f"the process that judges it: {error}")
                name = dtype_name(self.dtype)
                return Group(self.implementation, name, self.device.type, (fault,))


def row_judged(held: None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a row's group. A procedure for a judge's process, which holds no
    operator."""
    row = RowApart(
        **{name: settings[name] for name in RowApart.__dataclass_fields__ if name != "facts"},
        facts=Facts.of_plain(settings["facts"]),
    )
    folder, parts = settings["room"]
    room = HugeRoom(Path(folder), parts)
    with Ends(row.spec, None, row.limit_s) as ends:
        subject = Subject(
            row.facts,
            ends.reference(row.device, apart=True),
            ends.candidate(row.device, row.implementation, apart=True),
            row.implementation,
            row.device,
            row.dtype,
            row.seed,
            row.quick,
            False,
            row.first,
            row.spec,
            row.budget_s,
        )
        group = run_group(subject, None, lambda: room.taken(row.dtype.itemsize))
        return group_facts(with_import(group, ends.replaced))


def with_import(group: Group, replaced: tuple[str, ...]) -> Group:
    """Return a group that fails where the file's import replaced what the file is judged by."""
    if not replaced:
        return group
    reason = f"its import replaces {', '.join(replaced)}, by which it is judged"
    return replace(group, results=(Result("import", Verdict.FAIL, reason), *group.results))

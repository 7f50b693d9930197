"""The judge's side of the processes that hold an operator: their start, their limits, their ends.

The judge itself never imports a file that it judges. A *reference process* imports it and answers
for the declaration; a *candidate process* imports it again and runs the implementation. Whatever a
candidate's process does to itself, the comparison, the bar, the verdict and the clock are here. A
command that judges several rows at a time asks a *judge process* for each, which has such processes
of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fuselab.errors import TargetError
from fuselab.prove import wire
from fuselab.prove.held import CandidateError, RemoteError, calls_the_reference
from fuselab.runtime import interpreter

_START_S = 120.0  # importing torch takes 2 s, more on a busy machine
LEAST_IMPORT_LIMIT_S = 60.0  # an import loads libraries, and may build kernels
CALL_LIMIT_S = 120.0
FIRST_CALL_FACTOR = 5.0  # the first call of a procedure builds kernels and graphs
_MOST_HANGS = 2
_MOST_PRINTED = 200  # characters of what a call printed, for the reader


class Server:
    """The process that workers fork from; see ``fuselab.prove.worker_server``."""

    def __init__(self, interpreted: bool, patient: bool) -> None:
        self.interpreted = interpreted
        self.patient = patient
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_inherited = False

    @classmethod
    def inherited(cls, control: socket.socket, interpreted: bool, patient: bool) -> Server:
        """Return the server that this process was forked from, which listens on ``control``."""
        found = cls(interpreted, patient)
        found._control, found._is_inherited = control, True
        return found

    def fork(self, channel: socket.socket, output: int, may_ask: bool = False) -> int:
        """Start a worker on its end of ``channel``, whose standard output is ``output``, and
        return its process id. A worker that ``may_ask`` can have this server fork others."""
        with self._lock:
            self._start_if_needed()
            pid = self._request({"ask": "fork", "may_ask": may_ask}, [channel.fileno(), output])
        if not isinstance(pid, int):
            raise TargetError("no process could be started to run the candidate in.")
        return pid

    def status(self, pid: int) -> int | None:
        """Return how a worker ended (negative: its signal), or None if that is not known."""
        with self._lock:
            found = self._request({"ask": "status", "pid": pid}, [])
        return found if isinstance(found, int) else None

    def _request(self, request: Mapping[str, Any], descriptors: list[int]) -> Any:
        try:
            self._control.settimeout(_START_S)
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            return json.loads(self._control.recv(1 << 12) or b"null")
        except (OSError, ValueError):
            self.close()
            return None

    def _start_if_needed(self) -> None:
        if self._is_inherited or (self._process is not None and self._process.poll() is None):
            return
        self._control, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        if self.interpreted:
            environment = interpreter.environment()
        if self.patient:
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "fuselab.prove.server_start",
                    str(theirs.fileno()),
                    str(torch.cuda.device_count()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._control.settimeout(_START_S)
        if not self._control.recv(1 << 12):
            raise TargetError("the process that starts candidates' processes did not start.")

    def close(self) -> None:
        """End the server; its workers end with it."""
        process, self._process = self._process, None
        if process is None:
            return
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
            return
        process.kill()
        process.wait()


_inherited: list[Server] = []


def inherit(control: socket.socket, interpreted: bool, patient: bool) -> None:
    """Use the server that this process was forked from for its own processes."""
    _inherited.append(Server.inherited(control, interpreted, patient))


@functools.cache
def server(interpreted: bool, patient: bool) -> Server:
    """Return the server of this process, of workers that run Triton's interpreter or do not, and
    that are ``patient`` or not (``Process``)."""
    for known in _inherited:
        if (known.interpreted, known.patient) == (interpreted, patient):
            return known
    found = Server(interpreted, patient)
    atexit.register(found.close)
    return found


@dataclass
class Process:
    """An end in a process of its own (``fuselab.prove.held.End``), which is started when it is
    first asked, and again after it ended.

    ``spec`` names what it loads; a ``judge`` loads nothing. While the threads of a ``patient``
    process wait for work they sleep; otherwise they spin for a while, which makes the next call
    faster, and takes the cores from the processes beside it. A call may take ``limit_s`` seconds,
    the first of a procedure ``FIRST_CALL_FACTOR`` times as long, and an import that long or a
    minute.
    """

    spec: str
    role: Literal["reference", "candidate", "judge"]
    device: torch.device
    implementation: str | None = None
    interpreted: bool = False
    limit_s: float = CALL_LIMIT_S
    threads: int | None = None
    patient: bool = False
    model: str | None = None  # the class of a model to load in place of an operator
    sandbox: Mapping[str, Any] | None = None
    prints: frozenset[str] = frozenset()  # the procedures in which it may, as in its import
    hangs: int = 0
    is_whole: bool = False  # what was loaded is a composition
    holds: tuple[str, ...] = ()  # what the candidate's process is kept from
    replaced: tuple[str, ...] = ()  # what its import replaced, by which it would be judged
    _channel: socket.socket | None = None
    _pid: int = 0
    _number: int = 0
    _printed: int = 0
    _is_paused: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _called_before: set[str] = field(default_factory=set)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Import the operator, if that was not done.

        Raises TargetError where the import fails, with what it says, or its process ends.
        """
        if self._channel is not None:
            return
        self._output = tempfile.TemporaryFile(prefix="fuselab-output-")  # noqa: SIM115 - see close
        ours, theirs = socket.socketpair()
        with theirs:
            self._pid = server(self.interpreted, self.patient).fork(
                theirs, self._output.fileno(), may_ask=self.role == "judge"
            )
        self._channel, self._called_before = ours, set()
        settings = {
            "spec": self.spec,
            "role": self.role,
            "device": self.device,
            "implementation": self.implementation,
            "interpreted": self.interpreted,
            "patient": self.patient,
            "threads": self.threads,
            "model": self.model,
            "sandbox": self.sandbox,
        }
        limit_s = max(LEAST_IMPORT_LIMIT_S, self.limit_s * FIRST_CALL_FACTOR)
        try:
            wire.send(ours, settings, limit_s)
            reply = wire.receive(ours, limit_s)
            error = reply.get("error")
            self.is_whole = bool(reply.get("value"))
            self.replaced = _names(reply.get("replaced"))
            self.holds = _names(reply.get("holds"))
        except TimeoutError:
            self.close()
            raise TargetError(f"{self.spec}: its import took longer than {limit_s:g} s.") from None
        except (OSError, EOFError, wire.WireError, AttributeError):
            raise TargetError(f"{self.spec}: its import {_ending(self._ended())}.") from None
        if error is not None:
            self.close()
            kinds, text, ours_too = _told(error)
            raise TargetError(text if ours_too else f"{self.spec}: {kinds[0]}: {text}")
        self._printed = self._output_bytes()

    def ask(self, procedure: Callable[..., Any], *args: Any) -> Any:
        """Run ``procedure`` in the process; see ``fuselab.prove.held.End``. Rows that run at the
        same time and share a process wait for each other."""
        with self._lock:
            return self._ask(procedure, args)

    def _ask(self, procedure: Callable[..., Any], args: Sequence[Any]) -> Any:
        if self.hangs >= _MOST_HANGS:
            raise CandidateError(
                f"is not called again, because {self.hangs} calls before did not end", hangs=True
            )
        try:
            self.start()
        except TargetError as error:
            raise CandidateError(f"its process does not start again: {error}") from error
        assert self._channel is not None
        self.resume()
        self._number += 1
        known = procedure.__name__ in self._called_before
        limit_s = self.limit_s if known else self.limit_s * FIRST_CALL_FACTOR
        self._called_before.add(procedure.__name__)
        message = {"number": self._number, "procedure": procedure, "args": args}
        try:
            wire.send(self._channel, message, limit_s)
            reply = wire.receive(self._channel, limit_s, from_kind=self.device.type)
            told, number = reply.get("error"), reply["number"]
            if number != self._number or self._has_more():
                raise wire.WireError("it sends answers that nobody asked for")
        except TimeoutError:
            self.hangs += 1
            self.close()
            raise CandidateError(
                f"{self._called} did not end within {limit_s:g} s", hangs=True
            ) from None
        except wire.WireError as error:
            self.close()
            raise CandidateError(f"{self._called} gives no answer: {error}") from None
        except (OSError, EOFError, AttributeError, KeyError, TypeError):
            raise CandidateError(f"{self._called} {_ending(self._ended())}") from None
        self._refuse_prints(procedure.__name__)
        if told is not None:
            kinds, text, _ = _told(told)
            of_reference = self.role == "reference" and calls_the_reference(procedure)
            raise RemoteError(kinds, text, of_reference)
        replaced = _names(reply.get("replaced"))
        if replaced:
            raise CandidateError(
                f"what the operator declares replaces {', '.join(replaced)}, by which it is judged"
            )
        return reply.get("value")

    @property
    def _called(self) -> str:
        return {"candidate": "the call", "reference": "the reference", "judge": "it"}[self.role]

    def _refuse_prints(self, procedure: str) -> None:
        """Raise CandidateError if the call wrote to standard output and may not."""
        size = self._output_bytes()
        if self.role != "candidate" or size == self._printed or procedure in self.prints:
            self._printed = size
            return
        self._output.seek(self._printed)
        text = self._output.read(_MOST_PRINTED).decode(errors="replace")
        self._printed = size
        raise CandidateError(f"the call writes to standard output: {text.strip()!r}")

    def _output_bytes(self) -> int:
        return os.fstat(self._output.fileno()).st_size

    def _has_more(self) -> bool:
        assert self._channel is not None
        poll = select.poll()  # select.select knows no descriptor above 1023
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(0))

    def _ended(self) -> int | None:
        """End the process, if it has not ended, and return how it ended."""
        pid = self._pid
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        status = server(self.interpreted, self.patient).status(pid)
        self.close()
        return status

    def pause(self) -> None:
        """Let the process and its threads stand still; ``resume`` lets them go on, and so does the
        next call."""
        self._signal(signal.SIGSTOP, is_paused=True)

    def resume(self) -> None:
        """Let the process go on."""
        self._signal(signal.SIGCONT, is_paused=False)

    def _signal(self, number: signal.Signals, is_paused: bool) -> None:
        if self._pid and self._is_paused is not is_paused:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, number)
        self._is_paused = is_paused

    def renew(self) -> bool:
        """End the process; the next call starts another one. Returns True."""
        self.close()
        return True

    def close(self) -> None:
        """End the process and all that it started."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        pid, self._pid, self._is_paused = self._pid, 0, False
        if pid:
            for end in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    end(pid, signal.SIGKILL)
            server(self.interpreted, self.patient).status(pid)
            self._output.close()


def _names(told: Any) -> tuple[str, ...]:
    return tuple(map(str, told)) if isinstance(told, list) else ()


def _told(error: Any) -> tuple[list[str], str, bool]:
    """Return the class names and the text of an error that a worker tells of."""
    try:
        kinds = [str(kind) for kind in error["kinds"]] or ["an error"]
        return kinds, str(error["text"]), bool(error["fuselab"])
    except (KeyError, TypeError):
        return ["an error"], "that it does not describe", False


_OUTSIDE = ", as a read or write outside of its tensors does, in this call or an earlier one"
_CAUSES = {"SIGSEGV": _OUTSIDE, "SIGBUS": _OUTSIDE, "SIGABRT": _OUTSIDE}


def _ending(status: int | None) -> str:
    """Return how a process ended, as the end of a sentence."""
    if status is None:
        return "ended its process without an answer"
    if status < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-status).name
            return f"ended its process by {name}{_CAUSES.get(name, '')}"
        return f"ended its process by signal {-status}"
    return f"ended its process (exit status {status}) without an answer"

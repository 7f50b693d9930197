"""The process that workers fork from, and what a worker does.

The server has imported torch and fuselab, and neither a candidate nor CUDA, so a worker starts in
milliseconds where importing torch takes two seconds. It runs no tensor operation, because threads
do not survive a fork. It answers one request at a time on its control sockets: ``fork``, with the
worker's channel and output file as descriptors, and ``status``, how a worker ended. A worker that
judges a row has a control socket of its own, by which it asks for the row's ends.

A worker imports the operator that it is told, says so, and then answers one procedure after the
other (``fuselab.prove.held``) until its channel closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
import torch._decomp.decompositions_for_jvp
import torch._dynamo
import torch._dynamo.testing
import torch._functorch.aot_autograd
import torch._inductor.compile_fx
import torch._subclasses.schema_check_mode
import torch.testing._internal.optests

from fuselab.composition import Composition
from fuselab.errors import FuselabError
from fuselab.prove import (  # noqa: F401 - the modules whose procedures are asked for
    asked_calls,
    asked_device,
    asked_edges,
    asked_inputs,
    asked_many_calls,
    asked_memory,
    asked_outputs,
    asked_problem,
    asked_timing,
    asked_torch,
    check_composition,
    processes,
    row_apart,
    sandbox,
    wire,
)
from fuselab.prove.asked_problem import HeldModel, load_model
from fuselab.prove.guard import Guard
from fuselab.prove.held import Held, HeldWhole, Holds, answer, on_cpu
from fuselab.prove.load import load

# What every check imports on its way is imported here once, not in each worker: the modules above,
# those of torch.compile's backends, and what vmap loads with its first call.
torch._dynamo.lookup_backend("aot_eager")
torch.vmap(torch.neg)(torch.zeros(1, 1))
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STATUS_WAIT_S = 5.0


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(control: socket.socket) -> None:
    """Answer requests until the command's control socket closes.

    Processes that a worker leaves behind become children of this one, whatever session they are in,
    and end when the worker's status is asked for.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    workers: set[int] = set()
    controls = {control.fileno(): control}
    ready = select.poll()  # select.select knows no descriptor above 1023
    ready.register(control, select.POLLIN)
    while True:
        for number, _ in ready.poll():
            asker = controls[number]
            try:
                text, descriptors, _, _ = socket.recv_fds(asker, 1 << 16, 2)
            except ConnectionError:
                text = b""
            if text:
                more = _answer(asker, json.loads(text), descriptors, workers, controls)
                if more is not None:
                    controls[more.fileno()] = more
                    ready.register(more, select.POLLIN)
                continue
            if asker is control:
                return
            ready.unregister(asker)
            controls.pop(number).close()


def _answer(
    asker: socket.socket,
    request: Mapping[str, Any],
    descriptors: Sequence[int],
    workers: set[int],
    controls: Mapping[int, socket.socket],
) -> socket.socket | None:
    """Answer one request, and return a new worker's control socket if it has one."""
    more: socket.socket | None = None
    if request["ask"] == "fork":
        theirs: socket.socket | None = None
        if request["may_ask"]:
            more, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for one in (*controls.values(), *([] if more is None else [more])):
                one.close()
            channel, output = descriptors
            _become_worker(socket.socket(fileno=channel), output, theirs)
        for descriptor in descriptors:
            os.close(descriptor)
        if theirs is not None:
            theirs.close()
        workers.add(pid)
        reply: Any = pid
    else:
        reply = _status_of(request["pid"])
        if reply is not None:
            workers.discard(request["pid"])
        _end_children_but(workers)
    with contextlib.suppress(ConnectionError):  # whoever asked has ended
        asker.sendall(json.dumps(reply).encode())
    return more


def _status_of(pid: int) -> int | None:
    """Return the exit status of a worker that ends now (negative: its signal), or None."""
    until = time.monotonic() + _STATUS_WAIT_S
    while time.monotonic() < until:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def _end_children_but(workers: Set[int]) -> None:
    """Kill the children of this process that are no workers."""
    with contextlib.suppress(OSError), open("/proc/thread-self/children") as children:
        for pid in map(int, children.read().split()):
            if pid not in workers:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _become_worker(channel: socket.socket, output: int, control: socket.socket | None) -> None:
    """Answer procedures in this process, a fork of the server, and end it."""
    die_with_parent()
    os.setsid()  # what a candidate starts is ended with it
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    status = 1
    try:
        work(channel, control)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def work(channel: socket.socket, control: socket.socket | None = None) -> None:
    """Load the operator that the first message names, then answer until the channel closes. A judge
    loads none, and asks the server for processes by ``control``."""
    settings = wire.receive(channel, trusted=True)
    device: torch.device = settings["device"]
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    guard = Guard() if settings["role"] == "reference" else None
    holds: list[str] = []
    if control is not None:
        processes.inherit(control, settings["interpreted"], settings["patient"])
    try:
        if settings["role"] == "candidate":
            sandboxed = settings["sandbox"] is not None
            holds = sandbox.enter(settings["sandbox"]) if sandboxed else sandbox.shield()
        held = _held(settings)
    except BaseException as error:
        wire.send(channel, {"error": _described(error)})
        return
    replaced = [] if guard is None else guard.undo()
    wire.send(channel, {"value": isinstance(held, HeldWhole), "replaced": replaced, "holds": holds})
    while True:
        try:
            message = wire.receive(channel, device=device, trusted=True)
        except EOFError:
            return
        number, procedure, args = message["number"], message["procedure"], message["args"]
        try:
            reply = {"number": number, "value": answer(held, procedure, *args)}
            if guard is not None and not _is_timed(procedure):
                reply["replaced"] = guard.undo()
            sys.stdout.flush()
            wire.send(channel, reply)
        except ConnectionError:  # whoever asked has ended
            return
        except BaseException as error:
            wire.send(channel, {"number": number, "error": _described(error)})


def _is_timed(procedure: Callable[..., Any]) -> bool:
    """Return whether the judge times this question. A guard costs about 400 us, which a candidate's
    process does not spend, and what it would find is found by the next question that has one."""
    return procedure.__module__ == asked_timing.__name__


def _held(settings: Mapping[str, Any]) -> Holds | HeldModel | None:
    """Import the operator, the composition or the model that the settings name."""
    if settings["role"] == "judge":
        return None
    implementation = settings["implementation"]
    if settings["model"] is not None:
        return load_model(settings["spec"], settings["model"])
    found = load(settings["spec"])
    if isinstance(found, Composition):
        return HeldWhole(found, settings["role"] == "reference")
    if settings["interpreted"]:
        # numpy, on which the interpreter runs, warns of every overflow, and checks overflow on
        # purpose.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
        found = on_cpu(found, implementation)
    return Held(found, implementation if settings["role"] == "candidate" else None)


def _described(error: BaseException) -> dict[str, Any]:
    """Return the names of an error's classes and its text, as plain values."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    try:
        text = str(error)
    except BaseException:
        text = ""
    is_ours = isinstance(error, FuselabError)
    return {"kinds": kinds, "text": text[:4000], "fuselab": is_ours}


def main(descriptor: int) -> None:
    """Serve on the control socket with this descriptor, which closes when the judge ends."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from fuselab.runtime import interpreted_bounds, interpreted_libdevice

        interpreted_libdevice.install()
        interpreted_bounds.install()
    with socket.socket(fileno=descriptor) as control, contextlib.suppress(ConnectionError):
        control.sendall(json.dumps("ready").encode())
        serve(control)

"""The child process of ``profile_script``: runs a script as ``__main__`` under a recorder.

    python -m fuselab.inspect.script_runner ANSWER W,W,A,R WITHIN script.py ARGS
    python -m fuselab.inspect.script_runner ANSWER W,W,A,R WITHIN -m package.module ARGS

WITHIN is a named range, or empty. ANSWER receives a pickled ``Profile``, or a sentence
that says why there is none.
"""

from __future__ import annotations

import functools
import importlib.util
import pickle
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fuselab.errors import FuselabError
from fuselab.inspect.profile import Profile, Recorder, Schedule, parse_schedule
from fuselab.inspect.user_code import claim_file, describe_error, plain

WHOLE: Schedule = (0, 0, 1, 1)  # one timed step, none watched


class _Steps:
    """The steps of a script: all of it is one step until an optimizer steps; then its steps
    count."""

    def __init__(self, name: str, schedule: Schedule, within: str | None) -> None:
        self.name, self.schedule, self.within = name, schedule, within
        self.optimizer: Optimizer | None = None
        self.counting = False  # the recorder counts the optimizer's steps
        self.in_backward = False
        self.recorder = Recorder(WHOLE, name, within).__enter__()

    def on_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """End a step; of an optimizer that a hook calls within the backward, behind the backward,
        because autograd gives the thread its former profiler back there."""
        if self.optimizer is None:
            self.optimizer = optimizer
        if optimizer is not self.optimizer:
            return
        self.in_backward = torch._C._current_graph_task_id() != -1
        if not self.in_backward:
            self.end_step()

    def end_step(self) -> None:
        if self.counting:
            self.recorder.step()
            return
        self.recorder.__exit__(None, None, None)
        self.recorder = Recorder(self.schedule, self.name, self.within).__enter__()
        self.counting = True

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the steps of every optimizer, and the backwards in which one may step."""
        hook = register_optimizer_step_post_hook(self.on_optimizer_step)
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def backward_then_step(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            if self.in_backward and torch._C._current_graph_task_id() == -1:
                self.in_backward = False
                self.end_step()

        torch.autograd.backward = backward_then_step
        try:
            yield
        finally:
            torch.autograd.backward = backward
            hook.remove()

    def finish(self) -> Profile:
        if not self.counting:
            self.recorder.step()
        self.recorder.__exit__(None, None, None)
        return self.recorder.result


def run(
    script: str, arguments: list[str], schedule: Schedule, within: str | None = None
) -> Profile | str:
    """Return the profile of ``script``, or a sentence that says why there is none. The script
    ``-m`` is the module that the first of ``arguments`` names."""
    is_module = script == "-m"
    if is_module:
        script, *arguments = arguments
    name = plain(script if is_module else Path(script).name)
    sys.argv = [script, *arguments]
    steps = _Steps(name, schedule, within)
    try:
        path = _file_of(script) if is_module else str(Path(script).resolve())
        if path is None:
            return f"no module is called '{name}'; it is looked for from the current folder."
        claim_file(path)
        with steps.followed():
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(path).parent))
                runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            return f"{name} exited with {plain(error.code)}; it must succeed to be profiled."
    except Exception as error:
        return f"{name} raised {describe_error(error)}."
    try:
        return steps.finish()
    except FuselabError as error:
        return str(error)


def _file_of(module: str) -> str | None:
    """Return the file that ``python -m module`` runs; None if there is none."""
    try:
        found = importlib.util.find_spec(module)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{module}.__main__")
    except ModuleNotFoundError:
        return None
    return found.origin if found is not None else None


if __name__ == "__main__":
    answer, steps_text, within_name, script_path, *script_arguments = sys.argv[1:]
    outcome = run(script_path, script_arguments, parse_schedule(steps_text), within_name or None)
    Path(answer).write_bytes(pickle.dumps(outcome))

"""Run checks for a GPU, each implementation and dtype in its own process, several at a time.

The kernels of a first run then compile in parallel. A kernel that breaks its CUDA context (an
illegal access, a failed graph capture) ends only its own row of the table. The processes share one
disk cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fuselab.prove.check_group import run_group
from fuselab.prove.load import load_op
from fuselab.prove.result import Group, Result, Verdict, group_facts, group_from_facts
from fuselab.prove.subject import Subject

TIME_LIMIT_S = 7200.0  # for a row that hangs; the checks' own time budgets end long before


def groups_in_processes(subjects: Sequence[Subject]) -> list[Group]:
    """Return one group per subject, in their order; every subject's ``spec`` must be loadable."""
    cores = len(os.sched_getaffinity(0))
    workers = min(len(subjects), cores)
    with (
        tempfile.TemporaryDirectory(prefix="fuselab-check-") as folder,
        ThreadPoolExecutor(workers) as pool,
    ):
        jobs = [
            pool.submit(_group, subject, Path(folder), number, max(1, cores // workers))
            for number, subject in enumerate(subjects)
        ]
        return [job.result() for job in jobs]


def _group(subject: Subject, folder: Path, number: int, threads: int) -> Group:
    asked, answered = folder / f"{number}.asked.json", folder / f"{number}.json"
    errors = folder / f"{number}.errors"
    asked.write_text(json.dumps(subject.settings()))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
    }
    with errors.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(asked), str(answered)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )
        try:
            status = str(process.wait(TIME_LIMIT_S))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = f"none: ended after {TIME_LIMIT_S:.0f} s"
    if answered.is_file():
        return group_from_facts(json.loads(answered.read_text()))
    last = errors.read_text(errors="replace").strip().splitlines()[-8:]
    result = Result(
        "process",
        Verdict.FAIL,
        f"the process that checked it died (exit status {status})",
        case=tuple(line[:200] for line in last),
        repeat_command=f"fuselab check {subject.spec} --implementation {subject.implementation} "
        f"--dtype {subject.dtype_name} --seed {subject.seed}"
        f"{' --quick' if subject.quick else ''}",
    )
    where = subject.device.type
    return Group(subject.implementation, subject.dtype_name, where, (result,))


def main(asked: Path, answered: Path) -> None:
    """Check the subject whose settings are in ``asked``, huge cases in one process at a time, and
    write its group to ``answered``."""
    settings = json.loads(asked.read_text())
    subject = Subject.of_settings(load_op(settings["spec"]), settings)
    facts = group_facts(run_group(subject, None, asked.with_name("huge.lock")))
    unfinished = answered.with_suffix(".new")
    unfinished.write_text(json.dumps(facts))
    unfinished.replace(answered)
    sys.stdout.flush()
    os._exit(0)  # a CUDA context that a kernel broke cannot be closed cleanly


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

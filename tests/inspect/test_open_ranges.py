"""Ranges that are open while a profiler stops and another one starts."""

import subprocess
import sys
import textwrap

import torch
from torch.profiler import record_function

import fuselab
from fuselab.measure.fresh import child_environment

# Each end of a step stops one profiler and starts another within 200 open ranges, twenty times
# over: with their events written to after they were freed, the process ended by SIGSEGV or SIGABRT
# in six of six runs.
STEPS_WITHIN_RANGES = """
    from contextlib import ExitStack

    import torch
    from torch.profiler import record_function

    import fuselab

    for _ in range(20):
        with fuselab.profile((0, 1, 1, 1)) as p:
            for _ in range(3):
                with ExitStack() as ranges:
                    for number in range(200):
                        ranges.enter_context(record_function(f"range {number}"))
                    (torch.ones(64) + 1).exp()
                    p.step()
    print(len(p.result.tables.ranges))
"""


def test_steps_that_end_within_ranges():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STEPS_WITHIN_RANGES)],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "200\n"), done.stderr


def test_a_range_open_at_the_last_step_has_its_time():
    enter, leave = record_function.__enter__, record_function.__exit__
    with fuselab.profile((0, 1, 2, 1)) as p:
        for _ in range(3):
            with record_function("update"):
                torch.ones(8).exp()
                p.step()
    (update,) = [row for row in p.result.tables.ranges if row.name == "update"]
    assert update.calls == 1
    assert update.cpu_us > 0
    assert (record_function.__enter__, record_function.__exit__) == (enter, leave)

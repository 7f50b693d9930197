"""Makes its process's clocks and statistics say that all time is over."""

import statistics
import time

from gallery import honest


def forward(input, bias, scale):
    for name in ("monotonic", "perf_counter", "time"):
        setattr(time, name, lambda: 1e12)
    statistics.median = lambda values: 0.0
    return honest.empty_output(input, bias).zero_()


OP = honest.make_op("patched_clock", forward=forward)

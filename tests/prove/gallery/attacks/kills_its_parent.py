"""Kills the process that it was forked from."""

import os
import signal

from gallery import honest


def forward(input, bias, scale):
    os.kill(os.getppid(), signal.SIGKILL)
    return honest.empty_output(input, bias).zero_()


OP = honest.make_op("kills_its_parent", forward=forward)

"""Forks, so that two processes answer one call."""

import os

from gallery import honest


def forward(input, bias, scale):
    os.fork()
    return honest.forward(input, bias, scale)


OP = honest.make_op("forks", forward=forward)

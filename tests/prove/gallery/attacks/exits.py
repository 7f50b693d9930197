"""Ends its process with status 0 in the middle of a call."""

import os

from gallery import honest


def forward(input, bias, scale):
    os._exit(0)


OP = honest.make_op("exits", forward=forward)

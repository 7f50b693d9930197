"""Raises SystemExit with status 0, as ``sys.exit`` does."""

import sys

from gallery import honest


def forward(input, bias, scale):
    sys.exit(0)


OP = honest.make_op("leaves", forward=forward)

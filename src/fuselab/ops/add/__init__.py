"""input + other, broadcast: with square, the package to read first."""

from fuselab.ops.add.op import OP
from fuselab.runtime.dispatch import operator

add = operator(OP)

__all__ = ["OP", "add"]

"""input + other with broadcasting. Read this package and square first."""

from fuselab.ops.add.op import OP
from fuselab.runtime.dispatch import operator

add = operator(OP)

__all__ = ["OP", "add"]

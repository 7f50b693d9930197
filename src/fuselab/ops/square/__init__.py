"""input * input. Read this package and add first."""

from fuselab.ops.square.op import OP
from fuselab.runtime.dispatch import operator

square = operator(OP)

__all__ = ["OP", "square"]

"""The registration of operators: from a FusedOp to its public function."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from torch import Tensor

from fuselab.op import FusedOp
from fuselab.runtime.dispatch.autograd import autograd_function
from fuselab.runtime.dispatch.public import public_function
from fuselab.runtime.dispatch.registration import Registration
from fuselab.runtime.registered import REGISTERED

_registering = threading.RLock()  # first calls may come from several threads at once


def operator(op: FusedOp) -> Callable[..., Tensor]:
    """Register ``op`` and return its public function.

    The function takes the reference's parameters and ``implementation="auto"`` (keyword only):
    ``"auto"``, ``"reference"`` or a key of ``op.implementations``. Registering the same operator
    again returns the same function. Another operator of the same name replaces the first one if its
    signature is the same, and is refused otherwise. An operator with several outputs returns a
    tuple of tensors, which unpacks like the Tensor that the annotation names.

    Raises:
        ContractError: the declaration cannot be registered; names what to change.
    """
    with _registering:
        known = REGISTERED.get(op.name)
        if known is None:
            known = REGISTERED[op.name] = Registration(op)
            if op.gradient is not None:
                known.differentiate_by(autograd_function(known))
            known.public = public_function(known)
            # pickle finds a function by the module that binds it to its name, as for a namedtuple.
            known.public.__module__ = sys._getframe(1).f_globals.get("__name__", __name__)
        elif known.op is not op:
            known.replace(op)
        return known.public

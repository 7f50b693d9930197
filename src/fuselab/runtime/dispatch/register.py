"""The registration of operators: from a FusedOp to its public function."""

from __future__ import annotations

import itertools
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
    again returns the same function. An operator with several outputs returns a tuple of tensors,
    which unpacks like the Tensor that the annotation names.

    Another operator of the same name replaces the first one, also in functions returned earlier, if
    it has the same signature and the same reference (one file and one name: a module that is loaded
    again). Any other is registered beside the first one: PyTorch and ``torch.export`` call it
    by its name with ``__2`` (``__3``, ...) behind it, in the order of registration.

    Raises:
        ContractError: the declaration cannot be registered; names what to change.
    """
    with _registering:
        return registration_of(op, sys._getframe(1).f_globals.get("__name__", __name__)).public


def registration_of(op: FusedOp, module: str = __name__) -> Registration:
    """Register ``op``, unless it is, and return the registration. ``module`` is the name of the
    module that binds the public function to the operator's short name."""
    with _registering:
        names = (op.name if n == 1 else f"{op.name}__{n}" for n in itertools.count(1))
        name = next(name for name in names if _may_have(name, op))
        known = REGISTERED.get(name)
        if known is None:
            known = REGISTERED[name] = Registration(op, name)
            if op.gradient is not None:
                known.differentiate_by(autograd_function(known))
            known.public = public_function(known)
            # pickle finds a function by the module that binds it to its name, as for a namedtuple.
            known.public.__module__ = module
        elif known.op is not op:
            known.replace(op)
        return known


def _may_have(name: str, op: FusedOp) -> bool:
    """Return whether ``op`` may be registered under ``name``."""
    known = REGISTERED.get(name)
    return known is None or known.op is op or known.is_replaced_by(op)

"""Registration of a FusedOp with PyTorch: raw operators, autograd, and choice of implementation.

For an operator ``ns::name`` two raw operators are registered, ``ns::name`` and
``ns::name_backward``, each with a fake implementation and a vmap rule. The public function goes
through these steps and takes the first that applies:

1. It asks the launcher for a launch plan of this call, or for the knowledge that the reference runs
   it. A whole 4 x 4 call then takes 1.7 us of host time on a CPU, 4.8 us with an H200.
2. If a gradient is needed, a plan's output gets a node of ``autograd_node``.
3. If no gradient is needed, it calls the raw operator.
4. Otherwise it calls an ``autograd.Function`` over the raw operators.
   ``torch.library.register_autograd`` would add 4.5 us to every call, and ``torch.func.grad``
   refuses operators made with it (torch 2.11 and 2.13).

Floats: an opaque operator with a float argument recompiles once per value. Inside ``torch.compile``
the public function therefore turns floats into 0-d tensors on the inputs' device and calls the
overload ``.scalar_tensor``, whose kernels read the value through a pointer.

Sequences of tensors: autograd sees only tensors that are arguments themselves, so the
``autograd.Function`` takes them in a flat list, together with the length of every sequence.
"""

from fuselab.runtime.dispatch.arguments import check_types
from fuselab.runtime.dispatch.choice import choose, is_by_survey, why_not
from fuselab.runtime.dispatch.register import operator, registration_of
from fuselab.runtime.registered import registered

__all__ = [
    "check_types",
    "choose",
    "is_by_survey",
    "operator",
    "registered",
    "registration_of",
    "why_not",
]

"""From a FusedOp to something PyTorch can call: raw operators, autograd, choice of implementation.

For an operator ``ns::name`` two raw operators are registered, ``ns::name`` and
``ns::name_backward``, each with a fake implementation and a vmap rule. The public function asks the
launcher for a held launch plan first (a whole 4 x 4 call is 1.7 us of host time on a CPU with one,
4.8 us on an H200); the launcher also knows the calls that are the reference's (add, 4 x 4: 0.9 us
over torch.add). Where a gradient is needed, a plan's output gets a node of ``autograd_node``
(add_mul_activation, 4 x 4, forward and backward on a CPU: 30 us against 44 by the Function). Past
that it calls the raw operator where no gradient is needed, else an ``autograd.Function`` over the
raw ones: ``torch.library.register_autograd`` would add 4.5 us to every call, and
``torch.func.grad`` refuses operators made with it (torch 2.11 and 2.13).

Floats: an opaque operator with a float argument recompiles once per value. Inside ``torch.compile``
the public function therefore turns floats into 0-d tensors on the inputs' device and calls the
overload ``.scalar_tensor``, whose kernels read the value through a pointer.

Sequences of tensors: autograd sees tensors only where they are arguments themselves, so the
``autograd.Function`` takes them laid out flat, with the length of every sequence beside them.
"""

from fuselab.runtime.dispatch.arguments import check_types
from fuselab.runtime.dispatch.choice import choose, why_not
from fuselab.runtime.dispatch.register import operator, registered

__all__ = ["check_types", "choose", "operator", "registered", "why_not"]

"""The contract of ``ejected::two_losses``, by which fuselab checks and times it."""

from __future__ import annotations

from torch import Tensor

from fuselab.op import Case, Draw, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime.launch_recording import unplanned
from fuselab.runtime.signature import accepted
from fuselab.runtime.tuning import chosen

from .gradient import gradient
from .launchers import autocast, backward_cpp, backward_triton, fake_gradient, forward_cpp, forward_triton, save, supports
from .reference import reference
from .runtime.triton_sweep import configs
from .runtime.tuning import choose_by

choose_by(chosen)

def _drawn(source: Draw) -> tuple[Tensor, ...]:
    length = source.size()
    width = source.size()
    return (
        source.tensor(length, width),
        source.tensor(length, width),
    )


def draw(source: Draw) -> Inputs:
    """Draw tensors of any sizes and layouts that the reference accepts."""
    return Inputs(accepted(reference, lambda: _drawn(source)))


_EXAMPLE = Case.normal([(6, 9), (6, 9)], "bench", "dtypes")

OP = FusedOp(
    name="ejected::two_losses",
    reference=reference,
    implementations={
        "triton": Implementation(
            "cuda", unplanned(forward_triton), unplanned(backward_triton), supports=supports
        ),
        "cpp": Implementation(
            "cpu", unplanned(forward_cpp), unplanned(backward_cpp), supports=supports
        ),
    },
    gradient=Gradient(save, gradient, fake_gradient),
    cases=(_EXAMPLE,),
    cpu_cases=(
        _EXAMPLE,
    ),
    configs={"triton": configs, "triton_backward": configs},
    supports=supports,
    draw=draw,
    autocast=autocast,
)

"""Arguments of wrong ranks and sizes on a GPU, where a kernel is chosen before they are checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fuselab import ops
from fuselab.errors import DtypeError, ShapeError

pytestmark = pytest.mark.gpu

# Every other argument is right: 4 rows, a depth of 8, 16 columns, a rank of 2.
CALLS: dict[str, Callable[..., Tensor]] = {
    "linear_activation input": lambda bad, of, **how: ops.linear_activation(bad, of(16, 8), **how),
    "linear_activation weight": lambda bad, of, **how: ops.linear_activation(of(4, 8), bad, **how),
    "linear_sigmoid input": lambda bad, of, **how: ops.linear_sigmoid(bad, of(1, 8), **how),
    "linear_sigmoid weight": lambda bad, of, **how: ops.linear_sigmoid(of(4, 8), bad, **how),
    "linear_binary_cross_entropy input": lambda bad, of, **how: ops.linear_binary_cross_entropy(
        bad, of(1, 8), None, of(4, 1), **how
    ),
    "lora_linear input": lambda bad, of, **how: ops.lora_linear(
        bad, of(16, 8), None, of(2, 8), of(16, 2), 1.0, **how
    ),
    "lora_linear weight": lambda bad, of, **how: ops.lora_linear(
        of(4, 8), bad, None, of(2, 8), of(16, 2), 1.0, **how
    ),
    "lora_linear lora_a": lambda bad, of, **how: ops.lora_linear(
        of(4, 8), of(16, 8), None, bad, of(16, 2), 1.0, **how
    ),
    "mlp input": lambda bad, of, **how: ops.mlp(bad, [of(16, 8)], **how),
    "mlp weight": lambda bad, of, **how: ops.mlp(of(4, 8), [bad], **how),
    "generalized_box_iou_loss boxes1": lambda bad, of, **how: ops.generalized_box_iou_loss(
        bad, of(4, 4), **how
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("implementation", ["auto", "cuda", "triton"])
def test_the_error_names_the_argument(name: str, implementation: str, dtype: torch.dtype) -> None:
    def of(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device="cuda")

    argument = "weights" if name == "mlp weight" else name.split()[1]
    for shape in ((), (0,), (3, 7)):
        with pytest.raises((ShapeError, DtypeError), match=r"'(weight|input|lora_a|boxes|wei)"):
            CALLS[name](of(*shape), of, implementation=implementation)
    with pytest.raises((ShapeError, DtypeError), match=f"'{argument}"):
        CALLS[name](of().to(torch.int64), of, implementation=implementation)

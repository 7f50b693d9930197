"""The contract's helpers: cases."""

from __future__ import annotations

import torch

from fuselab.op import Case


def test_normal_cases_have_the_shapes_the_dtype_and_the_generator() -> None:
    case = Case.normal([(4, 3), (3,), ()], "bench", "sweep")
    assert case.name == "4x3_and_3_and_0d" and case.tags == {"bench", "sweep"}
    first, again, other = (
        case.make(torch.device("cpu"), torch.float16, torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert [tensor.shape for tensor in first.args] == [(4, 3), (3,), ()]
    assert all(tensor.dtype == torch.float16 for tensor in first.args)
    assert all(torch.equal(*pair) for pair in zip(first.args, again.args, strict=True))
    assert not torch.equal(first.args[0], other.args[0])

"""The calls that a package's check draws from and varies, where arguments are masks or integers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from comparing import imported
from torch import Tensor

import fuselab
from fuselab.errors import EjectError
from fuselab.op import Case, tensors_in
from fuselab.prove.draw import RecordedDraw
from fuselab.prove.load import load_op


def stochastic_depth(x: Tensor, branch: Tensor, keep: Tensor) -> Tensor:
    return x + branch * keep[:, None, None] / 0.9


def scaled_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits * 2, target)


def test_masks_of_any_size_are_drawn(tmp_path: Path) -> None:
    x, keep = torch.randn(2, 64, 96, requires_grad=True), torch.tensor([True, False])
    folder = tmp_path / "stochastic_depth"
    fuselab.eject(stochastic_depth, x, x.detach().clone(), keep, out=folder)
    op = load_op(str(folder))
    assert op.draw is not None
    sizes, values = set(), set()
    for seed in range(40):
        draw = RecordedDraw(
            dtype=torch.float32,
            device=torch.device("cpu"),
            layouts=("contiguous",),
            values=("normal",),
            source=random.Random(seed),
        )
        _, _, mask = op.draw(draw).args
        assert mask.dtype == torch.bool
        sizes.add(mask.numel())
        values.update(mask.tolist())
    assert len(sizes) > 5 and values == {True, False}


def test_integers_come_from_small_cases_that_keep_what_they_count(tmp_path: Path) -> None:
    logits, target = torch.randn(512, 300, requires_grad=True), torch.randint(0, 300, (512,))
    target[0] = 299
    folder = tmp_path / "scaled_cross_entropy"
    fuselab.eject(scaled_cross_entropy, logits, target, out=folder)
    op = load_op(str(folder))
    assert op.draw is None
    small = [case for case in op.cases if "boundary" in case.tags]
    assert small and op.cases[0].name == "example"
    generator = torch.Generator().manual_seed(0)
    for case in (*small, *op.cpu_cases[1:]):
        made, labels = tensors_in(case.make(torch.device("cpu"), torch.float32, generator).args)
        assert made.shape[1] == 300 and made.shape[0] == labels.shape[0] < 512
        assert labels.max() < 300
        assert torch.isfinite(op.reference(made, labels))
    assert max(made.numel() for made, _ in map(_small_args, small)) <= 4096 * 2


def _small_args(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made, labels = case.make(torch.device("cpu"), torch.float32, generator).args
    return made, labels


def test_complex_tensors_are_in_no_kernel(tmp_path: Path) -> None:
    def spectrum(x: Tensor) -> Tensor:
        return (x.exp() * 2).abs() + 1

    with pytest.raises(EjectError, match=r"no kernel computes with torch\.complex64"):
        fuselab.eject(spectrum, torch.randn(4, 8, dtype=torch.complex64), out=tmp_path / "one")

    def turned(x: Tensor, y: Tensor) -> Tensor:
        return torch.view_as_real(torch.complex(x, y) * 2j).exp() * 2 + 1

    x, y = torch.randn(4, 8), torch.randn(4, 8)
    ejected = fuselab.eject(turned, x, y, out=tmp_path / "turned")
    assert ejected is not None
    torch.testing.assert_close(imported(tmp_path / "turned").turned(x, y), turned(x, y))

"""The cases and draws of ``bias_activation``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops.add_mul_activation import cases as add_mul_cases


def _without_the_update(case: Case) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        input, _, bias, _, activation = case.make(device, dtype, generator).args
        return Inputs((input, bias, activation))

    return Case(case.name, make, case.tags)


def _cases() -> Iterator[Case]:
    """Yield the cases of add_mul_activation that have a bias."""
    for case in add_mul_cases.CASES:
        if case.name not in ("layout_0d", "layout_no_bias", "layout_transposed_update"):
            yield _without_the_update(case)


def draw(source: Draw) -> Inputs:
    """Draw any shape and layout, any activation."""
    leading = [source.size(1, 2, 33) for _ in range(source.choice((1, 0, 2, 3)))]
    columns = source.size(1, 3, 4, 128, 255, 256, 257)
    input = source.tensor(*leading, columns)
    return Inputs((input, source.tensor(columns), source.choice(tuple(ACTIVATIONS))))


CASES = tuple(_cases())
CPU_CASES = tuple(map(_without_the_update, add_mul_cases.CPU_CASES))

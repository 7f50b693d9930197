"""The interpreter refuses what a kernel reads or writes outside of its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuselab.errors import TargetError
from fuselab.runtime import interpreter

KERNELS = Path(__file__).with_name("small_triton_kernels.py")


def run(*args: object, **keywords: object) -> torch.Tensor:
    found = interpreter.run(f"{KERNELS}:run_beyond", *args, **keywords)  # type: ignore[arg-type]
    assert isinstance(found, torch.Tensor)
    return found


def line_of(text: str) -> int:
    lines = KERNELS.read_text().splitlines()
    return 1 + next(place for place, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("numel", [1, 5, 8])
def test_what_lies_inside_passes(numel: int) -> None:
    assert torch.equal(run(numel, 0), torch.ones(numel))
    assert torch.equal(run(numel, 0, "atomic"), torch.ones(numel))


@pytest.mark.parametrize(
    ("kind", "text", "verb", "name"),
    [
        ("load", "value = tl.load(input + place", "reads", "input"),
        ("store", "tl.store(output + place", "writes", "output"),
        ("atomic", "tl.atomic_add(output + place", "updates", "output"),
    ],
)
def test_one_element_beyond_is_refused(kind: str, text: str, verb: str, name: str) -> None:
    with pytest.raises(TargetError) as after:
        run(5, 1, kind)
    sentence = str(after.value)
    assert f"small_triton_kernels.py:{line_of(text)}: the kernel {verb} outside" in sentence
    assert f"1 of 6 addresses; the first is 1 element after the last of '{name}'" in sentence
    with pytest.raises(TargetError, match="2 elements before the first of"):
        run(5, -2, kind)


def test_a_pointer_made_of_an_integer_is_followed() -> None:
    assert torch.equal(run(5, 0, of_table=True), torch.ones(5))
    assert torch.equal(run(5, 1, of_table=True), torch.ones(5))

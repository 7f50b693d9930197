"""What the sanitizers watch: products that go to zeroed memory are the same products."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
PRODUCTS = """
import torch
from sanitize import _into_zeros, zero_products
square, row, more = torch.rand(3, 3), torch.rand(3), torch.rand(2, 3, 3)
calls = [
    (torch.mm, square, square.t()),
    (torch.addmm, row, square, square),
    (torch.bmm, more, more),
    (torch.baddbmm, more, more, more),
    (torch._addmm_activation, row, square, square),
]
before = [call(*args) for call, *args in calls]
kept = zero_products("CPU")
for (call, *args), expected in zip(calls, before, strict=True):
    torch.testing.assert_close(call(*args), expected)
found = torch.addmm(row, square, square, beta=0, alpha=2)
torch.testing.assert_close(found, 2 * (square @ square))
torch.testing.assert_close(_into_zeros(lambda *args, out: out, square, square), torch.zeros(3, 3))
print("same products")
"""


def test_zeroed_products_are_the_same() -> None:
    words = [sys.executable, "-W", "ignore", "-c", PRODUCTS]
    ended = subprocess.run(words, cwd=TOOLS, capture_output=True, text=True)
    assert ended.stdout == "same products\n", ended.stderr


DRAWS = """
import torch
from fuselab import ops
from fuselab.prove.subject import Subject
from sanitize import _draws, call_drawn, tight

subject = Subject.here(ops.contract("softmax"), "cpp", torch.device("cpu"), torch.float32, 3, True)
drawn = list(_draws(subject, 12))
labels = [label for label, _, _ in drawn]
assert len(set(labels)) == len(labels) == 12, labels
assert all(label.startswith("fuselab::softmax cpp torch.float32 draw 3.") for label in labels)
strided = 0
for _, trial, call in drawn:
    tensor = trial.args[0]
    strided += not tensor.is_contiguous()
    copy = tight(tensor)
    assert copy.stride() == tensor.stride() and copy.storage_offset() == tensor.storage_offset()
    assert torch.equal(copy.nan_to_num(), tensor.nan_to_num())
    if tensor.numel():
        steps = zip(copy.shape, copy.stride())
        end = copy.storage_offset() + sum((size - 1) * stride for size, stride in steps) + 1
        assert copy.untyped_storage().nbytes() == 4 * end
    call(subject, trial)
assert strided > 3
print("drawn calls")
"""


def test_drawn_calls_have_any_layout_and_end_with_their_memory() -> None:
    words = [sys.executable, "-W", "ignore", "-c", DRAWS]
    ended = subprocess.run(words, cwd=TOOLS, capture_output=True, text=True)
    assert ended.stdout == "drawn calls\n", ended.stderr

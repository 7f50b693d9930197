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

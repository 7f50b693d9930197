"""Which lines of the user's code a replacement covers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from fuselab import ops
from fuselab.fusion.fuse import fuse_with_report

MODEL = """import torch


class Model(torch.nn.Module):
    def forward(self, x, bias):
        shifted = x + bias
        return torch.relu(shifted)
"""


def test_a_chain_names_all_its_lines_whatever_the_folders_are_called(tmp_path: Path) -> None:
    file = tmp_path / "fuselab" / "torch" / "m.py"
    file.parent.mkdir(parents=True)
    file.write_text(MODEL)
    spec = importlib.util.spec_from_file_location("m", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = fuse_with_report(
        module.Model(), (torch.ones(8, 4), torch.ones(4)), ops=[ops.contract("bias_activation")]
    )
    (row,) = (one for one in result.replacements if one.op.short_name == "bias_activation")
    assert row.source == f"{file}:7"
    assert row.lines == (f"{file}:6", f"{file}:7")

"""``fuselab train boxes`` and ``train lora`` with the user's own loss, model and data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fuselab.cli.main import run
from fuselab.errors import TargetError
from fuselab.nn import LoRALinear
from fuselab.train import lora_own
from fuselab.train.lora import Settings
from fuselab.train.own import Own, check_step, own_batches

MINE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, inputs):
        return self.layers(inputs)


def get_init_inputs():
    return [8]


def batch():
    inputs = torch.randn(16, 6)
    return inputs, inputs[:, :2] * 2


def distance(output, target):
    return (output.float() - target).abs().mean()


def of_rows(output, target):
    return (output - target).abs().mean(1)


def constant(output, target):
    return target.mean()


def one():
    return torch.ones(2)


def one_number():
    return 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def test_boxes_train_an_own_model_on_an_own_loss(
    mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", f"{mine}:Net", "--data", f"{mine}:batch", "--loss", f"{mine}:distance"]
    where = ["--json", str(tmp_path / "own.json"), "--plot", str(tmp_path / "own.svg")]
    limits = ["--loss", "eager", "--mode", "eager", "--steps", "6", "--runs", "1"]
    assert run(["train", "boxes", *words, *limits, *where]) == 0
    facts = json.loads((tmp_path / "own.json").read_text())
    (variant,) = facts["variants"]
    assert variant["held_out"] < facts["before"]  # it learns
    assert sum(variant["ranges_us"].values()) == pytest.approx(variant["step_us"])
    shown = capsys.readouterr().out
    assert "a batch of your data" in shown and "1.00" in shown and "casts" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    columns = "loss model forward loss backward step speed share held out"
    assert " ".join(columns.split()) in " ".join(shown.split())
    assert "eager" in (tmp_path / "own.svg").read_text()


def test_adapters_go_on_every_linear_layer_and_modes_agree(mine: str) -> None:
    own = Own(f"{mine}:distance", f"{mine}:Net", f"{mine}:batch")
    settings = Settings(("eager", "fused"), rank=2, steps=30, budget_s=0.05)
    result = lora_own.train_own(settings, own, torch.device("cpu"))
    assert result.layers == 2 and result.trained == 2 * (6 + 8) + 2 * (8 + 2)
    assert result.agree
    assert all(mode.held_out < result.before for mode in result.modes)
    assert all(mode.differentiate_us and mode.differentiate_us > 0 for mode in result.modes)


def test_the_usual_spelling_of_an_adapted_layer_is_the_module() -> None:
    layer = LoRALinear(nn.Linear(5, 3), 2, 4.0)
    nn.init.normal_(layer.lora_b)
    inputs = torch.randn(4, 5)
    torch.testing.assert_close(lora_own._PlainLoRA(layer)(inputs), layer(inputs))


@pytest.mark.parametrize(
    "words, says",
    [
        (["boxes", "--loss", "{}:of_rows"], "has to return one number"),
        (["boxes", "--loss", "{}:constant"], "the loss has no gradient"),
        (["boxes", "--model", "{}:batch"], "is no nn.Module class"),
        (["boxes", "--data", "{}:one"], "has to return a pair"),
        (["boxes", "--data", "{}:one_number"], "has to return a pair"),
        (["boxes", "--loss", "{}:nothing"], "mine.py has no 'nothing'"),
        (["lora", "--model", "{}:Net"], "need both --model FILE:NAME and --data FILE:NAME"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    mine: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.format(mine) for word in words]
    if given[1] == "--loss":
        given += ["--model", f"{mine}:Net", "--data", f"{mine}:batch"]
    assert run(["train", *given]) == 2
    shown = capsys.readouterr().err
    assert says in shown and "Traceback" not in shown


def test_a_model_that_does_not_take_the_data_is_named(mine: str) -> None:
    ((inputs, target),) = own_batches(f"{mine}:batch", 1, 0)
    with pytest.raises(TargetError, match="the model raised with a batch of the data"):
        check_step(nn.Linear(3, 2), nn.functional.mse_loss, (inputs, target))

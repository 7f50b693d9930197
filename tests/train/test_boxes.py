"""``fuselab train boxes``: the data, the detector, equal losses in every spelling, the ranges."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from fuselab.cli.main import build_app, run
from fuselab.errors import ArgumentError, DeviceError, FuselabError, UnknownNameError
from fuselab.measure import machine_state
from fuselab.ops.padded_generalized_box_iou_loss.op import OP
from fuselab.train.boxes import LOSSES, RANGES, BoxesResult, Settings, losses_of, own_loss, train
from fuselab.train.boxes_task import CELL, CELLS, GRID, Detector, images_and_boxes

CPU = torch.device("cpu")
QUICK = Settings(losses=("eager", "cpp"), models=("eager",), batch_size=4, steps=8, runs=1)


@pytest.fixture(scope="module")
def quick() -> BoxesResult:
    return train(QUICK, CPU)


def test_boxes_lie_around_their_cells_and_images_count_them() -> None:
    images, boxes = images_and_boxes(2, torch.Generator().manual_seed(0))
    filled = boxes[..., 3] > 0
    assert 0.5 < filled.float().mean() < 0.7
    assert boxes[~filled].abs().max() == 0
    centre = (boxes[..., :2] + boxes[..., 2:]) / 2
    row, column = torch.arange(CELLS) // GRID, torch.arange(CELLS) % GRID
    cell = torch.stack([column, row], -1).expand(2, -1, -1)
    assert torch.equal(centre[filled].floor().long(), cell[filled])
    # One pixel, counted by hand.
    y, x = 21, 40
    inside = (boxes[0, :, 0] <= (x + 0.5) / CELL) & (boxes[0, :, 2] > (x + 0.5) / CELL)
    inside &= (boxes[0, :, 1] <= (y + 0.5) / CELL) & (boxes[0, :, 3] > (y + 0.5) / CELL)
    assert images[0, 0, y, x] == (inside & filled[0]).sum()


@pytest.mark.parametrize("casts, dtype", [(True, torch.float32), (False, torch.bfloat16)])
def test_predicted_boxes_lie_in_order_around_their_cells(casts: bool, dtype: torch.dtype) -> None:
    model = Detector(casts)
    with torch.autocast("cpu", torch.bfloat16):
        boxes = model(torch.rand(2, 1, 64, 64))
    assert boxes.shape == (2, CELLS, 4) and boxes.dtype == dtype
    x1, y1, x2, y2 = boxes.float().unbind(-1)
    assert (x1 < x2).all() and (y1 < y2).all()
    middle = ((x1 + x2) / 2)[0].view(GRID, GRID)
    assert torch.allclose(middle[0].diff(), torch.ones(GRID - 1), atol=0.6)


def test_it_learns_and_the_losses_agree(quick: BoxesResult) -> None:
    assert len(quick.variants) == 4 and quick.agree
    assert all(one.held_out < quick.before - 0.02 for one in quick.variants)
    spoilt = replace(quick.variants[0], held_out=quick.variants[0].held_out + 0.05)
    assert not replace(quick, variants=[spoilt, *quick.variants[1:]]).agree


def test_ranges_add_up_to_the_step(quick: BoxesResult) -> None:
    for one in quick.variants:
        assert list(one.ranges_us) == list(RANGES)
        assert sum(one.ranges_us.values()) == pytest.approx(one.step_us)
        assert min(one.ranges_us.values()) > 0 and one.spread_us is None


def test_every_run_begins_anew(quick: BoxesResult) -> None:
    twice = train(replace(QUICK, losses=("cpp",), runs=2), CPU)
    once = {one.variant: one.held_out for one in quick.variants}
    for one in twice.variants:
        assert one.held_out == pytest.approx(once[one.variant], abs=1e-6)
        assert one.spread_us is not None and one.spread_us > 0


def test_own_loss_inside_compile() -> None:
    """As ``compile(triton)`` on a GPU: one graph around the operator."""
    _, boxes = images_and_boxes(2, torch.Generator().manual_seed(0))
    predicted = (boxes + 0.25).requires_grad_()
    loss = torch.compile(own_loss("cpp"), fullgraph=True)(predicted, boxes)
    (grad,) = torch.autograd.grad(loss, predicted)
    expected = OP.reference(predicted, boxes)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, predicted)[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_what_needs_a_gpu_is_left_out_and_said() -> None:
    found, left_out = losses_of(Settings(), CPU)
    assert set(found) == {"eager", "compile", "cpp"}
    assert set(left_out) == {"cuda", "triton", "compile(triton)"}
    assert all(reason.startswith("needs a GPU: torch") for reason in left_out.values())
    with pytest.raises(DeviceError, match=r"--loss triton needs a GPU"):
        train(replace(QUICK, losses=("eager", "triton")), CPU)


@pytest.mark.parametrize(
    "settings, error, says",
    [
        (Settings(losses=("cdua",)), UnknownNameError, "Did you mean 'cuda'"),
        (Settings(models=("fused",)), UnknownNameError, "unknown mode 'fused'"),
        (Settings(batch_size=0), ArgumentError, "--batch-size is 0; give 1 or more"),
        (Settings(runs=-1), ArgumentError, "--runs is -1; give 1 or more"),
    ],
)
def test_wrong_settings(settings: Settings, error: type[FuselabError], says: str) -> None:
    with pytest.raises(error, match=says):
        train(settings, CPU)


def test_the_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = contextlib.nullcontext(lambda: 0.42)
    monkeypatch.setattr(machine_state, "waiting_share", lambda: shares)
    file = tmp_path / "result.json"
    words = "train boxes --loss cpp --mode eager --batch-size 1 --steps 1 --runs 1 --device cpu"
    assert run([*words.split(), "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [one["variant"]["casts"] for one in result["variants"]] == [True, False]
    assert result["verb"] == "train boxes" and set(result["variants"][0]["ranges_us"]) == set(
        RANGES
    )
    shown = capsys.readouterr().out
    assert "all losses agree" in shown
    assert result["waited_share"] == 0.42 and "busy: for 42.0 % of the time" in shown
    assert run(["train", "boxes", "--steps", "0", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.splitlines() == ["fuselab: --steps is 0; give 1 or more."]


def test_the_guide_names_every_option() -> None:
    """Of this verb and of ``train lora``."""
    guide = Path(__file__).resolve().parents[2] / "docs" / "train_lora_and_boxes.md"
    shown = guide.read_text(encoding="utf-8").split("## lora")[0]
    command = typer.main.get_command(build_app())
    for name, part in zip(("lora", "boxes"), shown.split("fuselab train boxes"), strict=True):
        options = {
            option
            for parameter in command.commands["train"].commands[name].params
            for option in parameter.opts
            if option.startswith("--")
        }
        assert set(re.findall(r"--[a-z-]+", part)) == options


@pytest.mark.gpu
def test_every_loss_on_a_gpu() -> None:
    result = train(Settings(batch_size=8, steps=8, runs=1), torch.device("cuda"))
    assert {one.variant.loss for one in result.variants} == set(LOSSES) - {"cpp"}
    assert result.left_out == {"cpp": "runs on a CPU"}
    assert result.agree and all(one.held_out < result.before for one in result.variants)

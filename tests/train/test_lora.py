"""``fuselab train lora``: modes compute the same, the base stays, adapters come back."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuselab.cli.main import run
from fuselab.errors import ArgumentError, MissingDependencyError, OutputError, UnknownNameError
from fuselab.measure import machine_state
from fuselab.nn.peft_checkpoint import load_adapters
from fuselab.train.lora import LoraResult, Settings, train
from fuselab.train.lora_modes import MODES, adapted, base_model, plain_logits, step_of
from fuselab.train.lora_task import CLASSES, Rows, digits
from fuselab.train.losses import way_out

CPU = torch.device("cpu")
QUICK = Settings(modes=("eager", "fused"), hidden=64, steps=300, lr=1e-2, budget_s=0.01)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoraResult, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return train(QUICK, CPU, folder), folder


def losses(mode: str, device: torch.device, amp: bool = False, count: int = 10) -> list[float]:
    torch.manual_seed(0)
    model = adapted(base_model(32), 4, 8.0).to(device)
    step = step_of(mode, model, 16, amp)
    batches = digits(device).new.batches(16, seed=0)
    return [step(next(batches), 1e-2).item() for _ in range(count)]


def test_the_split_has_every_row_once() -> None:
    task = digits(CPU)
    parts = (task.base, task.base_held_out, task.new, task.new_held_out)
    assert sum(map(len, parts)) == 1797
    assert {int(digit) for part in parts[:2] for digit in part.digits} == set(range(5))
    assert {int(digit) for part in parts[2:] for digit in part.digits} == set(range(5, 10))
    assert task.new.pixels.min() >= 0 and task.new.pixels.max() == 1


def test_batches_cover_the_rows_in_a_new_order_each_time() -> None:
    rows = Rows(torch.zeros(7, 64), torch.arange(7))
    batches = rows.batches(3, seed=0)
    epochs = [torch.cat([next(batches)[1] for _ in range(2)]).tolist() for _ in range(20)]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert {digit for epoch in epochs for digit in epoch} == set(range(7))
    again = rows.batches(3, seed=0)
    assert next(again)[1].tolist() == epochs[0][:3]


def test_modes_train_alike() -> None:
    expected = losses("eager", CPU)
    assert expected[-1] < expected[0] - 0.1
    for mode in MODES[1:]:
        assert losses(mode, CPU) == pytest.approx(expected, abs=1e-4)


def test_the_plain_spelling_is_the_module() -> None:
    torch.manual_seed(0)
    model = adapted(base_model(32), 4, 8.0)
    for layer in model:
        torch.nn.init.normal_(layer.lora_b, std=0.1)
    pixels = torch.rand(5, 64)
    assert model(pixels).shape == (5, CLASSES)
    torch.testing.assert_close(plain_logits(model, pixels), model(pixels))


@pytest.mark.parametrize("mode", ["eager", "fused"])
def test_the_base_stays_bit_for_bit(mode: str) -> None:
    torch.manual_seed(0)
    base = base_model(32)
    before = copy.deepcopy(base.state_dict())
    model = adapted(base, 4, 8.0)
    step = step_of(mode, model, 16)
    batches = digits(CPU).new.batches(16, seed=0)
    for _ in range(3):
        step(next(batches), 1e-2)
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    assert all(layer.lora_b.abs().max() > 0 for layer in model)


def test_adapters_learn_what_the_base_never_saw(quick: tuple[LoraResult, Path]) -> None:
    result, _ = quick
    assert result.base_accuracy > 0.97 and result.before < 0.05
    assert all(mode.accuracy > 0.7 for mode in result.modes)
    assert result.merged_off < 1e-4
    # A and B of 64 -> 64 -> 64 -> 10 at rank 8.
    assert result.trained == 8 * (64 + 64 + 64 + 64 + 64 + 10)
    assert result.parameters == 65 * 64 + 65 * 64 + 65 * 10
    assert all(mode.step_us > 0 and mode.peak_bytes > 0 for mode in result.modes)


def test_exported_adapters_load_into_the_base(quick: tuple[LoraResult, Path]) -> None:
    _, folder = quick
    model = load_adapters(base_model(64), folder)
    assert {name for name, _ in model.named_parameters() if "lora" in name} == {
        f"{place}.lora_{half}" for place in (0, 2, 4) for half in "ab"
    }
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8


def test_a_disagreement_is_seen(quick: tuple[LoraResult, Path]) -> None:
    result, _ = quick
    lame = replace(result.modes[1], accuracy=result.modes[1].accuracy - 0.05)
    assert not replace(result, modes=[result.modes[0], lame]).agree


@pytest.mark.parametrize(
    "settings, error, says",
    [
        (Settings(modes=("eagre",)), UnknownNameError, "Did you mean 'eager'"),
        (Settings(batch_size=0), ArgumentError, "--batch-size is 0"),
        (Settings(batch_size=10_000), ArgumentError, "rows to train on"),
        (Settings(rank=0), ArgumentError, "--rank is 0; give 1 or more"),
        (Settings(alpha=0), ArgumentError, "--alpha is 0"),
        (Settings(lr=-1.0), ArgumentError, "learning rate is -1.0"),
    ],
)
def test_wrong_settings(settings: Settings, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        train(settings, CPU)


def test_an_output_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is a file"):
        train(QUICK, CPU, tmp_path / "file")


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fuselab\[digits\]'"):
        digits(CPU)


def test_the_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = contextlib.nullcontext(lambda: 0.42)
    monkeypatch.setattr(machine_state, "waiting_share", lambda: shares)
    file = tmp_path / "result.json"
    words = "train lora --mode eager --hidden 8 --steps 2 --rank 2 --budget 0.01 --device cpu"
    assert run([*words.split(), "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["verb"] == "train lora" and result["settings"]["rank"] == 2
    assert [mode["mode"] for mode in result["modes"]] == ["eager"]
    shown = capsys.readouterr().out
    assert "5 to 9 right" in shown and "eager" in shown
    assert result["waited_share"] == 0.42 and "busy: for 42.0 % of the time" in shown
    assert run(["train", "lora", "--rank", "0", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.splitlines() == ["fuselab: --rank is 0; give 1 or more."]
    assert run([*words.split(), "--lr", "1e30", "--steps", "4"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    # Which of them comes first depends on how the instruction set adds up.
    diverged = r"the loss of step \d is nan|after step 4 a logit is no finite number"
    assert re.fullmatch(rf"fuselab: ({diverged}); try a smaller --lr\.", said), said
    assert way_out(1, "--lr").startswith("nothing was updated before it: look at the data")
    assert way_out(2, "--lr") == "try a smaller --lr"


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [False, True])
def test_modes_train_alike_on_a_gpu(amp: bool) -> None:
    cuda = torch.device("cuda")
    expected = losses("eager", cuda, amp)
    for mode in MODES[1:]:
        assert losses(mode, cuda, amp) == pytest.approx(expected, abs=2e-2 if amp else 1e-3)

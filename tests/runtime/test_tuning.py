"""Tuned configurations: what ``chosen`` gives, where choices come from, when plans are dropped."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselab.errors import ArgumentError, ContractError, DataError, OutputError
from fuselab.op import Case, Cost, FusedOp, Implementation, Inputs
from fuselab.runtime import dispatch, launch_plans, tuning
from fuselab.runtime.tuning import Config, TunedConfig, chosen, forced

A, B, C = (Config(tile=tile, path="plain") for tile in (8, 16, 32))
DEVICE = tuning._cpu_name()


def choice(config: Config) -> TunedConfig:
    return TunedConfig(
        config, 1.5, 2.0, ["8x8, float32"], "2026-01-01", {"torch": "2"}, "fuselab bench"
    )


def make_op(name: str, forward: Any, **fields: Any) -> FusedOp:
    def reference(input: Tensor) -> Tensor:
        return input + 1

    reference.__annotations__ = {"input": Tensor, "return": Tensor}

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return Inputs((torch.zeros(8, 8, device=device, dtype=dtype),))

    return FusedOp(
        name=f"tuning::{name}",
        reference=reference,
        implementations={"plain": Implementation("cpu", forward)},
        cost=lambda input: Cost(1, 1, 1),
        cases=[Case("8x8", make)],
        **fields,
    )


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FusedOp:
    """An operator whose user's folder and own folder are empty ones of this test's."""
    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path / "cache"))
    op = make_op("adds_one", lambda input: input + 1)
    dispatch.operator(op)
    shipped = tmp_path / "package" / "tuned" / "device.json"
    monkeypatch.setattr(tuning, "shipped_file", lambda op, device: shipped)
    tuning.forget(op.name)
    return op


def ask(op: FusedOp, key: str | Sequence[Any] = "k") -> Config:
    return chosen(op.name, "plain", key, (A, B))


def test_a_config_is_a_frozen_mapping_with_a_stable_text() -> None:
    config = Config(threads=256, path="flat")
    assert str(config) == "threads=256 path=flat"
    assert (config["threads"], config.path, dict(config)) == (
        256,
        "flat",
        {"threads": 256, "path": "flat"},
    )
    assert config == Config(path="flat", threads=256) and len({config, Config(**config)}) == 1
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError, match="never changes"):
        config.threads = 1  # type: ignore[misc]
    with pytest.raises(AttributeError, match="has no 'warps'"):
        _ = config.warps
    with pytest.raises(ArgumentError, match=r"'share' is 0\.5"):
        Config(share=0.5)  # type: ignore[arg-type]


def test_the_default_is_the_first_candidate(op: FusedOp) -> None:
    assert ask(op) is A
    assert chosen("tuning::nobody", "plain", "k", (B, A)) is B
    with pytest.raises(ContractError, match="gives no candidate"):
        chosen(op.name, "plain", "k", ())


def test_a_saved_choice_counts_for_its_key_alone(op: FusedOp) -> None:
    tuning.save(op, DEVICE, {("plain", "float32 64"): choice(B)}, tuning.user_file(DEVICE))
    assert ask(op, (torch.float32, 64)) == B
    assert ask(op, (torch.float32, 65)) is A
    assert chosen(op.name, "plain_backward", "float32 64", (A, B)) is A


def test_the_users_choice_goes_before_the_shipped_one(op: FusedOp) -> None:
    shipped = tuning.shipped_file(op, DEVICE)
    both = {("plain", "k"): choice(B), ("plain", "other"): choice(B)}
    tuning.save(op, DEVICE, both, shipped)
    assert (ask(op), ask(op, "other")) == (B, B)
    tuning.save(op, DEVICE, {("plain", "k"): choice(A)}, tuning.user_file(DEVICE))
    assert (ask(op), ask(op, "other")) == (A, B)


def test_a_choice_that_is_no_candidate_any_more_is_passed_over(op: FusedOp) -> None:
    tuning.save(op, DEVICE, {("plain", "k"): choice(C)}, tuning.user_file(DEVICE))
    assert ask(op) is A


def test_files_are_stable_and_keep_what_others_saved(op: FusedOp) -> None:
    file = tuning.user_file(DEVICE)
    tuning.save(op, DEVICE, {("plain", "b"): choice(B)}, file)
    tuning.save(op, DEVICE, {("plain", "a"): choice(A)}, file)
    before = file.read_text()
    tuning.save(op, DEVICE, {("plain", "b"): choice(B)}, file)
    assert file.read_text() == before
    written = json.loads(before)
    assert (written["schema"], written["device"]) == (1, DEVICE)
    keys = written["operators"]["tuning::adds_one"]["plain"]
    assert list(keys) == ["a", "b"]
    assert keys["b"] == {
        "config": {"tile": 16, "path": "plain"},
        "us": 1.5,
        "default_us": 2.0,
        "cases": ["8x8, float32"],
        "date": "2026-01-01",
        "versions": {"torch": "2"},
        "command": "fuselab bench",
    }
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": 9}',
        '{"schema": 1, "operators": 3}',
        '{"schema": 1, "operators": {"tuningtest::op": {"plain": ["k"]}}}',
        '{"schema": 1, "operators": {"another::op": {"plain": {"k": 3}}}}',
    ],
)
def test_a_file_that_cannot_be_read_costs_one_warning_and_is_never_overwritten(
    op: FusedOp, text: str
) -> None:
    file = tuning.user_file(DEVICE)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.warns(UserWarning, match="tuned configurations are passed over"):
        assert ask(op) is A
    assert ask(op) is A
    with pytest.raises(DataError, match="delete it"):
        tuning.save(op, DEVICE, {("plain", "k"): choice(B)}, file)
    assert file.read_text() == text


def test_a_folder_that_cannot_be_written_is_one_sentence(op: FusedOp, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="the choice is not saved"):
        tuning.save(op, DEVICE, {("plain", "k"): choice(B)}, tmp_path / "file" / "tuned.json")


def test_forced_holds_in_its_thread_and_block_and_tells_the_keys(op: FusedOp) -> None:
    others: list[Config] = []
    with forced(op.name, "plain", B) as inside:
        assert (ask(op, "one"), ask(op, ("two", 2)), ask(op, "one")) == (B, B, B)
        thread = threading.Thread(target=lambda: others.append(ask(op)))
        thread.start()
        thread.join()
        assert chosen(op.name, "plain_backward", "k", (A, B)) is A
    assert (inside.keys, others, ask(op)) == (["one", "two 2", "one"], [A], A)
    with (
        forced(op.name, "plain", C),
        pytest.raises(ContractError, match="its launcher does not"),
    ):
        ask(op)


def test_a_new_choice_drops_launch_plans(op: FusedOp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all operators: one may launch by another's choices, as in-place forms do."""
    ids = [launch_plans.register(name) for name in ("tuning::one", "tuning::two")]
    dropped: list[int] = []
    monkeypatch.setattr(launch_plans, "forget", dropped.append)
    tuning.save(op, DEVICE, {("plain", "k"): choice(B)}, tuning.user_file(DEVICE))
    assert set(ids) <= set(dropped)


def test_configs_are_of_implementations() -> None:
    with pytest.raises(ContractError, match="configs has 'triton'"):
        make_op("misnamed", lambda input: input + 1, configs={"triton": lambda input: [A]})


def test_shipped_choices_lie_beside_the_reference() -> None:
    op = make_op("beside", lambda input: input + 1)
    file = tuning.shipped_file(op, "NVIDIA H200")
    assert file == Path(__file__).parent / "tuned" / "nvidia-h200.json"

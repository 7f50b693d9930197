"""Configurations by name and from files, the published talk's among them; what is wrong with one
is one sentence that names file and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fuselab.errors import FuselabError
from fuselab.models.dlrm import MAIN, SMALL
from fuselab.models.dlrm_config import Settings, describe

TALK = {
    "data_path": {"train": "day_0.parquet", "validation": "day_1.parquet"},
    "metadata_path": "meta.json",
    "model_path": "models",
    "tensorboard_dir": "runs",
    "dense_input_feature_size": 13,
    "sparse_embedding_sizes": {f"SPARSE_{column}": 16 for column in range(26)},
    "dense_mlp": {"hidden_layer_sizes": [512, 256, 64], "output_size": 16},
    "sparse_mlp": {"hidden_layer_sizes": [], "output_size": 16},
    "prediction_hidden_sizes": [512, 256],
    "num_epochs": 3,
    "learning_rate": 0.1,
    "device": "cuda",
    "batch_size": {"train": 128, "validation": 1024},
    "batches_per_epoch": 50,
    "use_modulus_hash": True,
}


def _written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_the_published_ones_by_name() -> None:
    small, main = describe("small"), describe("main")
    assert (small.config, small.settings.batch_size) == (SMALL, 64)
    assert (main.config, main.settings.batch_size) == (MAIN, 128)
    assert (main.config.dense_hidden, main.config.embedding_dim) == ((512, 256, 64), 16)


@pytest.mark.parametrize("form", ["toml", "json"])
def test_a_file_in_either_form(tmp_path: Path, form: str) -> None:
    if form == "toml":
        text = (
            'dense_mlp = "13-512-256-64-16"\nprediction_mlp = [512, 256, 1]\ninteraction = "cat"\n'
            f"cardinalities = {list(range(5, 31))}\n[train]\nlr = 1\nbatch_size = 9\n"
        )
    else:
        text = json.dumps({
            "dense_mlp": [13, 512, 256, 64, 16], "prediction_mlp": "512-256-1",
            "interaction": "cat", "cardinalities": list(range(5, 31)),
            "train": {"lr": 1, "batch_size": 9},
        })  # fmt: skip
    found = describe(_written(tmp_path, f"c.{form}", text))
    assert found.config.dense_hidden == (512, 256, 64)
    assert (found.config.embedding_dim, found.config.prediction_hidden) == (16, (512, 256))
    assert (found.config.interaction, found.config.table_sizes[25]) == ("cat", 30)
    assert found.settings == Settings(lr=1, batch_size=9)


def test_the_talks_keys_mean_the_outer_product(tmp_path: Path) -> None:
    found = describe(_written(tmp_path, "talk.json", json.dumps(TALK)))
    assert (found.config.dense_hidden, found.config.prediction_hidden) == (
        (512, 256, 64), (512, 256),
    )  # fmt: skip
    assert (found.config.interaction, found.config.ids) == ("outer", "modulus")
    assert found.settings == Settings(
        data="day_0.parquet", validation="day_1.parquet", metadata="meta.json", batch_size=128,
        steps=150, lr=0.1, checkpoint="models", tensorboard="runs", device="cuda",
    )  # fmt: skip
    by_vocabulary = json.dumps({**TALK, "use_modulus_hash": False})
    assert describe(_written(tmp_path, "v.json", by_vocabulary)).config.ids == "vocabulary"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"dens_mlp": "13-16"}, "unknown key 'dens_mlp'.*Did you mean 'dense_mlp'"),
        ({"dense_mlp": "13-x-16"}, "'dense_mlp' is \"13-x-16\"; expected widths"),
        ({"dense_mlp": [13, 8.5, 16]}, "expected widths"),
        ({"dense_mlp": "12-16"}, "'dense_mlp' is 12-16; it begins with 13"),
        ({"dense_mlp": True}, "expected widths"),
        ({"prediction_mlp": "512-2"}, "'prediction_mlp' is 512-2; it ends with 1"),
        ({"prediction_mlp": "1"}, "one hidden layer at least"),
        ({"interaction": "dott"}, "unknown interaction 'dott'.*Did you mean 'dot'"),
        ({"interaction": 3}, "'interaction' is 3; expected text"),
        ({"ids": "hash"}, "unknown ids 'hash'"),
        ({"largest_table": "big"}, "'largest_table' is \"big\"; expected an integer"),
        ({"largest_table": True}, "'largest_table' is true; expected an integer"),
        ({"cardinalities": [1, 2]}, "has 2 entries"),
        ({"train": {"lr": "fast"}}, "'train': 'lr' is \"fast\"; expected a number"),
        ({"train": {"rate": 1}}, "'train': unknown key 'rate'"),
        ({"train": []}, r"'train' is \[\]; expected a table"),
        ({**TALK, "dense_input_feature_size": 12}, "Criteo's layout has 13"),
        ({**TALK, "sparse_embedding_sizes": [16, 8]}, r"\[8, 16\].*needs one width"),
        ({**TALK, "nmu_epochs": 3}, "Did you mean 'num_epochs'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changed: dict[str, Any], expected: str) -> None:
    path = _written(tmp_path, "c.json", json.dumps(changed))
    with pytest.raises(FuselabError, match=expected) as caught:
        describe(path)
    assert str(caught.value).count(path) == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("c.toml", "dense_mlp = [", "is no TOML"),
        ("c.json", "{", "is no JSON"),
        ("c.py", "def f(:", "is no TOML"),
        ("c.json", "[1]", "expected keys and values, found a list"),
        ("c.json", "\0\1", "is no JSON"),
    ],
)
def test_a_broken_file(tmp_path: Path, name: str, text: str, expected: str) -> None:
    with pytest.raises(FuselabError, match=expected):
        describe(_written(tmp_path, name, text))


def test_no_such_file_or_name(tmp_path: Path) -> None:
    with pytest.raises(FuselabError, match="no such file"):
        describe(str(tmp_path / "c.toml"))
    with pytest.raises(FuselabError, match=r"unknown configuration 'smal'.*Did you mean 'small'"):
        describe("smal")

"""A DLRM's configuration by name, or from a TOML or JSON file, also the published talk's JSON."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fuselab.data.layout import DENSE_COLUMNS, KAGGLE_CARDINALITIES
from fuselab.errors import ArgumentError, FuselabError, UnknownNameError
from fuselab.models.dlrm import MAIN, SMALL, DlrmConfig

NAMED = {"small": SMALL, "main": MAIN}
_BATCHES = {"small": 64, "main": 128}  # the published ones


@dataclass(frozen=True)
class Settings:
    """A file's settings of a run; None where it has none.

    The command line's options of the same names take precedence.
    """

    data: str | None = None
    validation: str | None = None
    metadata: str | None = None
    batch_size: int | None = None
    steps: int | None = None
    epochs: int | None = None
    optimizer: str | None = None
    lr: float | None = None
    warmup: int | None = None
    decay: float | None = None
    seed: int | None = None
    checkpoint: str | None = None
    tensorboard: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class Described:
    """A model's configuration and the settings beside it."""

    config: DlrmConfig
    settings: Settings = field(default_factory=Settings)


def describe(name: str) -> Described:
    """Return the configuration of ``"small"``, ``"main"``, or a file.

    A file's keys: ``dense_mlp`` ("13-512-256-64-16", or a list: from 13 counts to the width of an
    embedding), ``prediction_mlp`` ("512-256-1"), ``interaction`` (outer, dot, cat),
    ``cardinalities`` (26 numbers), ``largest_table``, ``ids`` (modulus, or vocabulary, which the
    data's metadata must have), and a table ``train`` with keys of ``Settings``. A JSON with the
    published talk's keys is read as the talk reads it.

    Raises:
        UnknownNameError: a name that is neither of these nor a file.
        ArgumentError: the file is missing or malformed, or a key is unknown or of a wrong type.
    """
    if name in NAMED:
        return Described(NAMED[name], Settings(batch_size=_BATCHES[name]))
    path = Path(name)
    if not path.suffix and not path.exists():
        raise UnknownNameError("configuration", name, (*NAMED, "FILE.toml", "FILE.json"))
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ArgumentError(
            f"cannot read {path}: {reason}; give small, main, or a TOML or JSON file."
        ) from error
    except ValueError as error:  # raised by both parsers, and for text that is not UTF-8
        raise ArgumentError(
            f"{path} is no {'JSON' if path.suffix == '.json' else 'TOML'}: {error}."
        ) from error
    keys = _Keys(str(path), values)
    try:
        return _talk(keys) if "dense_input_feature_size" in values else _native(keys)
    except FuselabError as error:
        if str(path) in str(error):
            raise
        raise ArgumentError(f"{path}: {error}") from error


class _Keys:
    """The values of a file, taken one by one; each is checked, and none may be left over."""

    def __init__(self, place: str, values: object) -> None:
        if not isinstance(values, dict):
            raise ArgumentError(f"{place}: expected keys and values, found {_kind(values)}.")
        self.place, self.values = place, dict(values)
        self.known: list[str] = []

    def take(self, key: str, expected: type, default: Any = None) -> Any:
        self.known.append(key)
        value = self.values.pop(key, default)
        if value is default or type(value) is expected:
            return value
        if expected is float and type(value) is int:
            return value
        raise ArgumentError(
            f"{self.place}: '{key}' is {json.dumps(value, default=str)}; expected "
            f"{_NAMES[expected]}."
        )

    def table(self, key: str) -> _Keys:
        return _Keys(f"{self.place}: '{key}'", self.take(key, dict, {}))

    def widths(self, key: str, default: Iterable[int] = ()) -> tuple[int, ...]:
        """Take widths, written as ``"13-512-16"`` or ``[13, 512, 16]``."""
        self.known.append(key)
        value = self.values.pop(key, list(default))
        found = value.split("-") if isinstance(value, str) else value
        try:
            if isinstance(found, list) and not any(isinstance(one, bool | float) for one in found):
                return tuple(int(one) for one in found)
        except (TypeError, ValueError):
            pass
        raise ArgumentError(
            f"{self.place}: '{key}' is {json.dumps(value, default=str)}; expected widths, "
            'such as "13-512-256-64-16" or [13, 512, 256, 64, 16].'
        )

    def end(self) -> None:
        for key in self.values:
            raise ArgumentError(f"{self.place}: {UnknownNameError('key', key, self.known)}")


_NAMES = {
    str: "text", int: "an integer", float: "a number", bool: "true or false", dict: "a table",
    list: "a list",
}  # fmt: skip


def _kind(value: object) -> str:
    return _NAMES.get(type(value), type(value).__name__)


def _native(keys: _Keys) -> Described:
    dense = keys.widths("dense_mlp", (DENSE_COLUMNS, *SMALL.dense_hidden, SMALL.embedding_dim))
    prediction = keys.widths("prediction_mlp", (*SMALL.prediction_hidden, 1))
    if len(dense) < 2 or dense[0] != DENSE_COLUMNS:
        raise ArgumentError(
            f"{keys.place}: 'dense_mlp' is {_arrows(dense)}; it begins with {DENSE_COLUMNS}, the "
            "counts, and ends with the width of an embedding."
        )
    if len(prediction) < 2 or prediction[-1] != 1:
        raise ArgumentError(
            f"{keys.place}: 'prediction_mlp' is {_arrows(prediction)}; it ends with 1, the logit, "
            "behind one hidden layer at least."
        )
    config = DlrmConfig(
        dense_hidden=dense[1:-1],
        embedding_dim=dense[-1],
        prediction_hidden=prediction[:-1],
        interaction=keys.take("interaction", str, SMALL.interaction),
        cardinalities=keys.widths("cardinalities", KAGGLE_CARDINALITIES),
        largest_table=keys.take("largest_table", int, MAIN.largest_table),
        ids=keys.take("ids", str, "modulus"),
    )
    settings = _settings(keys.table("train"))
    keys.end()
    return Described(config, settings)


def _settings(keys: _Keys) -> Settings:
    kinds: dict[str, type] = {"lr": float, "decay": float}
    kinds |= dict.fromkeys(("batch_size", "steps", "epochs", "warmup", "seed"), int)
    found = {one.name: keys.take(one.name, kinds.get(one.name, str)) for one in fields(Settings)}
    keys.end()
    return Settings(**found)


def _talk(keys: _Keys) -> Described:
    """Read the published talk's keys.

    It has none for the interaction, which is the outer product; its ``sparse_mlp`` names layers
    that its model does not have.
    """
    features = keys.take("dense_input_feature_size", int)
    if features != DENSE_COLUMNS:
        raise ArgumentError(
            f"{keys.place}: 'dense_input_feature_size' is {features}; Criteo's layout has "
            f"{DENSE_COLUMNS} counts."
        )
    layers = keys.table("dense_mlp")
    hidden = layers.widths("hidden_layer_sizes")
    width = layers.take("output_size", int, SMALL.embedding_dim)
    layers.end()
    keys.take("sparse_mlp", dict, {})
    sizes = _sizes(keys)
    if sizes - {width}:
        raise ArgumentError(
            f"{keys.place}: 'sparse_embedding_sizes' has {sorted(sizes)} and the dense layers end "
            f"with {width}; the interaction needs one width."
        )
    paths, batch = keys.table("data_path"), keys.table("batch_size")
    epochs, per_epoch = keys.take("num_epochs", int), keys.take("batches_per_epoch", int)
    settings = Settings(
        data=paths.take("train", str),
        validation=paths.take("validation", str),
        metadata=keys.take("metadata_path", str),
        batch_size=batch.take("train", int),
        epochs=epochs if per_epoch is None else None,
        steps=None if per_epoch is None else per_epoch * (epochs or 1),
        lr=keys.take("learning_rate", float),
        checkpoint=keys.take("model_path", str),
        tensorboard=keys.take("tensorboard_dir", str),
        device=keys.take("device", str),
    )
    batch.take("validation", int)
    config = DlrmConfig(
        dense_hidden=hidden,
        embedding_dim=width,
        prediction_hidden=keys.widths("prediction_hidden_sizes", SMALL.prediction_hidden),
        interaction="outer",
        largest_table=MAIN.largest_table,
        ids="modulus" if keys.take("use_modulus_hash", bool, True) else "vocabulary",
    )
    for table in (paths, batch, keys):
        table.end()
    return Described(config, settings)


def _sizes(keys: _Keys) -> set[int]:
    """Return the widths of the embeddings, given as one number, a list, or a number by column."""
    key = "sparse_embedding_sizes"
    value = keys.values.get(key, [])
    if isinstance(value, Mapping):
        keys.values[key] = list(value.values())
    elif isinstance(value, int) and not isinstance(value, bool):
        keys.values[key] = [value]
    return set(keys.widths(key))


def _arrows(widths: Sequence[int]) -> str:
    return "-".join(map(str, widths)) or "empty"

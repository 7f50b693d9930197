"""Tuned configurations as files keep them: one JSON file per device, and what a file holds."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselab.errors import ArgumentError, DataError

SCHEMA = 1


class Config(Mapping[str, int | str]):
    """One way to launch a kernel: ``Config(threads=256, blocks=2)``. It is immutable, and its text
    is ``threads=256 blocks=2``. Values are read as ``config["threads"]`` or ``config.threads``.

    Raises ArgumentError for a value that is neither an int nor a str.
    """

    __slots__ = ("_values",)

    _values: dict[str, int | str]

    def __init__(self, **values: int | str) -> None:
        for name, value in values.items():
            if not isinstance(value, (int, str)):
                raise ArgumentError(
                    f"Config: '{name}' is {value!r}; expected an int or a str, which JSON can hold."
                )
        object.__setattr__(self, "_values", values)

    def __getitem__(self, name: str) -> int | str:
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_values")[name]
        except KeyError:
            raise AttributeError(f"the Config {self} has no '{name}'") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Config never changes; make another one")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        if isinstance(
            other, Config
        ):  # 10 times as fast as Mapping's, in every launch without a plan
            return self._values == other._values
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._values.items())

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _config_of, (self._values,)


def _config_of(values: Mapping[str, int | str]) -> Config:
    return Config(**values)


def key_text(key: str | Sequence[Any]) -> str:
    """Return a key as files store it: its values separated by spaces, dtypes by short names."""
    if isinstance(key, str):
        return key
    return " ".join(str(part).removeprefix("torch.") for part in key)


def read(file: Path) -> dict[str, Any]:
    """Return the content of a file of choices, an empty one if there is none. Raises DataError."""
    try:
        payload = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {"schema": SCHEMA, "operators": {}}
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error}); mend or delete it.") from error
    if not isinstance(payload, dict) or payload.get("schema") != SCHEMA:
        raise DataError(f"{file}: is no file of tuned configurations, schema {SCHEMA}; delete it.")
    if not _is_nested(payload.get("operators"), 4):
        raise DataError(
            f"{file}: 'operators' must hold an object of choices by operator, implementation and "
            "key; mend or delete it."
        )
    return payload


def _is_nested(value: Any, depth: int) -> bool:
    """Return whether ``value`` is dicts in dicts to that depth."""
    return depth == 0 or (
        isinstance(value, dict) and all(_is_nested(item, depth - 1) for item in value.values())
    )


def choices_in(file: Path, op_name: str) -> dict[tuple[str, str], Config]:
    """Return an operator's choices in a file, by implementation and key. Warn of a file that cannot
    be read, and go on: that costs speed, never a result."""
    found: dict[tuple[str, str], Config] = {}
    try:
        for implementation, keys in read(file)["operators"].get(op_name, {}).items():
            for key, entry in keys.items():
                found[implementation, key] = Config(**entry["config"])
    except (DataError, AttributeError, KeyError, TypeError, ArgumentError) as error:
        warnings.warn(f"tuned configurations are passed over: {error}", stacklevel=2)
    return found

"""The keys that every verb's JSON has in common: schema, verb, environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fuselab.device import environment
from fuselab.errors import ArgumentError
from fuselab.report import files, standard_output
from fuselab.schema import SCHEMA


def result(
    verb: str, facts: Mapping[str, Any], device: torch.device | None = None
) -> dict[str, Any]:
    """Add the keys common to all verbs to ``facts``; ``files.write_json`` takes the result."""
    common = {"schema": SCHEMA, "verb": verb, "environment": environment.describe(device)}
    return {**common, **facts}


def write_result(
    path: str | os.PathLike[str] | None,
    verb: str,
    facts: Mapping[str, Any],
    device: torch.device | None = None,
) -> None:
    """Write ``facts`` with the common keys as ``--json`` says. Raises OutputError."""
    if path is not None:
        write_payload(path, result(verb, facts, device))


def write_payload(path: str | os.PathLike[str] | None, payload: Mapping[str, Any]) -> None:
    """Write a finished payload as ``--json`` says: to a file, or for ``-`` to standard output; with
    None, the call has no ``--json``. Raises OutputError."""
    if path is None:
        return
    if standard_output.is_meant(path):
        standard_output.write(files.json_text(payload))
    else:
        files.write_json(path, payload)


def read_result(path: str | os.PathLike[str], verb: str) -> dict[str, Any]:
    """Return what ``fuselab VERB --json`` wrote to ``path``. Raises ArgumentError."""
    name, mend = repr(os.fspath(path)), f"give what 'fuselab {verb} --json' wrote."
    try:
        facts = json.loads(Path(path).read_text())
    except OSError as error:
        raise ArgumentError(f"cannot read {name} ({error.strerror}); {mend}") from error
    except ValueError as error:
        raise ArgumentError(f"{name} is not JSON; {mend}") from error
    if not isinstance(facts, dict) or facts.get("verb") != verb:
        raise ArgumentError(f"{name} is no {verb}; {mend}")
    if facts.get("schema") != SCHEMA:
        raise ArgumentError(
            f"{name} has schema {facts.get('schema')}, this fuselab reads {SCHEMA}; run it again."
        )
    return facts

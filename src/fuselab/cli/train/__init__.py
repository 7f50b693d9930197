"""``fuselab train``: the case studies, one file per model."""

from __future__ import annotations

import importlib
import pkgutil

import typer

from fuselab.cli.options import Verbs


def add(app: typer.Typer) -> None:
    """Register the verb, with every model found in this folder."""
    verbs = Verbs()
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda found: found.name):
        importlib.import_module(f"{__name__}.{module.name}").add(verbs)
    app.add_typer(verbs, name="train", help="Train a case study's model.")

"""Ejected packages for the tests, each written once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ejected_functions import EXAMPLES

from fuselab.ejection.eject import eject


@pytest.fixture(scope="session")
def ejected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of an example's package."""
    root = tmp_path_factory.mktemp("ejected")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            function, args = EXAMPLES[name]
            eject(function, *args, out=root / name, name=name)
        return root / name

    return folder


@pytest.fixture(scope="session")
def declared(ejected: Callable[[str], Path]) -> Callable[[str], ModuleType]:
    """Return the ``op`` module of an example's package."""

    def module(name: str) -> ModuleType:
        folder = ejected(name)
        if str(folder.parent) not in sys.path:
            sys.path.insert(0, str(folder.parent))
        return importlib.import_module(f"{name}.op")

    return module

"""Ejected packages for the tests, each written once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ejected_functions import DROPPED, EXAMPLES

from fuselab.ejection.eject import eject

SHARED = ("packages_of_all_tests", "standalone_packages_of_all_tests")


@pytest.fixture(autouse=True, scope="module")
def names_of_packages_are_free(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget the packages that a test file wrote and imported: the next file may name one alike.
    Those of ``ejected`` stay."""
    before = set(sys.modules)
    yield
    root = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(root) and Path(file).relative_to(root).parts[0] not in SHARED:
            del sys.modules[name]


@pytest.fixture(scope="session")
def ejected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of an example's package; ``standalone_NAME`` is that of a standalone
    one."""
    root, alone = (tmp_path_factory.mktemp(name, numbered=False) for name in SHARED)

    def folder(name: str) -> Path:
        plain = name.removeprefix("standalone_")
        out = alone / plain if plain != name else root / name
        if not out.exists():
            function, args = {**EXAMPLES, "dropped_residual": DROPPED}[plain]
            eject(function, *args, out=out, name=plain, standalone=plain != name)
        return out

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

"""The gallery of wrong operators is a package beside these tests; a check has all its time."""

import importlib
import sys
from pathlib import Path

import pytest

from fuselab.prove import check_calls, check_group

check_module = importlib.import_module("fuselab.prove.check")  # fuselab.prove.check is shadowed

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_check_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not leave out the trial that finds the fault."""
    monkeypatch.setattr(check_group, "QUICK_BUDGET_S", float("inf"))
    monkeypatch.setattr(check_module, "QUICK_LANE_S", float("inf"))
    monkeypatch.setattr(check_calls, "PATIENCE_S", {True: float("inf"), False: float("inf")})

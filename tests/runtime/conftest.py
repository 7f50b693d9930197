"""The modules beside these tests can be imported; tests of plans need the C++ launcher."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fuselab.runtime import launch_plans

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def launcher() -> None:
    assert launch_plans.start()

"""Lets the tests beside this file import their cases (importlib mode adds no folder itself)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

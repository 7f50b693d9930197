"""Lets the tests beside this file import ``sample_study``; importlib mode adds no folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

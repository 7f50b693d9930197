"""The gallery of wrong operators is a package beside these tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

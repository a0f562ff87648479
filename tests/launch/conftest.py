"""Puts this folder's data module (`override_cases`) on the path of its tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

"""Puts benchmarks/fuzz on the path: the suite runs a small part of what it does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "fuzz"))

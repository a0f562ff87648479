"""Puts the folder that has the writer of safetensors files on the path of these tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "audit"))

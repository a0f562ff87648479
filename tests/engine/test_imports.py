"""Every module can be the first one that is imported; what refuses early needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ullage

ROOT = Path(ullage.__file__).parent
ROOMS = ("engine", "serving", "lab", "traffic", "pages", "checkup")
# In a process of its own: what is imported again would be another class than the tests'.
_EACH_ALONE = f"""
import importlib, sys

ROOMS = {ROOMS}

importlib.import_module("ullage.engine.engine")  # and with it torch, which stays
for name in sys.argv[1:]:
    for loaded in [other for other in sys.modules if other.startswith("ullage.")]:
        if loaded.split(".")[1] in ROOMS:
            del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error)
"""


def _modules() -> list[str]:
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    parts = [("ullage", *file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [".".join(each).removesuffix(".__init__") for each in parts]


def test_every_module_can_be_imported_first() -> None:
    modules = _modules()
    assert "ullage.engine.sites" in modules
    assert len(modules) > 100
    done = subprocess.run(
        [sys.executable, "-c", _EACH_ALONE, *modules], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


def test_what_refuses_before_the_weights_are_read_needs_no_torch() -> None:
    code = "import sys, ullage.engine.possible; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

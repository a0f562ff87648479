"""Every Python of this machine reads a checkpoint alike: its `re` is not the same everywhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import ullage

SOURCES = Path(ullage.__file__).parent.parent
PYTHONS = [
    found
    for folder in ("/usr/bin", "/usr/local/bin")
    for version in range(11, 16)
    if os.access(found := f"{folder}/python3.{version}", os.X_OK)
]
PROGRAM = r"""
import json, struct, sys
from pathlib import Path
from ullage.anatomy.files.safetensors import read_safetensors
from ullage.anatomy.files.weight_map import read_weight_map
from ullage.audit.vocabulary import read_vocabulary
here = Path(sys.argv[1])
names = [f"layers.{i}" for i in range(3)]
entries = {n: {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * i, 4 * i + 4]}
           for i, n in enumerate(names)}
# The usual layout, then a member that breaks it off after its name, and the other way round.
for number, order in enumerate([["__metadata__", *names], [*names, "__metadata__"]]):
    whole = {"__metadata__": {"format": "pt"}, **entries}
    text = json.dumps({key: whole[key] for key in order}, separators=(",", ":")).encode()
    file = here / f"{number}.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    tensors, metadata = read_safetensors(file)
    assert [t.name for t in tensors] == names and metadata == (("format", "pt"),)
index = here / "model.safetensors.index.json"
index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "0.safetensors"), "metadata": {}}))
assert read_weight_map(index)[0] == dict.fromkeys(names, "0.safetensors")
tokenizer = here / "tokenizer.json"
for vocab in ({"a": 0, 'quoted "b" \\\\\\\\': 7}, [["a", -1.5], ["b", -2.0]]):
    kind = "BPE" if isinstance(vocab, dict) else "Unigram"
    tokenizer.write_text(json.dumps({"added_tokens": [], "model": {"type": kind, "vocab": vocab}}))
    print(read_vocabulary(tokenizer))
"""
EXPECTED = [
    "Vocabulary(largest_base=7, largest_added=None)",
    "Vocabulary(largest_base=1, largest_added=None)",
]


@pytest.mark.skipif(not PYTHONS, reason="no other Python of 3.11 or later in /usr/bin")
@pytest.mark.parametrize("python", PYTHONS)
def test_a_checkpoint_is_read_alike(python: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [python, "-c", PROGRAM, str(tmp_path)],
        env={"PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == EXPECTED

"""How long `ullage audit` takes on sharded checkpoints of 60,000 to 92,000 tensors.

Each run is a fresh process on a directory with config.json, an index file and shards whose headers
are real (`sharded.py`). Turns of all directories alternate, so that a busy machine disturbs them
alike. Writes RESULTS.md beside itself:

    .venv/bin/python benchmarks/audit/measure.py [--runs 15]
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "startup"))

from measure_process import Sample, cpu_name, run_once

import ullage

WALL_LIMIT_S = 1.0
RESULTS = Path(__file__).with_name("RESULTS.md")
MAKER = Path(__file__).with_name("sharded.py")
ULLAGE = Path(sys.executable).with_name("ullage")
# name → layers beside the prediction layer, shards, whether the shards lie there
SHAPES = {
    "41 layers, 128 shards": (41, 128, True),
    "41 layers, one file": (41, 1, True),
    "41 layers, index without shards": (41, 128, False),
    "DeepSeek-V3: 61 layers, 163 shards": (61, 163, True),
}
# Rules that look at headers: each must have been evaluated in every run with shards.
HEADER_RULES = ("A121", "A122", "A123", "A126", "A127", "A131", "A132", "A133", "A134", "A135")


def write_apart(folder: Path, layers: int, shards: int) -> int:
    """The checkpoint, made by another process: a child's peak memory starts at its parent's."""
    asked = [sys.executable, str(MAKER), str(folder), str(layers), str(shards)]
    return int(subprocess.run(asked, capture_output=True, check=True).stdout)


def states(folder: Path) -> dict[str, str]:
    """Rule → state of one audit, asked apart from the timed runs."""
    asked = [str(ULLAGE), "audit", str(folder), "--output", "json", "--fail-on", "never"]
    made = subprocess.run(asked, capture_output=True, check=True)
    return {found["id"]: found["state"] for found in json.loads(made.stdout)["findings"]}


def row(name: str, tensors: int, samples: list[Sample], evaluated: int) -> str:
    walls = [sample.wall_s for sample in samples]
    cpu_s = statistics.median(sample.cpu_s for sample in samples)
    peak_mb = max(sample.peak_mb for sample in samples)
    return (
        f"| {name} | {tensors:,} | {statistics.median(walls):.3f} | {min(walls):.3f} "
        f"| {max(walls):.3f} | {cpu_s:.3f} | {peak_mb:.0f} | {evaluated} of {len(HEADER_RULES)} |"
    )


def main() -> int:
    """Measure, write the table; 1 when 60,000 tensors take a second or a rule was left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    compileall.compile_dir(Path(ullage.__file__).parent, quiet=1)
    samples: dict[str, list[Sample]] = {name: [] for name in SHAPES}
    counts, evaluated, folders = {}, {}, {}
    with tempfile.TemporaryDirectory(prefix="ullage-audit-") as scratch:
        for number, (name, (layers, shards, stored)) in enumerate(SHAPES.items()):
            folder = folders[name] = Path(scratch) / str(number)
            counts[name] = write_apart(folder, layers, shards)
            for shard in () if stored else list(folder.glob("*.safetensors")):
                shard.unlink()
            found = states(folder)
            evaluated[name] = sum(found[rule] != "not_evaluable" for rule in HEADER_RULES)
        for _ in range(args.runs):
            for name, folder in folders.items():
                arguments = ["audit", str(folder), "--output", "json", "--gpu", "H200-SXM:8"]
                samples[name].append(run_once(arguments))
    rows = [row(name, counts[name], samples[name], evaluated[name]) for name in SHAPES]
    text = "\n".join(
        [
            "# `ullage audit` on large sharded checkpoints",
            "",
            f"`--output json --gpu H200-SXM:8`, {args.runs} fresh processes each, in turn. "
            f"Wanted: 60,000 tensors in under {WALL_LIMIT_S:.0f} s.",
            "The layout is DeepSeek-V3's: 256 experts in fp8 with a scale each, and a prediction "
            "layer. Headers and index are read and checked whole; the shards are sparse files.",
            "Rules: those of the ten that look at headers which were evaluated. Without shards, "
            "only what the index promises can be judged.",
            "Made by `benchmarks/audit/measure.py`.",
            "",
            f"ullage {ullage.__version__} · Python {platform.python_version()} · "
            f"{cpu_name()} × {os.cpu_count()} · load {os.getloadavg()[0]:.1f} · "
            f"{time.strftime('%Y-%m-%d')}",
            "",
            "| checkpoint | tensors | median s | fastest | slowest | cpu s | peak MB | rules |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
    print("\n".join(rows), file=sys.stderr)
    fresh = RESULTS.with_suffix(".tmp")
    fresh.write_text(text)
    fresh.replace(RESULTS)
    slow = [
        name
        for name, taken in samples.items()
        if counts[name] < 61_000 and statistics.median(s.wall_s for s in taken) >= WALL_LIMIT_S
    ]
    left_out = [n for n, shape in SHAPES.items() if shape[2] and evaluated[n] < len(HEADER_RULES)]
    return int(bool(slow or left_out))


if __name__ == "__main__":
    sys.exit(main())

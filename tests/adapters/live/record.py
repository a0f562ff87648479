"""Asks a real vLLM about every recipe and writes outcomes.jsonl and bases.json beside this file.

    .venv/bin/python -m tests.adapters.live.record [word of a recipe's name …]

With words, only those recipes are asked again; the other lines stay.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers

from . import headers, outcomes, table
from .server import launcher

HERE = Path(__file__).parent
OUTCOMES, BASES = HERE / "outcomes.jsonl", HERE / "bases.json"
VLLM = Path(os.environ.get("ULLAGE_VLLM_VENV") or "~/.cache/ullage/vllm-0.32").expanduser()


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    wanted = [r for r in table.TABLE if not words or any(word in r.name for word in words)]
    lines = {line["name"]: line for line in read(OUTCOMES)}
    bases = json.loads(BASES.read_text()) if BASES.exists() else {}
    with tempfile.TemporaryDirectory() as folder, launcher(VLLM / "bin" / "python") as servers:
        made = outcomes.make(wanted, Path(folder))
        for one in made:
            bases[one.recipe.model] = json.loads((one.base / "config.json").read_text())
        for one, outcome in outcomes.ask(servers, made):
            lines[one.recipe.name] = line(one, outcome)
            shown = outcome.message or f"{outcome.distance_to_base} {outcome.distance_to_training}"
            print(f"{one.recipe.name:40} {outcome.outcome:11} {shown}", flush=True)
    order = [r.name for r in table.TABLE]
    kept = [lines[name] for name in order if name in lines]
    OUTCOMES.write_text("".join(json.dumps(each) + "\n" for each in kept))
    BASES.write_text(json.dumps(bases, indent=1, sort_keys=True) + "\n")


def line(made: outcomes.Made, outcome: outcomes.Outcome) -> dict[str, Any]:
    return {
        "name": made.recipe.name,
        "model": made.recipe.model,
        "flags": [*made.recipe.flags],
        "request": [*made.recipe.request],
        "unseen": made.recipe.unseen,
        **dataclasses.asdict(outcome),
        "versions": {name: version(name) for name in ("peft", "transformers")} | {"vllm": "0.32.0"},
        "files": _anywhere(headers.describe(made.adapter), made),
    }


def _anywhere(files: dict[str, Any], made: outcomes.Made) -> dict[str, Any]:
    """The files without the folder of this run."""
    text = json.dumps(files).replace(str(made.base), f"tiny/{made.recipe.model}")
    return dict(json.loads(text))


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text().splitlines()]


if __name__ == "__main__":
    main(sys.argv[1:])

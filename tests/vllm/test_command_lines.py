"""Command lines that vLLM's own parser takes are clear, and those that it refuses fire."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
from pathlib import Path

import pytest

from ullage.anatomy import load
from ullage.audit import find_rule, judge, prepare
from ullage.costs.deployment import Deployment
from ullage.launch.documents import read_launches
from ullage.launch.flags import known_flags
from ullage.launch.settings import deployment_of

VENV = Path(os.environ.get("ULLAGE_VLLM_VENV", Path.home() / ".cache/ullage/vllm-0.32"))
LLAMA = Path(__file__).parents[1] / "audit" / "models" / "llama.json"
VALUES = (
    "8",
    "auto",
    "x/y",
    "0.9",
    "-1",
    "true",
    "8k",
    "1.5K",
    "bfloat16",
    "fp8",
    "None",
    "[1]",
    "{}",
)
# Flags whose values have a grammar of their own, and a usage error is not the parser's.
FREE = ("config", "lora-modules", "-cc", "-ac", "-sc", "-dc", "help", "-h", "overrides", "kwargs")
USAGE = ("A161", "A162", "A088")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not (VENV / "bin/python").exists(), reason=f"no vLLM in {VENV}"),
]


def drawn(number: int) -> list[list[str]]:
    """Command lines of a model and one to three flags, spelled in every way, wrong ones too."""
    draw = random.Random(32)  # noqa: S311 (no secret)
    flags = sorted({flag.name for flag in known_flags("vllm").values()})
    flags = [name for name in flags if not any(word in name for word in FREE)]
    lines = []
    for _ in range(number):
        line = ["org/model"]
        for _ in range(draw.randint(1, 3)):
            flag = known_flags("vllm")[draw.choice(flags)]
            name = draw.choice(flag.names)
            if name.startswith("--") and draw.random() < 0.2:
                name = name.replace("-", "_").replace("__", "--", 1)
            if draw.random() < 0.1:
                name += draw.choice(["s", "-x", "_size"])
            value = draw.choice([*VALUES, *flag.choices[:3]])
            take = draw.random()
            line += [f"{name}={value}"] if take < 0.3 else [name, value] if take < 0.8 else [name]
        lines.append(line)
    return lines


def test_what_vllm_refuses_fires_and_what_it_takes_does_not(tmp_path):
    lines = drawn(2000)
    answer = subprocess.run(
        [VENV / "bin/python", Path(__file__).with_name("ask_parser.py")],
        input=json.dumps(lines), capture_output=True, text=True, check=True,
    )  # fmt: skip
    # vLLM refuses values out of range after its parser, which alone is asked here.
    model, path, wrong = load(LLAMA), tmp_path / "start.sh", []
    complaints = json.loads(answer.stdout)
    assert None in complaints and any(complaints)
    for line, complaint in zip(lines, complaints, strict=True):
        path.write_text(f"vllm serve {shlex.join(line)}\n")
        (launch,) = read_launches(str(path))
        subject, _ = prepare(model, deployment_of(launch, Deployment()), launch=launch)
        found = [judge(find_rule(rule), subject) for rule in USAGE]
        fired = [f for f in found if f.state == "fired"]
        ranges = any("at least 1" in f.cause or "at most 1" in f.cause for f in fired)
        if bool(fired) != bool(complaint) and not (ranges and complaint is None):
            wrong.append((line, complaint, [f.cause for f in fired]))
    assert not wrong, "\n".join(map(repr, wrong))

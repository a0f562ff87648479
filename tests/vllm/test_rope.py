"""Rotary tables against vLLM's own classes, longrope's choice of factors included."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ullage.anatomy.spec import Rope
from ullage.engine.positions.rope import rotary_tables
from ullage.engine.positions.scaling import Reach, rope_angles

pytestmark = pytest.mark.vllm
POSITIONS = [0, 1, 100, 4000]
SHORT = tuple(1.0 + 0.01 * pair for pair in range(32))
LONG = tuple(1.0 + 0.75 * pair for pair in range(32))
LONGROPE = Rope(
    1e4,
    64,
    "longrope",
    original_max_positions=4096,
    parameters=(("long_factor", LONG), ("short_factor", SHORT)),
)
LLAMA3 = Rope(
    5e5,
    128,
    "llama3",
    8.0,
    8192,
    parameters=(("high_freq_factor", 4.0), ("low_freq_factor", 1.0)),
)
# The rope, head_dim, the model's max_positions, max_model_len.
CASES: list[tuple[Rope, int, int, int]] = [
    (Rope(1e4, 64), 64, 4096, 4096),
    (Rope(1e4, 32), 64, 4096, 4096),
    (Rope(1e4, 64, interleaved=True), 64, 4096, 4096),
    (Rope(1e4, 64, "linear", 4.0), 64, 4096, 4096),
    (LLAMA3, 128, 16_384, 16_384),
    (Rope(1e6, 128, "yarn", 4.0, 4096), 128, 16_384, 16_384),
    (
        Rope(1.5e5, 64, "yarn", 4.0, 4096, parameters=(("truncate", False),)),
        64,
        16_384,
        16_384,
    ),
    (
        Rope(1e4, 64, "yarn", 40.0, 4096, parameters=(("mscale", 1.0), ("mscale_all_dim", 0.7))),
        64,
        163_840,
        8192,
    ),
    (Rope(1e4, 64, "dynamic", 4.0), 64, 4096, 4096),
    (Rope(1e4, 128, "dynamic", parameters=(("alpha", 1000.0),)), 128, 4096, 4096),
    (Rope(1e6, 32, "proportional"), 128, 4096, 4096),
    (LONGROPE, 64, 131_072, 4096),
    (LONGROPE, 64, 131_072, 4097),
    (replace(LONGROPE, theta=1e5), 128, 131_072, 131_072),
]


def _parameters(rope: Rope, head_dim: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    found |= {key: list(v) if isinstance(v, tuple) else v for key, v in rope.parameters}
    if rope.factor != 1.0:
        found["factor"] = rope.factor
    if rope.original_max_positions is not None:
        found["original_max_position_embeddings"] = rope.original_max_positions
    if rope.rotary_dim != head_dim:
        found["partial_rotary_factor"] = rope.rotary_dim / head_dim
    return found


def test_tables_equal_those_of_vllm(vllm_python: Path) -> None:
    asked = [
        [head_dim, _parameters(rope, head_dim), rope.interleaved, longest, limit, POSITIONS]
        for rope, head_dim, longest, limit in CASES
    ]
    done = subprocess.run(
        [vllm_python, str(Path(__file__).with_name("ask_rope.py"))],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        check=True,
    )
    for (rope, head_dim, longest, limit), answer in zip(
        CASES, json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        angles = rope_angles(rope, Reach(limit, longest, head_dim))
        tables = rotary_tables(angles, max(POSITIONS) + 1)
        half = tables.cos_ND.shape[1] // 2
        pairs = slice(None, None, 2) if rope.interleaved else slice(0, half)
        ours = torch.cat(
            [tables.cos_ND[POSITIONS][:, pairs], tables.sin_ND[POSITIONS][:, pairs]], 1
        )
        # Theirs are float32 products: an error that grows with the position, 3e-4 at 4000.
        for position, mine, theirs in zip(POSITIONS, ours.double(), answer, strict=True):
            error = (mine - torch.tensor(theirs, dtype=torch.float64)).abs().max().item()
            assert error < 3e-7 + 1e-7 * position, (rope, position)

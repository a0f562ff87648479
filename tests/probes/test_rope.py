"""Rotary tables as they are built, against mpmath; what their errors do to scores; the ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

from tests.engine.families import FAMILIES, LLAMA3_ROPE, write_model
from ullage.anatomy import load
from ullage.anatomy.spec import Rope
from ullage.cli.main import main
from ullage.engine.positions.rope import rotate
from ullage.engine.positions.scaling import Reach, model_rope_fingerprint, rope_angles
from ullage.errors import UnsupportedModel
from ullage.probes.rope.builders import (
    Builder,
    embedded,
    exact_rows,
    product_in_dtype,
    stored_in_dtype,
)
from ullage.probes.rope.rope import (
    CHUNK,
    MAX_CHUNKS,
    TableReading,
    Turning,
    _chunks,
    _Sweep,
    probe_rope,
)

SHARED = Path(__file__).parents[2].parent / "shared" / "configs"
PLAIN = Rope(10_000.0, 64)


def turning(rope: Rope = PLAIN, head_dim: int = 64, limit: int = 1 << 24) -> Turning:
    return Turning(rope, head_dim, (0,), rope_angles(rope, Reach(limit, limit, head_dim)))


def swept(turn: Turning, builder: Builder, limit: int, bound_rad: float = 0.01) -> TableReading:
    sweep = _Sweep(turn, builder, limit, bound_rad)
    for positions_N in _chunks(limit):
        sweep.add(positions_N, exact_rows(turn.angles, positions_N))
    return sweep.reading()


def llama(directory: Path, **changes: object) -> Path:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
        **changes,
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


# --- what is exact -------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [1, 131_071, 10_485_759])
@pytest.mark.parametrize(
    "rope", [PLAIN, Rope(500_000.0, 128), Rope(1e6, 64, scaling="linear", factor=8.0)]
)
def test_exact_rows_are_those_of_fifty_digits(rope: Rope, position: int) -> None:
    cos, sin = exact_rows(turning(rope).angles, np.array([float(position)]))
    with mpmath.workdps(50):
        for pair in range(rope.rotary_dim // 2):
            power = mpmath.mpf(-2 * pair) / rope.rotary_dim
            angle = position * mpmath.mpf(rope.theta) ** power / mpmath.mpf(rope.factor)
            off = mpmath.hypot(cos[0, pair] - mpmath.cos(angle), sin[0, pair] - mpmath.sin(angle))
            assert off < 1e-8


def test_the_engines_own_table_is_a_float32_rounding_of_them_at_any_position() -> None:
    reading = swept(turning(), embedded(turning().angles), 1 << 24)
    assert reading.formula_matches
    assert reading.angle_error_max_rad is not None
    assert reading.angle_error_max_rad < 2**-24
    assert reading.first_beyond_bound is None


# --- what the ways are off by --------------------------------------------------------------------


def test_a_product_in_bfloat16_loses_positions_and_then_everything() -> None:
    """8 bits of mantissa: 257 becomes 256, and the fastest pair turns by it in radians."""
    reading = swept(turning(), product_in_dtype(turning().angles, "bfloat16", "cpu"), 4096)
    assert reading.first_repeated == 257
    assert reading.angle_error_max_rad is not None
    assert reading.angle_error_max_rad > 3.0
    assert reading.first_beyond_bound is not None
    assert reading.first_beyond_bound < 257
    assert reading.formula_matches  # it is rounding, however much of it


def test_positions_that_float16_cannot_hold_are_not_finite() -> None:
    reading = swept(turning(), product_in_dtype(turning().angles, "float16", "cpu"), 70_000)
    assert reading.first_repeated == 2049
    assert reading.first_not_finite == 65_520  # the first that rounds to Inf
    assert reading.angle_error_rad is None
    assert reading.score_shifts[0].worst is None


def test_a_table_kept_in_the_dtype_is_off_by_its_spacing_at_every_position() -> None:
    for dtype, bits in (("bfloat16", 8), ("float16", 11)):
        reading = swept(turning(), stored_in_dtype(turning().angles, dtype, "cpu"), 2000)
        assert reading.angle_error_max_rad is not None
        assert 2.0 ** -(bits + 2) < reading.angle_error_max_rad < 2.0**-bits
        assert reading.first_repeated is None


def test_the_first_position_beyond_the_bound_is_the_first_of_all() -> None:
    builder = stored_in_dtype(turning().angles, "float32", "cpu")
    positions_N = np.arange(9000, dtype=np.float64)
    cos, sin = builder.build(positions_N)
    exact_cos, exact_sin = exact_rows(turning().angles, positions_N)
    off_NP = np.angle((cos + 1j * sin) / (exact_cos + 1j * exact_sin))
    off_N = np.abs(off_NP).max(axis=1)
    for bound in (1e-5, 1e-4, 3e-4):
        reading = swept(turning(), builder, 9000, bound)
        beyond = np.flatnonzero(off_N > bound)
        assert reading.first_beyond_bound == (int(beyond[0]) if len(beyond) else None)
        assert reading.angle_error_rad == pytest.approx(off_N[-1], rel=1e-6)
        assert reading.angle_error_max_rad == pytest.approx(off_N.max(), rel=1e-6)


@pytest.mark.parametrize("limit", [1, 2, CHUNK, CHUNK + 1, 131_072, 131_073, 10_485_760])
def test_chunks_begin_at_the_first_position_and_end_at_the_last(limit: int) -> None:
    chunks = list(_chunks(limit))
    assert len(chunks) <= MAX_CHUNKS
    assert chunks[0][0] == 0
    assert chunks[-1][-1] == limit - 1
    if limit <= CHUNK * MAX_CHUNKS:
        assert len(np.unique(np.concatenate(chunks))) == limit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "other",
    [
        replace(PLAIN, theta=50_000.0),
        replace(PLAIN, theta=10_010.0),
        replace(PLAIN, scaling="linear", factor=2.0),
        replace(PLAIN, rotary_dim=32),
        Rope(1e4, 64, scaling="yarn", factor=4.0, original_max_positions=2048),
    ],
)
def test_another_formula_is_not_taken_for_rounding(other: Rope, dtype: str) -> None:
    turn = turning(limit=8192)
    wrong = stored_in_dtype(turning(other, limit=8192).angles, dtype, "cpu")
    assert not swept(turn, wrong, 8192).formula_matches
    assert swept(turn, stored_in_dtype(turn.angles, dtype, "cpu"), 8192).formula_matches


# --- what it does to scores ----------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("way", [stored_in_dtype, product_in_dtype])
def test_scores_move_as_far_as_is_said(way: object, interleaved: bool) -> None:
    """Unit vectors turned by the built rows with the engine's own rotation, against float64."""
    turn = turning(Rope(10_000.0, 32, interleaved=interleaved))  # half of the head turns
    builder = way(turn.angles, "bfloat16", "cpu")  # type: ignore[operator]
    reading = swept(turn, builder, 3001)
    torch.manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(2, 20_000, 64, dtype=torch.float64), dim=-1)
    for shift in reading.score_shifts:
        pair = np.array([3000.0 - shift.distance, 3000.0])
        built = [torch.from_numpy(part) for part in builder.build(pair)]
        wide = [p.repeat_interleave(2, 1) if interleaved else p.repeat(1, 2) for p in built]
        angles = torch.from_numpy(pair[:, None] * turn.angles.frequencies)
        exact = [p.repeat_interleave(2, 1) if interleaved else p.repeat(1, 2)
                 for p in (angles.cos(), angles.sin())]  # fmt: skip

        def score(cos_2D: torch.Tensor, sin_2D: torch.Tensor) -> torch.Tensor:
            q, k = (
                rotate(vectors[i, :, None], cos_2D[1 - i], sin_2D[1 - i], interleaved=interleaved)
                for i in (0, 1)
            )
            return (q * k).sum(dim=(1, 2))

        moved = score(*wide) - score(*exact)
        assert shift.worst is not None
        assert moved.abs().max().item() <= shift.worst
        assert moved.square().mean().sqrt().item() == pytest.approx(shift.rms, rel=0.05)


# --- a whole model -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    ["llama", "llama3-rope", "gemma3", "phi3-longrope", "gpt_neox", "gptj", "glm", "cohere"],
)
def test_transformers_builds_what_the_configuration_says(family: str, tmp_path: Path) -> None:
    """Of its own class, several tables and interleaved pairs included."""
    config = FAMILIES[family]()
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    reading = probe_rope(load(tmp_path), num_positions=500, dtypes=("float32", "bfloat16"))
    built = [one.built_by for table in reading.tables for one in table.readings]
    assert built.count("transformers") == 2 * len(reading.tables)
    assert len(reading.tables) == (2 if family == "gemma3" else 1)
    for table in reading.tables:
        assert table.not_built == ()
        assert all(one.formula_matches for one in table.readings)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared configurations are not here")
def test_transformers_builds_what_every_shared_configuration_says() -> None:
    built = 0
    for file in sorted(SHARED.glob("*_config.json")):
        if file.name.endswith("hf_quant_config.json"):
            continue
        try:
            reading = probe_rope(load(file), num_positions=20_000, dtypes=("float32", "float16"))
        except UnsupportedModel as error:
            assert "rotates" in str(error)
            continue
        for table in reading.tables:
            assert all(one.formula_matches for one in table.readings), file
            built += any(one.built_by == "transformers" for one in table.readings)
    assert built > 40


def test_a_configuration_that_transformers_reads_otherwise_is_told(tmp_path: Path) -> None:
    """A key that ullage's anatomy knows and this class of transformers does not read."""
    wrong = load(llama(tmp_path / "wrong", rope_theta=50_000.0))
    right = load(llama(tmp_path / "right"))
    reading = probe_rope(replace(right, files=wrong.files))
    matches = {one.built_by: one.formula_matches for one in reading.tables[0].readings}
    assert matches["transformers"] is False
    assert matches["ullage"] is True


def test_the_fingerprint_is_the_one_that_servers_export(tmp_path: Path) -> None:
    model = load(llama(tmp_path, rope_parameters={**LLAMA3_ROPE}))
    expected = model_rope_fingerprint(model.anatomy.spec, 1000)
    assert probe_rope(model, num_positions=1000).fingerprint == expected


# --- the command ---------------------------------------------------------------------------------


def test_the_command_says_it_all_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "rope", str(llama(tmp_path)), "--output", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["max_model_len"] == document["positions_checked"] == 2048
    assert document["formulas_match"] is True
    assert document["ranks"] is None
    (table,) = document["tables"]
    assert (table["layers"], table["kind"], table["theta"]) == ([0, 1], "default", 10_000.0)
    ways = {(one["built_by"], one["dtype"]) for one in table["readings"]}
    assert {("ullage", "float32"), ("transformers", "bfloat16")} <= ways
    assert ("transformers-cast", "float16") in ways
    for one in table["readings"]:
        assert [shift["distance"] for shift in one["score_shifts"]] == [1, 16, 256, 2047]


def test_the_command_says_it_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "rope", str(llama(tmp_path)), "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "product-in-dtype" in printed
    assert "257" in printed
    assert "float16 " not in printed.replace("bfloat16 ", "")


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        ({}, ["--max-model-len", "0"], "max-model-len"),
        ({}, ["--max-model-len", "1000000000000"], "--max-model-len"),
        ({}, ["--bound", "4"], "radians"),
        ({}, ["--device", "abacus"], "--device"),
        ({}, ["--ranks"], "torchrun"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, [], "spiral"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    flags: list[str],
    said: str,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["probe", "rope", str(llama(tmp_path, **changes)), *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_a_model_that_does_not_rotate_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "rope", str(write_model("gpt2", tmp_path))]) == 2
    assert "rotates" in capsys.readouterr().err


# --- ranks ---------------------------------------------------------------------------------------


def job(models: list[Path]) -> list[subprocess.CompletedProcess[str]]:
    """One process per model, as ranks of one job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": str(len(models)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    flags = ("--ranks", "--dtype", "float32", "--output", "json")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "ullage", "probe", "rope", str(model), *flags],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, model in enumerate(models)
    ]
    return [
        subprocess.CompletedProcess(one.args, one.wait(timeout=200), *one.communicate(timeout=200))
        for one in ranks
    ]


@pytest.mark.slow
def test_ranks_of_one_model_agree_to_the_bit(tmp_path: Path) -> None:
    first, second = job([llama(tmp_path)] * 2)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    ranks = json.loads(first.stdout)["ranks"]
    assert [one["rank"] for one in ranks] == [0, 1]
    assert all(one["agrees"] and one["same_bits"] for one in ranks)
    assert all(one["angle_difference_rad"] == 0 for one in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"rope_theta": 10_100.0}, {"head_dim": 32}])
def test_a_rank_with_another_configuration_is_named(
    tmp_path: Path, change: dict[str, object]
) -> None:
    models = [llama(tmp_path / "a"), llama(tmp_path / "b", **change)]
    first, second = job(models)
    assert (first.returncode, second.returncode) == (1, 1), first.stderr + second.stderr
    ranks = json.loads(first.stdout)["ranks"]
    assert [one["agrees"] for one in ranks] == [True, False]
    assert ranks[1]["fingerprint"] != ranks[0]["fingerprint"]

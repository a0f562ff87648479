"""What `fix` writes adds the same ΔW to every weight as the original: drawn adapters, two readers.

ΔW is computed here in float64 from the bytes of both files, by PEFT's rules as this file says them;
nothing of the package reads a value or a scale for it.
"""

from __future__ import annotations

import json
import math
import re
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.adapters.cases import BASES, text
from ullage.adapters.rewriting.fix import fix
from ullage.adapters.verdict import ServeOptions
from ullage.anatomy import read_config
from ullage.anatomy.adapters.read import read_adapter

# leaf → (place, in, out); of models of hidden size 64, four heads of 16, two KV heads, 128 inside.
SPLIT = {
    "q_proj": ("self_attn", 64, 64), "k_proj": ("self_attn", 64, 32),
    "v_proj": ("self_attn", 64, 32), "o_proj": ("self_attn", 64, 64),
    "gate_proj": ("mlp", 64, 128), "up_proj": ("mlp", 64, 128), "down_proj": ("mlp", 128, 64),
}  # fmt: skip
FUSED = {
    "qkv_proj": ("self_attn", 64, 128), "o_proj": ("self_attn", 64, 64),
    "gate_up_proj": ("mlp", 64, 256), "down_proj": ("mlp", 128, 64),
}  # fmt: skip
# A leaf of the split layout → the fused one that holds its rows, the first of them.
ROWS = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 64), "v_proj": ("qkv_proj", 96),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 128),
}  # fmt: skip
MODELS = {
    "llama": BASES["llama"],
    "tied": BASES["llama-tied"],
    "phi3": BASES["phi3"],
    "qwen2": text("Qwen2ForCausalLM", "qwen2"),
}
STEMS = (
    "base_model.model.", "", "base_model.model._orig_mod.", "module.base_model.model.",
    "_orig_mod.base_model.model.", "base_model.model.model.",
)  # fmt: skip
TAILS = (".weight", ".default.weight", ".some_name.weight")
Matrices = dict[str, np.ndarray]


@dataclass(frozen=True)
class Drawn:
    """One adapter: its files' contents, and where its modules are in the base's tree."""

    model: str
    stem: str
    tail: str
    ranks: dict[str, int]  # by path
    dtypes: dict[str, tuple[str, str]]
    config: dict[str, Any]
    seed: int

    def write(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        random = np.random.default_rng(self.seed)
        arrays = {}
        for path, rank in self.ranks.items():
            _, inner, outer = {**SPLIT, **FUSED}[path.rpartition(".")[2]]
            for word, shape, dtype in zip(
                "AB", ((rank, inner), (outer, rank)), self.dtypes[path], strict=True
            ):
                name = f"{self.stem}{path}.lora_{word}{self.tail}"
                arrays[name] = (dtype, random.standard_normal(shape, dtype=np.float32))
        (folder / "adapter_model.safetensors").write_bytes(encoded(arrays))


def encoded(arrays: dict[str, tuple[str, np.ndarray]]) -> bytes:
    header, data = {}, b""
    for name, (dtype, values) in arrays.items():
        if dtype == "BF16":
            raw = (values.view("<u4") >> 16).astype("<u2").tobytes()
        else:
            raw = values.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()
        header[name] = {
            "dtype": dtype, "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }  # fmt: skip
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def stored(folder: Path) -> Matrices:
    """Every matrix of the file in float64."""
    raw = (folder / "adapter_model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        first, last = (start + at for at in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw[first:last], "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(raw[first:last], {"F16": "<f2", "F32": "<f4"}[entry["dtype"]])
        found[name] = values.reshape(entry["shape"]).astype(np.float64)
    return found


def scale(config: dict[str, Any], path: str) -> float:
    """alpha/r or alpha/√r, patterns first, as PEFT looks them up."""

    def chosen(field: str, otherwise: float) -> float:
        for pattern, value in (config.get(field) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", path):
                return value
        return otherwise

    rank = chosen("rank_pattern", config["r"])
    alpha = chosen("alpha_pattern", config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def changes(folder: Path, model: str) -> Matrices:
    """ΔW of every weight of the base that the adapter in `folder` changes, by the base's names."""
    config = json.loads((folder / "adapter_config.json").read_text())
    matrices, deltas = stored(folder), {}
    for name, a in matrices.items():
        if ".lora_A" not in name:
            continue
        path = name[name.index("layers.") : name.index(".lora_A")]
        delta = scale(config, f"model.{path}") * matrices[name.replace("lora_A", "lora_B")] @ a
        owner, _, leaf = path.rpartition(".")
        if model == "phi3" and leaf in ROWS:
            fused, first = ROWS[leaf]
            whole = deltas.setdefault(f"{owner}.{fused}", np.zeros((FUSED[fused][2], 64)))
            whole[first : first + len(delta)] += delta
        elif model != "phi3" and leaf in ("qkv_proj", "gate_up_proj"):
            for part, (fused, first) in ROWS.items():
                if fused == leaf:
                    deltas[f"{owner}.{part}"] = delta[first : first + SPLIT[part][2]]
        else:
            deltas[path] = delta
    return deltas


@st.composite
def adapters(draw: st.DrawFn) -> Drawn:
    model = draw(st.sampled_from(sorted(MODELS)))
    layout = draw(st.sampled_from((SPLIT, FUSED)))
    places = [f"model.layers.{i}.{layout[leaf][0]}.{leaf}" for i in range(2) for leaf in layout]
    paths = draw(st.lists(st.sampled_from(places), min_size=1, unique=True))
    usual = draw(st.integers(1, 5))
    ranks = draw(st.dictionaries(st.sampled_from(sorted(layout)), st.integers(1, 5), max_size=3))
    alphas = draw(st.dictionaries(
        st.sampled_from([*sorted(layout), r"layers\.0\..*", r"model\.layers\.1\.mlp\.[a-z_]+"]),
        st.sampled_from((0.5, 1, 3, 16, 32)), max_size=3,
    ))  # fmt: skip
    dtype = st.sampled_from(("F16", "BF16", "F32"))
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": usual,
        "lora_alpha": draw(st.sampled_from((1, 8, 16, 7.5))), "bias": "none",
        "target_modules": sorted({path.rpartition(".")[2] for path in paths}),
        "use_rslora": draw(st.booleans()), "rank_pattern": ranks, "alpha_pattern": alphas,
    }  # fmt: skip
    return Drawn(
        model=model,
        stem=draw(st.sampled_from(STEMS)),
        tail=draw(st.sampled_from(TAILS)),
        ranks={path: ranks.get(path.rpartition(".")[2], usual) for path in paths},
        dtypes={path: (draw(dtype), draw(dtype)) for path in paths},
        config=config,
        seed=draw(st.integers(0, 2**32)),
    )


@given(drawn=adapters(), engine=st.sampled_from(("vllm", "peft")))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_written_changes_every_weight_as_the_original_does(drawn: Drawn, engine: str):
    with tempfile.TemporaryDirectory() as folder:
        made, saved = Path(folder, "made"), Path(folder, "saved")
        drawn.write(made)
        before = {file.name: file.read_bytes() for file in made.iterdir()}
        spec = read_config(MODELS[drawn.model], file="base").spec
        fixed = fix(read_adapter(made), spec, ServeOptions(engine=engine), saved)
        assert fixed.judgement.verdict == "works"
        assert {file.name: file.read_bytes() for file in made.iterdir()} == before
        expected, found = changes(made, drawn.model), changes(saved, drawn.model)
        assert set(found) == set(expected)
        for path, delta in expected.items():
            most = np.abs(delta).max()
            assert np.abs(found[path] - delta).max() <= 1e-6 * most, path

"""The served module tree equals the one that a real vLLM 0.32 wraps, module by module, to the byte.

`vllm_trees.jsonl` holds what vLLM's own LoRAModelManager made of whole models on the meta device
(tools/record_vllm_lora_trees.py): from shared configurations and from the library's defaults.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ullage.adapters.base import base_tree
from ullage.adapters.engines.served import ServedTree, architecture, served_tree
from ullage.adapters.engines.slots import slot_bytes
from ullage.adapters.engines.vllm_keys import expected_names
from ullage.adapters.engines.vllm_slots import why_not_wrapped
from ullage.adapters.verdict import ServeOptions
from ullage.anatomy import read_config
from ullage.anatomy.spec import ModelSpec
from ullage.errors import BadInput

TREES = Path(__file__).with_name("vllm_trees.jsonl")
SHARED = Path(__file__).parents[3] / "shared" / "configs"
# Configurations that the library's defaults leave without a size, which is an error here.
REFUSED = {"ColPaliForRetrieval", "EmbeddingGemma2Model"}
# The base's own names are not known (GlmOcr), or it has modules that are not listed (Whisper's
# cross-attention in vLLM's own cut); the modules that are listed still equal vLLM's.
PARTLY = {"GlmOcrForConditionalGeneration", "WhisperForConditionalGeneration"}


CUTS = (
    ("slot_bytes", 1, False),
    ("slot_bytes_tp2", 2, False),
    ("slot_bytes_tp2_sharded", 2, True),
    ("slot_bytes_tp8", 8, False),
)


@cache
def trees() -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in TREES.read_text().splitlines()]
    return {f"{line['architecture']} {line.get('file', '')}".strip(): line for line in lines}


@pytest.mark.parametrize("name", trees())
def test_the_tree_and_its_slots_are_what_vllm_builds(name):
    recorded = trees()[name]
    file = recorded.get("file")
    if file and not (SHARED / file).is_file():
        pytest.skip("the shared configurations are not here")
    raw = recorded.get("config") or json.loads((SHARED / file).read_text())
    raw.pop("quantization_config", None)
    try:
        spec = read_config(raw, file=name).spec
    except BadInput:
        assert recorded["architecture"] in REFUSED
        return
    found = architecture(recorded["architecture"])
    options = ServeOptions()
    served = served_tree(base_tree(spec), found, pooling=False)
    wrapped = [m for m in served.modules.values() if why_not_wrapped(m, served, options) is None]
    listed = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "{i}", module.path) for module in wrapped)
    assert not listed - Counter(recorded["modules"])
    if recorded["architecture"] in PARTLY:
        return
    assert listed == Counter(recorded["modules"])
    for key, size, sharded in CUTS:
        if recorded.get(key) is not None:
            assert _taken(served, spec, size, sharded) == recorded[key], key
    packed = {k: list(v) for k, v in found.packed.items()}
    supported = {n for name in recorded["supported"] for n in packed.get(name) or [name]}
    supported |= {"experts"} & set(recorded["supported"])
    assert expected_names(served) == supported


def _taken(served: ServedTree, spec: ModelSpec, size: int, sharded: bool) -> int | None:
    """Bytes of one slot on one rank of `size`."""
    options = ServeOptions(tensor_parallel_size=size, fully_sharded_loras=sharded)
    return slot_bytes(
        served, spec, options, 16, lambda module: why_not_wrapped(module, served, options) is None
    )


def test_many_architectures_were_recorded():
    assert len({line["architecture"] for line in trees().values()}) >= 70


@pytest.mark.parametrize(
    ("architecture_name", "key", "renamed"),
    [
        ("Qwen2_5_VLForConditionalGeneration", "base_model.model.model.layers.0.mlp.up_proj",
         "base_model.model.language_model.model.layers.0.mlp.up_proj"),
        ("Qwen3VLForConditionalGeneration", "base_model.model.model.language_model.layers.0.q_proj",
         "base_model.model.language_model.model.layers.0.q_proj"),
        ("MixtralForCausalLM", "base_model.model.x.experts.3.gate_proj.lora_A.weight",
         "base_model.model.x.experts.3.w1.lora_A.weight"),
        ("LlamaForCausalLM", "base_model.model.model.layers.0.q_proj",
         "base_model.model.model.layers.0.q_proj"),
        ("ArceeForCausalLM", "base_model.model.layers.0.q_proj",
         "base_model.model.model.layers.0.q_proj"),
    ],
)  # fmt: skip
def test_keys_are_renamed_as_vllm_renames_them(architecture_name, key, renamed):
    text = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "intermediate_size": 64, "vocab_size": 64, "model_type": "llama"}  # fmt: skip
    spec = read_config({**text, "architectures": ["LlamaForCausalLM"]}, file="config.json").spec
    served = served_tree(base_tree(spec), architecture(architecture_name), pooling=False)
    assert served.rename(key) == renamed

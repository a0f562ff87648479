"""Recent decoders, hybrids, looped stacks and their towers: the library's own models as the oracle.

Stored parameters against meta-device models of each class's defaults, names and shapes against
what would be written, and what a sequence keeps against the cache of a small model that ran.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import transformers_models as oracle

from ullage.anatomy.config.read import read_config
from ullage.anatomy.spec import Anatomy
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.costs.kv import kv_bytes, layers_kv
from ullage.errors import BadInput, UnsupportedModel

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import generate_inventory as inventory

torch = oracle.torch

EXACT = """
AXK2ForCausalLM Apertus1p5ForConditionalGeneration BailingHybridForCausalLM CpmAntForCausalLM
ChameleonForConditionalGeneration DeepseekOcr2ForConditionalGeneration DogeForCausalLM
DoryForCausalLM Emu3ForConditionalGeneration Ernie4_5_VLMoeForConditionalGeneration
Florence2ForConditionalGeneration Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM
Gemma4UnifiedForCausalLM Gemma4UnifiedForConditionalGeneration Glm4vMoeForConditionalGeneration
HYV4ForCausalLM HrmTextForCausalLM Inkling2ForCausalLM Inkling2ForConditionalGeneration
Inkling2LoopForCausalLM Inkling2LoopForConditionalGeneration InklingForCausalLM
InklingForConditionalGeneration JetMoeForCausalLM KyutaiSpeechToTextForConditionalGeneration
Lfm3ForCausalLM Lfm3VlForConditionalGeneration ModernBertDecoderForCausalLM
Molmo2ForConditionalGeneration MoshiForCausalLM MuseGlimmerForConditionalGeneration
MuseSparkForConditionalGeneration Nemotron3_5TranscribeForConditionalGeneration
Qwen2VLForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration Qwen4ExpForCausalLM
Qwen4ExpForConditionalGeneration VibeVoiceAsrForConditionalGeneration
VibeVoiceForConditionalGeneration Zamba2ForCausalLM ZambaForCausalLM ZayaForCausalLM
""".split()  # noqa: SIM905
# Weights are exact; what is kept or worked per token is a range.
WEIGHTS_EXACT = {
    "EvollaForProteinText2Text": ("flops",),
    "Glm5NextForConditionalGeneration": ("kv",),
    "IdeficsForVisionText2Text": ("flops",),
    "UnlimitedOcrForConditionalGeneration": ("flops", "kv"),
}
CLASSES = inventory.classes()


def made(name: str) -> Anatomy:
    raw = inventory.written(inventory.default_config(name, CLASSES[name]), name)
    return read_config(raw, file="config.json")


@pytest.mark.parametrize("name", EXACT)
def test_a_class_stores_what_the_library_s_model_stores(name: str) -> None:
    anatomy = made(name)
    assert anatomy.spec.unknowns == ()
    assert inventory.stored(anatomy.spec) == inventory.counted(name, CLASSES[name])


@pytest.mark.parametrize("name", sorted(WEIGHTS_EXACT))
def test_weights_are_exact_where_only_work_or_cache_is_a_range(name: str) -> None:
    anatomy = made(name)
    assert {w for u in anatomy.spec.unknowns for w in u.widens} == set(WEIGHTS_EXACT[name])
    count = inventory.counted(name, CLASSES[name])
    assert [inventory.stored(s) for s in (anatomy.low, anatomy.spec, anatomy.high)] == [count] * 3


# --- names ---------------------------------------------------------------------------------------

NAMED: dict[str, dict[str, Any]] = {
    "axk2": {},
    "bailing_hybrid": {"layer_group_size": 2},
    "cpmant": {},
    "doge": {},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "gemma4_unified_text": {},
    "hrm_text": {},
    "hy_v4": {"indexer_types": ["full", "full", "shared", "full"]},
    "inkling_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "inkling2_text": {
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding"],
        "n_layers_per_attn_res_block": 2,
    },
    "jetmoe": {},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    "modernbert-decoder": {},
    "moshi": {},
    "zaya": {},
}


@pytest.mark.parametrize("model_type", sorted(NAMED))
def test_tensors_are_named_and_shaped_as_the_library_holds_them(model_type: str) -> None:
    config, model = oracle.short_config(model_type, "AutoModelForCausalLM", **NAMED[model_type])
    spec = read_config(oracle.as_json(config, model), file="t").spec
    tensors = [tensor for tensor in expected_tensors(spec) if tensor.stack != "mtp"]
    assert all(tensor.named for tensor in tensors)
    mine = {}
    for tensor in tensors:
        for e in range(tensor.count):
            mine[tensor.name.replace("{e}", str(e))] = tensor.shape
    assert mine in (oracle.disk_shapes(model), oracle.state_shapes(model))


# --- what a sequence keeps -----------------------------------------------------------------------

_SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_MLA = {
    "kv_lora_rank": 24, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
RUN: dict[str, dict[str, Any]] = {
    "doge": {"num_hidden_layers": 3},
    "dory": {"num_hidden_layers": 6, "head_dim": 16, "n_input_layers": 1, "n_output_layers": 2,
             "n_recurrent_loops": 3},
    "dory last loop": {"num_hidden_layers": 6, "head_dim": 16, "n_input_layers": 1,
                       "n_output_layers": 2, "n_recurrent_loops": 3,
                       "recurrent_kv_cache_mode": "last_loop"},
    "hrm_text": {"num_hidden_layers": 2, "head_dim": 16, "H_cycles": 2, "L_cycles": 3},
    "jetmoe": {"num_hidden_layers": 2, "kv_channels": 16, "num_local_experts": 4,
               "num_experts_per_tok": 2, "num_attention_heads": 4},
    "lfm3": {"num_hidden_layers": 4, "head_dim": 16,
             "layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    "modernbert-decoder": {"num_hidden_layers": 3, "local_attention": 40, "cls_token_id": 1,
                           "sep_token_id": 2},
    "moshi": {"num_hidden_layers": 2, "head_dim": 16, "ffn_dim": 64, "sliding_window": 50},
    "zamba": {"num_hidden_layers": 9, "attention_head_dim": 32, "attention_hidden_size": 128,
              "use_mamba_kernels": False, "num_key_value_heads": 4, "mamba_dt_rank": 4},
    "zaya": {"num_hidden_layers": 3, "head_dim": 16, "moe_intermediate_size": 32,
             "num_experts": 4, "router_hidden_size": 32},
}  # fmt: skip
LENGTH = 11


@pytest.mark.parametrize("case", sorted(RUN))
def test_a_sequence_keeps_what_the_library_s_cache_holds(case: str) -> None:
    """Keys and values of a small model that ran over a few tokens, element by element."""
    cls = oracle.CONFIG_MAPPING[case.partition(" ")[0]]
    known = set(getattr(cls, "__dataclass_fields__", {}))
    config = cls(**{k: v for k, v in _SMALL.items() if k in known} | RUN[case])
    torch.manual_seed(0)
    model = oracle.transformers.AutoModelForCausalLM.from_config(config).eval().float()
    spec = read_config(oracle.as_json(config, model), file="t").spec
    with torch.no_grad():
        cache = model(torch.arange(LENGTH)[None] + 3, use_cache=True).cache
    held = [
        layer.keys.numel() + layer.values.numel()
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None and layer.keys.numel()
    ]
    mine = [row.bytes_at(LENGTH) - row.state_bytes for row in layers_kv(spec)]
    assert sorted(size // 2 for size in mine if size) == sorted(held)
    assert sum(held) > 0


def test_convolution_tails_are_state_beside_the_cache() -> None:
    """Zaya: the queries' and keys' two convolutions and the value of the token before."""
    config, model = oracle.short_config("zaya", "AutoModelForCausalLM")
    raw = oracle.as_json(config, model)
    spec = read_config(raw, file="t").spec
    channels = (8 + 2) * 128
    assert {layer.conv_tail for layer in spec.layers} == {2 * channels + 128}
    per_layer = kv_bytes(spec, 0) // len(spec.layers)
    assert per_layer == 2 * (2 * channels + 128)


def test_a_draft_without_a_cache_of_its_own_keeps_nothing() -> None:
    spec = made("Gemma4UnifiedAssistantForCausalLM").spec
    assert kv_bytes(spec, 1000) == 0
    assert not [t for t in expected_tensors(spec) if t.role in ("k", "v")]


# --- weights that are run again ------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("adapted", [False, True])
def test_zamba2_blocks_are_stored_once_and_adapters_per_use(blocks: int, adapted: bool) -> None:
    kinds = ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"]
    config = oracle.CONFIG_MAPPING["zamba2"](
        num_hidden_layers=6, layers_block_type=kinds, num_mem_blocks=blocks,
        use_shared_attention_adapter=adapted, hidden_size=128, num_attention_heads=4,
        intermediate_size=256, n_mamba_heads=4,
    )  # fmt: skip
    model = oracle.build(config, "AutoModelForCausalLM")
    spec = read_config(oracle.as_json(config, model), file="t").spec
    mine = sum(t.num_elements for t in expected_tensors(spec))
    assert mine == sum(v[0].numel() for v in _shared_once(model).values())
    assert sum(layer.weights_from is not None for layer in spec.layers) == 3 - blocks
    growing = [row for row in layers_kv(spec) if row.token_bytes]
    assert [row.token_bytes for row in growing] == [2 * 4 * 64 * 2] * 3


def _shared_once(model: Any) -> dict[int, list[Any]]:
    """Parameters by identity, tied ones once."""
    found: dict[int, list[Any]] = {}
    for parameter in model.parameters():
        found.setdefault(id(parameter), []).append(parameter)
    return found


def test_a_loop_may_not_run_without_end() -> None:
    config = oracle.CONFIG_MAPPING["dory"]()
    raw = config.to_dict() | {"n_recurrent_loops": 10**9, "architectures": ["DoryForCausalLM"]}
    with pytest.raises(BadInput, match="n_recurrent_loops: found 1000000000"):
        read_config(raw, file="t")


# --- rows that hold for some values only ---------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "change", "says"),
    [
        ("doge", {"is_moe": True}, "is_moe: true in the family doge; expected false"),
        ("zamba2", {"add_bias_linear": True}, "add_bias_linear: true in the family zamba2"),
        ("idefics", {"qk_layer_norms": True}, "qk_layer_norms: true in the family idefics"),
        (
            "moshi",
            {"architectures": ["MoshiForConditionalGeneration"]},
            'architectures: "MoshiForConditionalGeneration" has parts that are not understood',
        ),
        (
            "fast_vlm",
            {"vision_config": {"model_type": "timm_wrapper", "architecture": "vit_huge_x"}},
            "a tower of timm, vit_huge_x, whose size is not known",
        ),
    ],
)
def test_what_a_row_does_not_hold_for_is_refused(
    model_type: str, change: dict[str, Any], says: str
) -> None:
    raw = oracle.CONFIG_MAPPING[model_type]().to_dict() | change
    with pytest.raises(UnsupportedModel) as error:
        read_config(raw, file="config.json")
    assert says in str(error.value)


def test_a_tower_with_arguments_of_its_own_is_a_range_around_its_parts() -> None:
    """Perception-LM: the library's projector and timm 1.0.31's 316,102,656 lie inside."""
    anatomy = made("PerceptionLMForConditionalGeneration")
    text = inventory.stored(anatomy.low) - sum(t.parameters or 0 for t in anatomy.low.towers)
    true = text + 316_102_656 + 1024 * 4096 + 4096 + 4096 * 4096 + 4096
    assert inventory.stored(anatomy.low) < true < inventory.stored(anatomy.high)

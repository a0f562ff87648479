"""Random reduced models and limits to compare with a real vLLM, from a seed.

Holds the reduction of a configuration to a few layers, experts and tokens (keeping what shapes the
KV cache) and the draw of limits. Asking vLLM is `tools/vllm_oracle.py`; comparing is the tests'.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = dict[str, Any]

SHARED = Path(__file__).parents[3] / "shared" / "configs"
MIB = 2**20

TEXT_KEYS = ("text_config", "llm_config", "language_config")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "dense_intermediate_size",
    "intermediate_size_mlp",
    "share_expert_dim",
    "ffn_hidden_size",
    "n_inner",
)
LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
PATTERNS = ("layer_types", "layers_block_type", "hybrid_override_pattern", "compress_ratios")

LIBRARY = (
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "cohere2",
    "olmo3",
    "exaone4",
    "smollm3",
    "gpt_oss",
    "llama4_text",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "starcoder2",
    "bloom",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "falcon_h1",
    "jamba",
    "granitemoehybrid",
    "lfm2",
    "deepseek_v2",
    "deepseek_v3",
    "bert",
    "roberta",
    "apertus",
)
"""Model types whose configuration's defaults are drawn from beside the shared files."""


@dataclass(frozen=True)
class Case:
    """One question: a configuration, vLLM's limits (names of EngineArgs), and how it is used."""

    name: str
    config: Config
    limits: Config
    usage: str = "server"

    def as_json(self) -> Config:
        return {
            "name": self.name,
            "config": self.config,
            "limits": self.limits,
            "usage": self.usage,
        }


def reduce_config(config: Config, draw: random.Random, *, layers: int | None = None) -> Config:
    """The same model with few layers, experts and tokens. Heads, head sizes, states and windows
    stay, since they shape the cache; the pattern of layer kinds is cut after every kind occurred.
    """
    config = json.loads(json.dumps(config))
    text = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), dict)), config)
    for holder in (config, text):
        # The CPU has no kernels for most formats, and weights do not shape the cache.
        holder.pop("quantization_config", None)
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        # vLLM's CPU backend has no ungated experts; what follows a mixer shapes no cache.
        text["hybrid_override_pattern"] = pattern.replace("E", "-")
    _cut_layers(text, draw, layers)
    _cut_experts(text)
    for key in WIDTHS:
        if isinstance(text.get(key), int) and text[key] > 256 and not _sizes_a_state(text, key):
            text[key] = 256
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if isinstance(text.get(key), int):
            text[key] = 512
            config.update({key: 512} if key in config else {})
    for key, value in list(text.items()):
        if key.endswith("token_id") and isinstance(value, int):
            text[key] = value % 512
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"):
        if key in text:
            text[key] = 0
    positions = text.get("max_position_embeddings")
    if isinstance(positions, int):  # a table of ten million angles is slow, and shapes no cache
        text["max_position_embeddings"] = min(positions, 32_768)
    _cut_hidden(text)
    return config


def _sizes_a_state(text: Config, key: str) -> bool:
    """Mamba-1 calls its inner width intermediate_size."""
    return key == "intermediate_size" and "time_step_rank" in text and "mamba_num_heads" not in text


def _cut_hidden(text: Config) -> None:
    """A narrow residual stream where no head or state size follows from its width."""
    explicit = text.get("head_dim") or text.get("kv_lora_rank") or text.get("attention_head_dim")
    derived = ("mamba_expand", "mamba_d_ssm", "conv_L_cache", "expand", "hc_mult")
    if explicit and not any(key in text for key in derived) and "hidden_size" in text:
        text["hidden_size"] = 512


def _cut_experts(text: Config) -> None:
    for key in EXPERT_COUNTS:
        if isinstance(text.get(key), int) and text[key] > 4:
            text[key] = 4
    for key in TOP_K:
        if key in text:  # some defaults leave it null
            text[key] = min(text[key] or 2, 2)
    for key in ("n_group", "topk_group"):
        if isinstance(text.get(key), int):
            text[key] = 1
    if isinstance(text.get("first_k_dense_replace"), int):
        text["first_k_dense_replace"] = 1


def _cut_layers(text: Config, draw: random.Random, layers: int | None) -> None:
    key = next((k for k in LAYER_COUNTS if isinstance(text.get(k), int)), None)
    if key is None:
        return
    total = text[key]
    least = 1
    for name in PATTERNS:
        pattern = text.get(name)
        if isinstance(pattern, list | str) and len(pattern) >= total:
            kinds = set(pattern[:total])
            least = max(least, 1 + max(list(pattern).index(kind) for kind in kinds))
    for name in ("full_attention_interval", "sliding_window_pattern", "attn_layer_period"):
        if isinstance(text.get(name), int):
            least = max(least, text[name])
    shares = text.get("num_kv_shared_layers") or 0
    kept = min(total, layers or least + draw.choice((1, 2, 3, 4) if shares else (0, 0, 1, 2, 3)))
    text[key] = kept
    if shares:  # the layers before the sharers must have one of each kind
        text["num_kv_shared_layers"] = min(shares, kept - least)
    _cut_lists(text, total, kept)
    for name in ("attn_layer_indices", "mlp_only_layers", "full_attn_idxs"):
        if isinstance(text.get(name), list):
            text[name] = [index for index in text[name] if index < kept]
    if isinstance(text.get("max_window_layers"), int):
        text["max_window_layers"] = min(text["max_window_layers"], kept)


def _cut_lists(holder: Config, total: int, kept: int) -> None:
    """Cut whatever has an entry per layer, in nested objects too."""
    for name, value in list(holder.items()):
        if isinstance(value, dict):
            _cut_lists(value, total, kept)
        elif isinstance(value, str) and name not in PATTERNS:
            continue
        elif isinstance(value, list | str) and total > 2 and len(value) in (total, total + 1):
            holder[name] = value[:kept]
    per_layer = holder.get("per_layer_config")
    if isinstance(per_layer, dict):
        holder["per_layer_config"] = {k: v for k, v in per_layer.items() if int(k) < kept}


NO_CPU_START = (
    "DeepSeek-V3.2",
    "DeepSeek-V4",
    "GLM-5",
    "MiniMax-M3",
    "MiMo-7B",
    "Step-3.7",
)
"""Shared models that vLLM 0.32 cannot start on a CPU: sparse attention and compressed attention
have no kernels there, the rest are unknown to it without code from the checkpoint."""


def draw_limits(draw: random.Random, most_positions: int) -> Config:
    """Limits within the bounds that vLLM states: half of them left to the engine."""
    limits: Config = {"kv_cache_memory_bytes": draw.randint(24, 400) * MIB + draw.choice((0, 7))}
    length = min(most_positions, draw.choice((512, 1000, 2048, 4096, 6000, 8192, 16384)))
    limits["max_model_len"] = length if draw.random() < 0.85 else -1  # −1: fitted to the memory
    limits["max_num_seqs"] = draw.choice((None, 4, 16, 64))
    limits["max_num_batched_tokens"] = draw.choice((None, None, 128, 777, 1024, 4096))
    limits["block_size"] = draw.choice((None, None, 32, 64, 96, 128, 256))
    limits["kv_cache_dtype"] = draw.choice(("auto", "auto", "auto", "fp8", "fp8_e5m2"))
    limits["dtype"] = draw.choice(("auto", "auto", "float32", "float16"))
    limits["enable_prefix_caching"] = draw.choice((None, True, False))
    batched, seqs = limits["max_num_batched_tokens"], limits["max_num_seqs"]
    if batched is not None and seqs is None:
        limits["max_num_seqs"] = 8
    return {key: value for key, value in limits.items() if value is not None}


def sources() -> Iterator[tuple[str, Callable[[], Config]]]:
    """(name, reader) of every configuration that can be drawn."""
    for path in sorted(SHARED.glob("*_config.json")):
        if path.name.endswith("hf_quant_config.json"):
            continue
        if not any(name in path.name for name in NO_CPU_START):
            yield path.name.removesuffix("_config.json"), lambda p=path: json.loads(p.read_text())
    for model_type in LIBRARY:
        yield f"library--{model_type}", lambda t=model_type: library_default(t)


def library_default(model_type: str) -> Config:
    """The default configuration of a model type in transformers, as its config.json would be."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    config = json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if model_type in ("bert", "roberta") or names is None:
        names = MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(model_type, names)
    config["architectures"] = [names if isinstance(names, str) else names[0]]
    # Every published LFM2 states these; the class that vLLM reads them from has no default.
    if model_type == "lfm2":
        config |= {"block_dim": 2560, "conv_dim": 2560, "block_ff_dim": 1024}
        config |= {"block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0}
    config.setdefault("dtype", None)
    config["dtype"] = config["dtype"] or "bfloat16"
    return config


def most_positions(config: Config) -> int:
    """The configured maximum length, 4,096 where none is."""
    text = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), dict)), config)
    return int(next((text[key] for key in LENGTHS if isinstance(text.get(key), int)), 4096))


def names_its_length(config: Config) -> bool:
    text = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), dict)), config)
    return any(isinstance(text.get(key), int) for key in LENGTHS)


def draw_case(seed: int, pool: list[tuple[str, Callable[[], Config]]]) -> Case:
    """The case of one seed; the same seed gives the same case."""
    draw = random.Random(seed)  # noqa: S311
    name, read = draw.choice(pool)
    return case_of(name, read(), seed)


def case_of(name: str, config: Config, seed: int) -> Case:
    """One model reduced, with limits, both drawn from the seed."""
    draw = random.Random(seed)  # noqa: S311
    config = reduce_config(config, draw)
    limits = draw_limits(draw, most_positions(config))
    if limits["max_model_len"] == -1 and not names_its_length(config):
        limits["max_model_len"] = 2048  # vLLM refuses to fit what has no maximum
    if any(isinstance(config.get(key), dict) for key in TEXT_KEYS):
        limits["language_model_only"] = True
    usage = draw.choice(("server", "server", "library"))
    return Case(f"{name}--{seed}", config, limits, usage)

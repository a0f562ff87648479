"""Adapters of the field, each with a twin that must stay silent: what is judged, and the verdict.

The first table holds every case that was reported (research: adapters that load and do nothing);
the second as many again of other kinds and families. Files are written from shapes alone, with
values that are not zero; what the shapes must be is said here, not asked of the package.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# --- base models ---------------------------------------------------------------------------------

TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 56, "patch_size": 14, "num_channels": 3,
}  # fmt: skip
QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
}  # fmt: skip


def text(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {**TEXT, "architectures": [architecture], "model_type": model_type, **more}


def wrapper(
    architecture: str, model_type: str, text_type: str, vision: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture], "model_type": model_type, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "text_config": {**TEXT, "model_type": text_type},
        "vision_config": dict(vision), **more,
    }  # fmt: skip


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BASES: dict[str, dict[str, Any]] = {
    "llama": text("LlamaForCausalLM", "llama"),
    "llama-tied": text("LlamaForCausalLM", "llama", tie_word_embeddings=True),
    "llama-classes": text("LlamaForSequenceClassification", "llama", num_labels=2),
    "qwen2": text("Qwen2ForCausalLM", "qwen2"),
    "qwen3": text("Qwen3ForCausalLM", "qwen3"),
    "gemma2": text(
        "Gemma2ForCausalLM", "gemma2", tie_word_embeddings=True, query_pre_attn_scalar=16,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "gemma4-shared": text(
        "Gemma4ForCausalLM", "gemma4_text", num_kv_shared_layers=1, tie_word_embeddings=True,
        layer_types=["full_attention", "full_attention"], hidden_size_per_layer_input=0,
        global_head_dim=16, num_global_key_value_heads=2,
    ),
    "phi3": text("Phi3ForCausalLM", "phi3", pad_token_id=0),
    "glm4": text("Glm4ForCausalLM", "glm4", partial_rotary_factor=0.5),
    "mixtral": text("MixtralForCausalLM", "mixtral", **EXPERTS),
    "qwen3-moe": text(
        "Qwen3MoeForCausalLM", "qwen3_moe", num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
    ),
    "gpt-oss": text(
        "GptOssForCausalLM", "gpt_oss", **EXPERTS, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "falcon": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256, "multi_query": True,
        "parallel_attn": True, "bias": False, "torch_dtype": "bfloat16", "alibi": False,
        "new_decoder_architecture": False,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2,
        "n_head": 4, "vocab_size": 256, "n_positions": 128, "torch_dtype": "float32",
    },
    "llava": wrapper("LlavaForConditionalGeneration", "llava", "llama",
                     {**VISION, "model_type": "clip_vision_model"}, image_token_index=255),
    "qwen2.5-vl": {
        **text("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {**QWEN_VISION, "model_type": "qwen2_5_vl"},
    },
    "qwen3-vl": wrapper("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text",
                        {**QWEN_VISION, "model_type": "qwen3_vl"}),
    "gemma3": wrapper("Gemma3ForConditionalGeneration", "gemma3", "gemma3_text",
                      {**VISION, "model_type": "siglip_vision_model"}, mm_tokens_per_image=4),
}  # fmt: skip

# The sides [in, out] of every module of these sizes, by its last name.
SIDES: dict[str, tuple[int, int]] = {
    "q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32), "o_proj": (64, 64),
    "gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64), "qkv_proj": (64, 128),
    "gate_up_proj": (64, 256), "lm_head": (64, 256), "w1": (64, 128), "w3": (64, 128),
    "w2": (128, 64), "c_attn": (64, 192), "c_fc": (64, 256), "query_key_value": (64, 96),
    "qkv": (32, 96), "proj": (32, 32), "linear_fc1": (32, 64), "fc1": (32, 64),
    "out_proj": (32, 32),
    "gate": (64, 4), "score": (64, 2),
}  # fmt: skip

# --- adapters ------------------------------------------------------------------------------------

Shapes = dict[str, tuple[int, ...]]


def names(*modules: str, layers: int = 2, tree: str = "model.layers.{i}.") -> list[str]:
    """The modules of every layer, by path."""
    return [tree.format(i=layer) + module for layer in range(layers) for module in modules]


QV = ("self_attn.q_proj", "self_attn.v_proj")
ALL = (*QV, "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def pairs(
    modules: list[str],
    *,
    stem: str = "base_model.model.",
    rank: int = 8,
    leaf: str = ".lora_{}.weight",
    sides: Mapping[str, tuple[int, int]] = SIDES,
) -> Shapes:
    """A [rank, in] and B [out, rank] for each module."""
    shapes: Shapes = {}
    for module in modules:
        inner, outer = sides[module.rpartition(".")[2]]
        shapes[stem + module + leaf.format("A")] = (rank, inner)
        shapes[stem + module + leaf.format("B")] = (outer, rank)
    return shapes


@dataclass(frozen=True)
class Case:
    """One adapter on one base for one engine: what must be said, and of how many modules.

    `message` is a part of what the engine prints. `files` writes more files into the folder.
    """

    base: str
    shapes: Shapes
    verdict: str
    matched: int
    total: int
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    message: str | None = None
    states: tuple[str, ...] = ()
    engine: str = "vllm"
    weights: str = "adapter_model.safetensors"
    files: Callable[[Path], object] | None = None


def works(base: str, shapes: Shapes, total: int, **more: Any) -> Case:
    return Case(base, shapes, "works", total, total, **more)


def nothing(base: str, shapes: Shapes, total: int, **more: Any) -> Case:
    return Case(base, shapes, "no_effect", 0, total, **more)


def refused(base: str, shapes: Shapes, total: int, message: str, **more: Any) -> Case:
    return Case(base, shapes, "rejected", 0, total, message=message, **more)


_VL_TEXT = names(*QV, tree="model.language_model.layers.{i}.")
_TOWER = names("attn.qkv", tree="model.visual.blocks.{i}.")

REPORTED: dict[str, tuple[Case, Case]] = {
    "vllm#34186 text tree on a wrapper": (
        nothing("llava", pairs(names(*QV)), 4, states=("unmapped",)),
        works("llava", pairs(_VL_TEXT), 4),
    ),
    "vllm#48019 vision-language text adapter": (
        nothing("qwen3-vl", pairs(names(*QV)), 4, states=("unmapped",)),
        works("qwen3-vl", pairs(_VL_TEXT), 4),
    ),
    "vllm#39369 another wrapper": (
        nothing("gemma3", pairs(names(*QV)), 4, states=("unmapped",)),
        works("gemma3", pairs(_VL_TEXT), 4),
    ),
    "vllm#41702 a tower's module": (
        refused("gemma3", pairs(["model.vision_tower.encoder.layers.0.mlp.down_proj.linear"],
                                sides={"linear": (64, 32)}), 1, "expected target modules in"),
        works("gemma3", pairs(_VL_TEXT), 4),
    ),
    "vllm#9280 modules_to_save": (
        refused("llama", pairs(names(*QV)) | {"base_model.model.lm_head.weight": (256, 64)}, 5,
                "Unsupported modules_to_save: ['lm_head']",
                config={"modules_to_save": ["lm_head"]}),
        works("llama", pairs([*names(*QV), "lm_head"]), 5),
    ),
    "vllm#6983 DoRA": (
        refused("llama", pairs(names("mlp.down_proj")) | {
            f"base_model.model.{m}.lora_magnitude_vector": (64,) for m in names("mlp.down_proj")
        }, 2, "vLLM does not yet support DoRA.", config={"use_dora": True}),
        works("llama", pairs(names("mlp.down_proj")), 2),
    ),
    "vllm#10798 rsLoRA": (
        works("llama", pairs(names(*QV)), 4, config={"use_rslora": True}),
        works("llama", pairs(names(*QV)), 4),
    ),
    "peft#1579 a model without its head": (
        nothing("llama", pairs(names(*QV, tree="layers.{i}.")), 4, states=("unmapped",)),
        works("llama", pairs(names(*QV)), 4),
    ),
    "ms-swift#4221 rank 64": (
        refused("llama", pairs(names(*QV), rank=64), 4,
                "LoRA rank 64 is greater than max_lora_rank 16.", config={"r": 64}),
        works("llama", pairs(names(*QV), rank=64), 4, config={"r": 64},
              options={"max_lora_rank": 64}),
    ),
    "vllm#2847 rank 32": (
        refused("llama", pairs(names(*QV), rank=32), 4,
                "LoRA rank 32 is greater than max_lora_rank 16.", config={"r": 32}),
        works("llama", pairs(names(*QV), rank=16), 4, config={"r": 16}),
    ),
    "compiled model": (
        nothing("llama", pairs(names(*QV), stem="base_model.model._orig_mod."), 4),
        works("llama", pairs(names(*QV)), 4),
    ),
    "compiled adapter": (
        nothing("llama", pairs(names(*QV), stem="_orig_mod.base_model.model."), 4),
        works("llama", pairs(names(*QV)), 4),
    ),
    "FSDP around the layers": (
        nothing("llama", pairs(names(*QV, tree="model.layers.{i}._fsdp_wrapped_module.")), 4),
        works("llama", pairs(names(*QV)), 4),
    ),
}  # fmt: skip

# --- of other kinds ------------------------------------------------------------------------------

_EACH = [f"experts.{e}.{w}" for e in range(4) for w in ("w1", "w2", "w3")]
_MIXTRAL = names(*(f"block_sparse_moe.{m}" for m in _EACH))
_QWEN_EACH = names(*(f"mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down")))
_QWEN_SIDES = {"gate_proj": (64, 32), "up_proj": (64, 32), "down_proj": (32, 64)}


def stacked(tree: str, hidden: int, inner: int, rank: int = 8, experts: int = 4) -> Shapes:
    """PEFT's target_parameters on stacked experts: gate_up is innermost, down is around it."""
    stem = "base_model.model."
    shapes: Shapes = {}
    for path in names("mlp.experts", tree=tree):
        shapes |= {
            f"{stem}{path}.base_layer.lora_A.weight": (rank * experts, hidden),
            f"{stem}{path}.base_layer.lora_B.weight": (2 * inner, rank * experts),
            f"{stem}{path}.lora_A.weight": (rank * experts, inner),
            f"{stem}{path}.lora_B.weight": (hidden, rank * experts),
        }
    return shapes


_PARAMETERS = {
    "target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
}  # fmt: skip
_PLAIN = works("llama", pairs(names(*QV)), 4)

OTHERS: dict[str, tuple[Case, Case]] = {
    "the adapter's name left in the keys": (
        refused("qwen2", pairs(names(*QV), leaf=".lora_{}.default.weight"), 4,
                "lora_A.default.weight is unsupported LoRA weight"),
        works("qwen2", pairs(names(*ALL)), 14),
    ),
    "DDP's prefix": (
        nothing("qwen3", pairs(names(*QV), stem="module.base_model.model."), 4),
        works("qwen3", pairs(names(*ALL)), 14),
    ),
    "activation checkpointing inside": (
        nothing("qwen3", pairs(names(*QV, tree="model.layers.{i}._checkpoint_wrapped_module.")), 4),
        works("qwen3", pairs(names(*QV)), 4),
    ),
    "half of it wrapped": (
        Case("llama", pairs(names("self_attn.q_proj"))
             | pairs(names("self_attn.v_proj"), stem="base_model.model._orig_mod."),
             "partial", 2, 4, states=("applied", "unmapped")),
        _PLAIN,
    ),
    "no prefix at all": (
        works("llama", pairs(names(*QV), stem=""), 4),
        _PLAIN,
    ),
    "layers that the base lacks": (
        Case("llama", pairs(names(*QV, layers=4)), "partial", 4, 8,
             states=("applied", "unmapped")),
        _PLAIN,
    ),
    "a wider base's adapter": (
        refused("llama", pairs(names("self_attn.q_proj"), sides={"q_proj": (128, 64)}), 2,
                "The size of tensor a (64) must match the size of tensor b (128)"),
        _PLAIN,
    ),
    "a narrower base's adapter": (
        Case("llama", pairs(names("self_attn.q_proj"), sides={"q_proj": (32, 32)}), "partial", 0, 2,
             states=("shape_mismatch",)),
        _PLAIN,
    ),
    "split names on a fused model": (
        refused("phi3", pairs(names("self_attn.q_proj")), 2, "expected target modules in"),
        works("phi3", pairs(names("self_attn.qkv_proj", "mlp.gate_up_proj")), 4),
    ),
    "fused names on a split model": (
        refused("llama", pairs(names("self_attn.qkv_proj")), 2, "expected target modules in"),
        works("llama", pairs(names("self_attn.q_proj")), 2),
    ),
    "fused names where vLLM splits them": (
        refused("glm4", pairs(names("mlp.gate_up_proj")), 2, "expected target modules in"),
        works("glm4", pairs(names(*QV, "mlp.down_proj")), 6),
    ),
    "an architecture without adapters": (
        refused("gpt2", pairs(names("attn.c_attn", tree="transformer.h.{i}.")), 2,
                "GPT2LMHeadModel does not support LoRA yet.", config={"fan_in_fan_out": True}),
        _PLAIN,
    ),
    "another without": (
        refused("falcon", pairs(names("self_attention.query_key_value",
                                      tree="transformer.h.{i}.")), 2,
                "FalconForCausalLM does not support LoRA yet."),
        _PLAIN,
    ),
    "experts one by one": (
        Case("mixtral", pairs(_MIXTRAL[:-3]), "rejected", 0, 21),
        works("mixtral", pairs(_MIXTRAL), 24),
    ),
    "experts stacked where they are served one by one": (
        refused("qwen3-moe", stacked("model.layers.{i}.", 64, 32), 4,
                "contains fused 3D MoE weights", config=_PARAMETERS),
        works("qwen3-moe", pairs(names(*QV)), 4),
    ),
    "a mixture's newer names": (
        nothing("mixtral", stacked("model.layers.{i}.", 64, 128), 4, config=_PARAMETERS,
                states=("unmapped",)),
        works("mixtral", pairs(names(*QV)), 4),
    ),
    "the router's newer name": (
        nothing("mixtral", pairs(names("mlp.gate")), 2, states=("unmapped",)),
        works("mixtral", pairs(names("block_sparse_moe.gate")), 2),
    ),
    "experts stacked where they are served stacked": (
        works("gpt-oss", stacked("model.layers.{i}.", 64, 128), 4, config=_PARAMETERS),
        works("gpt-oss", pairs(names(*QV, tree="model.layers.{i}.")), 4),
    ),
    "experts one by one where they are served stacked": (
        refused("gpt-oss", pairs(names(*(f"mlp.experts.{e}.down_proj" for e in range(4)))), 8,
                "expected target modules in"),
        works("qwen3-moe", pairs(_QWEN_EACH, sides=_QWEN_SIDES), 24),
    ),
    "a dense model's adapter on a mixture": (
        refused("qwen3-moe", pairs(names("mlp.up_proj")), 2, "expected target modules in"),
        works("qwen3-moe", pairs(names(*QV)), 4),
    ),
    "a router that its mixture holds too": (
        nothing("qwen3-moe", pairs(names("mlp.gate")), 2, states=("ignored",)),
        works("qwen3-moe", pairs(names("mlp.gate")), 2,
              options={"lora_target_modules": ("gate", "qkv_proj")}),
    ),
    "the router": (
        refused("mixtral", pairs(names("block_sparse_moe.router"), sides={"router": (64, 4)}), 2,
                "expected target modules in"),
        works("mixtral", pairs(names("block_sparse_moe.gate")), 2),
    ),
    "an embedding of another vocabulary": (
        refused("llama", {"base_model.model.model.embed_tokens.lora_embedding_A": (8, 260),
                          "base_model.model.model.embed_tokens.lora_embedding_B": (64, 8)}, 1,
                "The embedding LoRA size(260) must be consistent with the base model's "
                "vocabulary size(256)."),
        works("llama", {"base_model.model.model.embed_tokens.lora_embedding_A": (8, 256),
                        "base_model.model.model.embed_tokens.lora_embedding_B": (64, 8)}, 1),
    ),
    "an embedding that is not served": (
        refused("gemma2", {"base_model.model.model.embed_tokens.lora_embedding_A": (8, 256),
                           "base_model.model.model.embed_tokens.lora_embedding_B": (64, 8)}, 1,
                "received ['model.embed_tokens', 'model.embed_tokens']"),
        works("gemma2", pairs(names(*ALL)), 14),
    ),
    "a tied head": (
        refused("gemma2", pairs(["lm_head"]), 1, "received ['lm_head', 'lm_head']"),
        works("llama-tied", pairs(["lm_head", *names(*QV)]), 5),
    ),
    "a trained copy of the embedding": (
        refused("llama", pairs(names(*QV))
                | {"base_model.model.model.embed_tokens.weight": (256, 64)},
                5, "embed_tokens.weight is unsupported LoRA weight"),
        works("llama", pairs([*names(*QV), "lm_head"])
              | {"base_model.model.lm_head.base_layer.weight": (256, 64)}, 5),
    ),
    "a classifier on a model that generates": (
        refused("llama", pairs(names(*QV)) | {"base_model.model.score.weight": (2, 64)}, 5,
                "Cannot load full module 'score'", config={"modules_to_save": ["score"]}),
        works("llama-classes", pairs(names(*QV)) | {"base_model.model.score.weight": (2, 64)}, 5,
              config={"modules_to_save": ["score"], "task_type": "SEQ_CLS"}),
    ),
    "biases": (
        refused("llama", pairs(names(*QV)) | {
            f"base_model.model.{m}.lora_B.bias": (SIDES[m.rpartition('.')[2]][1],)
            for m in names(*QV)
        }, 4, "vLLM does not support LoRA bias (lora_bias).", config={"lora_bias": True}),
        _PLAIN,
    ),
    "biases of the base": (
        refused("llama", pairs(names(*QV)), 4, "Adapter bias is not supported.",
                config={"bias": "lora_only"}),
        works("llama", pairs(names(*QV)), 4, config={"bias": "none"}),
    ),
    "an init that changed the base": (
        refused("llama", pairs(names(*QV)), 4, "vLLM does not support init_lora_weights='pissa'.",
                config={"init_lora_weights": "pissa"}),
        works("llama", pairs(names(*QV)), 4, config={"init_lora_weights": "gaussian"}),
    ),
    "invocation tokens": (
        refused("llama", pairs(names(*QV)), 4, "vLLM does not support Activated LoRA (aLoRA).",
                config={"alora_invocation_tokens": [1, 2]}),
        works("llama", pairs(names(*QV)), 4, config={"alora_invocation_tokens": None}),
    ),
    "a rank pattern above the limit": (
        refused("llama", pairs(names("self_attn.q_proj"), rank=32) | pairs(names("mlp.up_proj")), 4,
                "LoRA rank 32 is greater than max_lora_rank 16.",
                config={"rank_pattern": {"q_proj": 32}}),
        works("llama", pairs(names("self_attn.q_proj"), rank=4) | pairs(names("mlp.up_proj")), 4,
              config={"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.1.mlp.up_proj": 2}}),
    ),
    "ranks that the configuration denies": (
        Case("llama", pairs(names(*QV), rank=8), "partial", 4, 4, config={"r": 4},
             states=("wrong_scale",)),
        works("llama", pairs(names(*QV), rank=4), 4, config={"r": 4}),
    ),
    "a scale of nothing": (
        nothing("llama", pairs(names(*QV)), 4, config={"lora_alpha": 0}),
        works("llama", pairs(names(*QV)), 4, config={"lora_alpha": 1}),
    ),
    "a tower that adapters may not change": (
        nothing("qwen2.5-vl", pairs(_TOWER), 2, states=("ignored",)),
        works("qwen2.5-vl", pairs(_TOWER), 2, options={"enable_tower_connector_lora": True}),
    ),
    "the older tree of a wrapper": (
        works("qwen2.5-vl", pairs(names(*QV)), 4),
        works("qwen2.5-vl", pairs(_VL_TEXT), 4),
    ),
    "modules that the deployment leaves out": (
        Case("llama", pairs(names(*QV, "mlp.down_proj")), "partial", 4, 6,
             options={"lora_target_modules": ("q_proj", "v_proj")}, states=("applied", "ignored")),
        works("llama", pairs(names(*QV)), 4, options={"lora_target_modules": ("qkv_proj",)}),
    ),
    "A without B": (
        refused("llama", {k: v for k, v in pairs(names(*QV)).items() if "lora_A" in k}, 4,
                "unsupported operand type(s) for *=: 'NoneType' and 'float'"),
        _PLAIN,
    ),
    "an MLX adapter": (
        refused("llama", {k.replace("lora_A.weight", "lora_a").replace("lora_B.weight", "lora_b")
                          .removeprefix("base_model.model."): v[::-1]
                          for k, v in pairs(names(*QV)).items()}, 4,
                "Missing required configuration fields: {'lora_alpha', 'r', 'target_modules'}",
                config={"_only": {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {
                    "rank": 8, "scale": 2.0, "dropout": 0.0}}}, weights="adapters.safetensors"),
        _PLAIN,
    ),
    "another method": (
        refused("llama", {f"base_model.model.{m}.ia3_l": (32, 1) for m in names(*QV)}, 4,
                "Missing required configuration fields: {'lora_alpha', 'r'}",
                config={"_only": {"peft_type": "IA3", "target_modules": ["v_proj"],
                                  "feedforward_modules": []}}),
        _PLAIN,
    ),
    "wrapped by a trainer with a value head": (
        nothing("llama", pairs(names(*QV), stem="pretrained_model.base_model.model."), 4),
        _PLAIN,
    ),
}  # fmt: skip


ALL = {**REPORTED, **OTHERS}


def write(case: Case, folder: Path) -> Path:
    """The adapter's files in `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM", "bias": "none", **case.config,
    }  # fmt: skip
    config = config.pop("_only", config)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / case.weights).write_bytes(safetensors(case.shapes))
    if case.files is not None:
        case.files(folder)
    return folder


def safetensors(shapes: Shapes) -> bytes:
    """A file of bfloat16 matrices, every value a small positive number."""
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {
            "dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]
        }  # fmt: skip
        offset += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + b"\x3c" * offset

"""Tiny random models of several families, written to disk by transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Wide weights: with the usual 0.02 every continuation is a tie of nearly equal logits.
    "initializer_range": 0.15,
}


# Older families know neither groups of heads nor this width; unknown keys would be written too.
OLDER = {
    key: value
    for key, value in COMMON.items()
    if key not in ("num_key_value_heads", "intermediate_size")
}

OLDER_WIDE = {**OLDER, "intermediate_size": 96}


def _config(kind: str, common: dict[str, Any] = COMMON, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, kind)(**{**common, **more})

    return make


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig"),
    "llama-tied-mha": _config("LlamaConfig", tie_word_embeddings=True, num_key_value_heads=4),
    "llama3-rope": _config("LlamaConfig", rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": _config(
        "LlamaConfig",
        rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    ),
    "llama-biases": _config("LlamaConfig", attention_bias=True, mlp_bias=True),
    "llama-wide-heads": _config("LlamaConfig", head_dim=32),
    "mistral": _config("MistralConfig", sliding_window=None, head_dim=16),
    "mistral-window": _config("MistralConfig", sliding_window=24, head_dim=16),
    "qwen2": _config("Qwen2Config", use_sliding_window=False),
    "qwen2-window": _config(
        "Qwen2Config", use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
    "qwen3": _config("Qwen3Config", use_sliding_window=False, head_dim=32),
    "smollm3": _config("SmolLM3Config", no_rope_layer_interval=3, use_sliding_window=False),
    "gemma": _config("GemmaConfig", head_dim=32),
    "gemma2": _config(
        "Gemma2Config",
        head_dim=32,
        sliding_window=24,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=10.0,
    ),
    "gemma3": _config(
        "Gemma3TextConfig",
        head_dim=32,
        num_hidden_layers=7,
        sliding_window=24,
        query_pre_attn_scalar=24,
    ),
    "phi3": _config("Phi3Config", sliding_window=None),
    "phi3-window": _config("Phi3Config", sliding_window=24, num_key_value_heads=4),
    "phi3-longrope": _config(
        "Phi3Config",
        sliding_window=None,
        # Lower than any sequence that is compared: the reference changes its angles at this length.
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0 + i / 16 for i in range(8)],
            "long_factor": [1.0 + i for i in range(8)],
            "original_max_position_embeddings": 16,
        },
    ),
    "gpt2": _config("GPT2Config", OLDER, n_embd=64, n_layer=3, n_head=4, n_positions=512),
    "gpt2-scaled": _config(
        "GPT2Config",
        OLDER,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=512,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "opt": _config(
        "OPTConfig", OLDER, ffn_dim=96, word_embed_proj_dim=64, activation_function="relu"
    ),
    "opt-post": _config(
        "OPTConfig", OLDER, ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False
    ),
    "bloom": _config("BloomConfig", OLDER, n_layer=3, n_head=4),
    "bloom-odd-heads": _config("BloomConfig", OLDER, n_layer=3, n_head=6, hidden_size=96),
    "mpt": _config("MptConfig", OLDER, d_model=64, n_heads=4, n_layers=3, max_seq_len=512),
    "mpt-odd-heads": _config(
        "MptConfig", OLDER, d_model=96, n_heads=6, n_layers=3, max_seq_len=512
    ),
    "arcee": _config("ArceeConfig"),
    "seed-oss": _config("SeedOssConfig", head_dim=16, attention_out_bias=False),
    "ernie4_5": _config("Ernie4_5Config", head_dim=16),
    "helium": _config("HeliumConfig", head_dim=16),
    "glm": _config("GlmConfig", head_dim=16),
    "glm4": _config("Glm4Config", head_dim=16),
    "granite": _config(
        "GraniteConfig",
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "olmo": _config("OlmoConfig"),
    "olmo-clip": _config("OlmoConfig", clip_qkv=0.8),
    "olmo2": _config("Olmo2Config"),
    "olmo3": _config("Olmo3Config", num_hidden_layers=5, sliding_window=24),
    "exaone4": _config(
        "Exaone4Config", num_hidden_layers=5, sliding_window=24, sliding_window_pattern=4
    ),
    "cohere": _config("CohereConfig"),
    "cohere2": _config("Cohere2Config", num_hidden_layers=5, sliding_window=24),
    "nemotron": _config("NemotronConfig"),
    "jais2": _config("Jais2Config"),
    "starcoder2": _config("Starcoder2Config"),
    "starcoder2-window": _config("Starcoder2Config", sliding_window=24),
    "stablelm": _config("StableLmConfig", use_qkv_bias=True),
    "stablelm-parallel": _config("StableLmConfig", use_parallel_residual=True),
    "phi": _config("PhiConfig"),
    "gpt_bigcode": _config(
        "GPTBigCodeConfig", OLDER, n_embd=64, n_layer=3, n_head=4, n_positions=512
    ),
    "gpt_bigcode-mha": _config(
        "GPTBigCodeConfig",
        OLDER,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=512,
        multi_query=False,
    ),
    "gpt_neo": _config(
        "GPTNeoConfig",
        OLDER,
        num_layers=3,
        num_heads=4,
        attention_types=[[["global", "local"], 1], [["global"], 1]],
        window_size=24,
    ),
    "gpt_neox": _config("GPTNeoXConfig", OLDER_WIDE),
    "gpt_neox-serial": _config("GPTNeoXConfig", OLDER_WIDE, use_parallel_residual=False),
    "gptj": _config(
        "GPTJConfig", OLDER, n_embd=64, n_layer=3, n_head=4, n_positions=512, rotary_dim=8
    ),
    "falcon-7b": _config("FalconConfig", OLDER),
    "falcon-40b": _config("FalconConfig", OLDER, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-11b": _config(
        "FalconConfig",
        OLDER,
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
    ),
    "falcon-serial": _config(
        "FalconConfig", OLDER, parallel_attn=False, multi_query=False, bias=True
    ),
    "persimmon": _config("PersimmonConfig", OLDER_WIDE),
    "vaultgemma": _config("VaultGemmaConfig", head_dim=16, sliding_window=24),
    "ministral": _config("MinistralConfig", head_dim=16, sliding_window=24),
    "cwm": _config("CwmConfig", head_dim=16, sliding_window=24),
    "flex-olmo": _config("FlexOlmoConfig", num_experts=6, num_experts_per_tok=2),
    "mixtral": _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": _config(
        "Qwen2MoeConfig", **MOE, shared_expert_intermediate_size=48, mlp_only_layers=[1]
    ),
    "qwen3-moe": _config("Qwen3MoeConfig", **MOE, norm_topk_prob=True, head_dim=16),
    "olmoe": _config("OlmoeConfig", num_experts=6, num_experts_per_tok=2),
    "granite-moe": _config(
        "GraniteMoeConfig",
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_multiplier=0.2,
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
}

# Variations on the others; the default suite meets most of them as GGUF files (test_gguf.py).
VARIATIONS = frozenset(
    {
        *(
            "llama-linear-rope",
            "llama-wide-heads",
            "arcee",
            "seed-oss",
            "ernie4_5",
            "helium",
            "glm",
        ),
        *("glm4", "olmo", "olmo3", "exaone4", "cohere2", "nemotron", "jais2", "starcoder2"),
        *("starcoder2-window", "stablelm", "phi", "gpt_bigcode", "gpt_bigcode-mha"),
        *("gpt_neox-serial", "gptj", "falcon-11b", "falcon-serial", "persimmon", "vaultgemma"),
        *("olmoe", "granite-moe", "phi3-window", "mpt-odd-heads"),
        *("ministral", "cwm", "flex-olmo"),
    }
)


def write_model(family: str, directory: Path, tokenizer: bool = True) -> Path:
    """A random model of `family` with config, safetensors and a byte-level tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(sorted(FAMILIES).index(family))
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name or ".ln_" in name:
                # transformers starts these at 0 and 1, where mistakes would not show.
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    if tokenizer:
        write_byte_tokenizer(directory)
    return directory


def write_byte_tokenizer(directory: Path) -> None:
    """Ids 0 … 2 are special, then one token per byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocab.update({character: index + 3 for index, character in enumerate(alphabet)})
    fast = Tokenizer(models.BPE(vocab, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(name, special=True) for name in ("<pad>", "<s>", "</s>")])
    fast.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')

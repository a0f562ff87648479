"""Tiny random models that a real vLLM serves, as transformers makes and saves them.

Each is large enough that queries, keys, feed-forward and vocabulary differ in shape, and its
weights are wide enough that a change shows in the log probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 160
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    name: str
    architecture: str
    make_config: Callable[[], Any]
    flags: tuple[str, ...] = ()

    def save(self, folder: Path) -> None:
        """Write config, weights and a tokenizer that vLLM can load."""
        torch.manual_seed(0)
        config = self.make_config()
        model = getattr(transformers, self.architecture)(config).float().eval()
        model.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)

    def load(self, folder: Path) -> Any:
        model_class = getattr(transformers, self.architecture)
        return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words |= {f"w{i}": i for i in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


def _llama() -> Any:
    return transformers.LlamaConfig(**TEXT, tie_word_embeddings=False)


def _qwen3_tied() -> Any:
    return transformers.Qwen3Config(**TEXT, tie_word_embeddings=True)


def _mixtral() -> Any:
    return transformers.MixtralConfig(
        **TEXT, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    )


def _phi3() -> Any:
    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    return transformers.Phi3Config(**text, tie_word_embeddings=False)


def _gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
    )


def _opt() -> Any:
    return transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        ffn_dim=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=128,
        init_std=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


MODELS = {
    model.name: model
    for model in (
        TinyModel("llama", "LlamaForCausalLM", _llama),
        TinyModel("qwen3-tied", "Qwen3ForCausalLM", _qwen3_tied),
        TinyModel("mixtral", "MixtralForCausalLM", _mixtral),
        TinyModel("phi3", "Phi3ForCausalLM", _phi3),
        TinyModel("gpt2", "GPT2LMHeadModel", _gpt2),
        TinyModel("opt", "OPTForCausalLM", _opt),
    )
}

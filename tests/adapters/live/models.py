"""Tiny random models that a real vLLM serves, as transformers makes and saves them.

Each is large enough that queries, keys, feed-forward and vocabulary differ in shape, and its
weights are wide enough that a change shows in the log probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
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
    words: Mapping[str, int] = field(default_factory=dict)
    processor: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What else a multimodal model needs: words of its own in the vocabulary, and JSON files."""
    as_published: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """How the tensors that transformers 5.24 saves differ from what is published and served."""
    task: Literal["CAUSAL_LM", "SEQ_CLS"] = "CAUSAL_LM"

    def save(self, folder: Path) -> None:
        """Write config, weights and a tokenizer that vLLM can load."""
        torch.manual_seed(0)
        config = self.make_config()
        model = getattr(transformers, self.architecture)(config).float().eval()
        model.save_pretrained(folder)
        if self.as_published is not None:
            path = folder / "model.safetensors"
            tensors = self.as_published(safetensors.torch.load_file(path))
            safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
        _tokenizer(self.words).save_pretrained(folder)
        for file, content in self.processor.items():
            (folder / file).write_text(json.dumps(content))

    def load(self, folder: Path) -> Any:
        model_class = getattr(transformers, self.architecture)
        return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def _tokenizer(special: Mapping[str, int]) -> Any:
    """One word for each id; `special` words by their names (`image_token` …) or as they are."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words |= {f"w{i}": i for i in range(4, VOCABULARY) if i not in special.values()}
    words |= {f"<{word}>" if word.isidentifier() else word: i for word, i in special.items()}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {word: f"<{word}>" for word in special if word.isidentifier()}
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=named,
    )
    made.add_tokens(
        [word for word in words if words[word] in special.values()], special_tokens=True
    )
    return made


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


def _qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        **TEXT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96
    )


def _gemma4() -> Any:
    """Four layers, of which the last two take the keys and values of the first two."""
    return transformers.Gemma4TextConfig(
        **{**TEXT, "num_hidden_layers": 4},
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=64,
        num_kv_shared_layers=2,
        global_head_dim=64,
        num_global_key_value_heads=2,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCABULARY,
    )


def _glm4() -> Any:
    return transformers.Glm4Config(**TEXT, partial_rotary_factor=0.5)


def _bert_classifier() -> Any:
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=192,
        num_labels=3,
    )


def _llama_classifier() -> Any:
    return transformers.LlamaConfig(**TEXT, num_labels=3)


TOWER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}


def _qwen2_5_vl() -> Any:
    rope = {"rope_type": "default", "type": "mrope", "mrope_section": [4, 6, 6]}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 128,
        "fullatt_block_indexes": [1],
    }
    return transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_scaling": rope},
        vision_config=vision,
        image_token_id=150,
        video_token_id=151,
        vision_start_token_id=152,
        vision_end_token_id=153,
    )


def _qwen3_vl_moe() -> Any:
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    moe["norm_topk_prob"] = True  # vLLM 0.32 asks for it; its transformers has no default
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 128,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    return transformers.Qwen3VLMoeConfig(
        text_config={**TEXT, **moe, "rope_scaling": rope, "decoder_sparse_step": 1},
        vision_config=vision,
        image_token_id=150,
        video_token_id=151,
        vision_start_token_id=152,
        vision_end_token_id=153,
        tie_word_embeddings=False,
    )


def _with_vision_model(tensors: dict[str, Any]) -> dict[str, Any]:
    """Transformers 5.24 has no `vision_model` in the tower; checkpoints and vLLM 0.32 have."""
    return {
        name.replace("vision_tower.", "vision_tower.vision_model."): value
        for name, value in tensors.items()
    }


def _experts_turned(tensors: dict[str, Any]) -> dict[str, Any]:
    """Qwen3-VL's checkpoints hold experts as [expert, in, out]."""
    return {
        name: value.transpose(1, 2).contiguous() if ".experts." in name else value
        for name, value in tensors.items()
    }


def _gemma3() -> Any:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    return transformers.Gemma3Config(
        text_config={**TEXT, **layers, "query_pre_attn_scalar": 32},
        vision_config=TOWER,
        image_token_index=150,
        boi_token_index=151,
        eoi_token_index=152,
        mm_tokens_per_image=4,
    )


def _llava() -> Any:
    return transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**TOWER, "model_type": "clip_vision_model", "projection_dim": 64},
        image_token_index=150,
        tie_word_embeddings=False,
    )


GEMMA3_WORDS = {"image_token": 150, "boi_token": 151, "eoi_token": 152}
GEMMA3_WORDS |= {"\n" * count: 139 + count for count in range(1, 5)}
GEMMA3_FILES = {
    "preprocessor_config.json": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 56, "width": 56},
    },
    "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
}
LLAVA_FILES = {
    "preprocessor_config.json": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": {"height": 56, "width": 56},
    },
    "processor_config.json": {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    },
}
QWEN_VL_WORDS = {"image_token": 150, "video_token": 151, "<vision_start>": 152, "<vision_end>": 153}
NO_IMAGES = ("--limit-mm-per-prompt", '{"image": 0, "video": 0}')
"""Qwen's processors need torchvision, which does not go with vLLM's torch for CPUs: text alone."""
MODELS = {
    model.name: model
    for model in (
        TinyModel("llama", "LlamaForCausalLM", _llama),
        TinyModel("qwen3-tied", "Qwen3ForCausalLM", _qwen3_tied),
        TinyModel("phi3", "Phi3ForCausalLM", _phi3),
        TinyModel("opt", "OPTForCausalLM", _opt),
        TinyModel("gpt2", "GPT2LMHeadModel", _gpt2),
        TinyModel("gemma4", "Gemma4ForCausalLM", _gemma4),
        TinyModel("glm4", "Glm4ForCausalLM", _glm4),
        TinyModel(
            "bert-classifier",
            "BertForSequenceClassification",
            _bert_classifier,
            ("--runner", "pooling"),
            task="SEQ_CLS",
        ),
        TinyModel("mixtral", "MixtralForCausalLM", _mixtral),
        TinyModel("qwen3-moe", "Qwen3MoeForCausalLM", _qwen3_moe),
        TinyModel(
            "gemma3",
            "Gemma3ForConditionalGeneration",
            _gemma3,
            (),
            GEMMA3_WORDS,
            GEMMA3_FILES,
            _with_vision_model,
        ),
        TinyModel(
            "llava",
            "LlavaForConditionalGeneration",
            _llava,
            (),
            {"image_token": 150},
            LLAVA_FILES,
            _with_vision_model,
        ),
        TinyModel(
            "qwen2.5-vl",
            "Qwen2_5_VLForConditionalGeneration",
            _qwen2_5_vl,
            NO_IMAGES,
            QWEN_VL_WORDS,
        ),
        TinyModel(
            "qwen3-vl-moe",
            "Qwen3VLMoeForConditionalGeneration",
            _qwen3_vl_moe,
            NO_IMAGES,
            QWEN_VL_WORDS,
            as_published=_experts_turned,
        ),
        TinyModel(
            "llama-classifier",
            "LlamaForSequenceClassification",
            _llama_classifier,
            ("--runner", "pooling"),
            task="SEQ_CLS",
        ),
    )
}

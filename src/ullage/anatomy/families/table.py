"""The family table: which row a model type belongs to, and what cannot be priced at all.

Data only. The rows are in `llama.py`, `others.py`, `rare.py`, `recent.py` and
`encoders.py`; `family.py` explains their columns. Absent keys are answered by the config
class of the model type (`config/defaults.jsonl`), or of the row's `base` where transformers has no
class of that name.
"""

from __future__ import annotations

from ullage.anatomy.families.encoder_decoders import (
    ENCODER_DECODER_MEMBERS,
    ENCODER_DECODER_ROWS,
)
from ullage.anatomy.families.encoders import ENCODER_MEMBERS, ENCODER_ROWS
from ullage.anatomy.families.family import GENERIC, Family
from ullage.anatomy.families.llama import LLAMA_ROWS
from ullage.anatomy.families.older import OLDER_MEMBERS, OLDER_ROWS
from ullage.anatomy.families.others import OTHER_ROWS
from ullage.anatomy.families.rare import RARE_ROWS
from ullage.anatomy.families.recent import RECENT_MEMBERS, RECENT_ROWS

FAMILIES: dict[str, Family] = {
    row.name: row
    for row in (
        *LLAMA_ROWS,
        *OTHER_ROWS,
        *RARE_ROWS,
        *RECENT_ROWS,
        *ENCODER_ROWS,
        *ENCODER_DECODER_ROWS,
        *OLDER_ROWS,
        GENERIC,
    )
}

# Model types whose family has another name.
MEMBERS: dict[str, str] = {
    "solar": "llama",
    "xverse": "llama",
    "ministral3": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "deepseek_ref": "deepseek_v4",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "llama4_text": "llama4",
    "step3_vl": "step3_text",
    "step3p5": "step3p7",
    "step3p5v": "step3p7",
    "minimax_m3_vl": "minimax_m3",
    "minimax_m3_vl_text": "minimax_m3",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "glm4v_text": "glm4v",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_moe": "glm4_moe",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "gpt-sw3": "gpt2",
    "bailing_moe_v2": "bailing_moe",
    "deci": "nemotron-nas",
    "mllama_text_model": "mllama",
    "exaone4_5": "exaone4",
    "stablelm_epoch": "stablelm",
    "starcoder": "gpt_bigcode",
    **RECENT_MEMBERS,
    **ENCODER_MEMBERS,
    **ENCODER_DECODER_MEMBERS,
    **OLDER_MEMBERS,
}

# Where model_type says nothing known, the class that the checkpoint asks for may.
ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "GptOssForCausalLM": "gpt_oss",
    "DeciLMForCausalLM": "nemotron-nas",
    "BaichuanForCausalLM": "baichuan",
    "BaiChuanForCausalLM": "baichuan",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Phi3ForCausalLM": "phi3",
}

# Classes of a release's own code that say more than the model type it borrows.
OWN_CODE: dict[str, str] = {
    "JinaBertModel": "jina_bert",
    "JinaBertForMaskedLM": "jina_bert",
}

# Kinds of model that the spec has no words for; pricing them would be a guess.
UNSUPPORTED: dict[str, str] = {
    "rwkv": "an RWKV recurrence",
    "xlstm": "xLSTM cells",
    "xlnet": "two-stream attention",
    "reformer": "hashed attention",
    "funnel": "pooled sequences",
    "canine": "downsampled characters",
    "perceiver": "latent cross-attention",
    "blt": "byte patches",
    # read as a plain decoder, the counts of these are wrong by more than a few per cent
    **dict.fromkeys(
        (
            "evolla",
            "idefics",
            "jev",
            "mobilebert",
            "neomme",
            "squeezebert",
        ),
        "parts that are not understood",
    ),
}


def family_of(model_type: str, architecture: str) -> Family:
    """The row for a model type, else for an architecture's class, else `GENERIC`."""
    name = OWN_CODE.get(architecture) or MEMBERS.get(model_type, model_type)
    row = FAMILIES.get(name) if name != "generic" else None
    return row or FAMILIES[ARCHITECTURES.get(architecture, "generic")]

"""Write docs/inventory.md: how well each language-model class of transformers is read.

For every class that the library's auto mappings list with a language head: its default
configuration is written and read back, and where the class can be built on the meta device, the
number of its parameters is compared. Needs torch and transformers: .venv/bin/python
tools/generate_inventory.py (some minutes). `tests/anatomy/test_inventory.py` reads a sample again.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from ullage.anatomy.config.read import read_config
from ullage.anatomy.spec import Anatomy, ModelSpec
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.errors import BadInput

PAGE = Path(__file__).parent.parent / "docs/inventory.md"
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)
QWEN4_INDEXER = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}
# Classes whose defaults build no model (a null that arithmetic needs): what a release would say.
SETTINGS: dict[str, dict[str, Any]] = {
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 8711}},
    "DeepseekOcr2ForConditionalGeneration": {
        "text_config": {
            "num_experts_per_tok": 6,
            "mlp_layer_types": ["dense" if i == 0 else "sparse" for i in range(32)],
        }
    },
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Dots1ForCausalLM": {
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 6,
    },
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 151851}},
    "Gemma4AssistantForCausalLM": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 30,
        }
    },
    "EsmForMaskedLM": {
        "vocab_size": 33,
        "pad_token_id": 1,
        "mask_token_id": 32,
        "position_embedding_type": "rotary",
        "emb_layer_norm_before": False,
        "token_dropout": True,
    },
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128},
    "Lfm2MoeForCausalLM": {
        "layer_types": ["full_attention" if i % 4 == 2 else "conv" for i in range(32)]
    },
    "MinistralForCausalLM": {"head_dim": 128},
    "NemotronForCausalLM": {"num_key_value_heads": 8, "head_dim": 128},
    "PerceptionLMForConditionalGeneration": {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {"embed_dim": 1024},
        }
    },
    "Qwen4ExpForCausalLM": QWEN4_INDEXER,
    "Qwen4ExpForConditionalGeneration": {"text_config": QWEN4_INDEXER},
}
EQUAL, BUILT_NOT = "equal", "not built"


def classes() -> dict[str, str]:
    """Class name → model type, in the order of names."""
    found: dict[str, str] = {}
    for mapping in MAPPINGS:
        for model_type, names in getattr(modeling_auto, mapping).items():
            for name in names if isinstance(names, tuple | list) else (names,):
                found.setdefault(name, model_type)
    return dict(sorted(found.items()))


def default_config(name: str, model_type: str) -> Any:
    """The configuration that the class is built from, with its defaults.

    Raises whatever the library does where its own defaults contradict each other.
    """
    cls = getattr(transformers, name, None)
    kind = getattr(cls, "config_class", None) or CONFIG_MAPPING[model_type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(**SETTINGS.get(name, {}))


def written(config: Any, name: str) -> dict[str, Any]:
    """config.json as the library would write it."""
    raw: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return raw | {"architectures": [name], "dtype": "bfloat16"}


def stored(spec: ModelSpec) -> int:
    return sum(t.num_elements for t in expected_tensors(spec) if t.stack != "mtp")


def why_range(made: Anatomy) -> str:
    fields = list(dict.fromkeys(u.field for u in made.spec.unknowns))
    shown = ", ".join(f"`{f}`" for f in fields[:4])
    return shown + (f" and {len(fields) - 4} more" if len(fields) > 4 else "")


def read_state(name: str, model_type: str) -> tuple[str, str, str, str]:
    """(family, state, parameters, why): what ullage alone says of the class's defaults."""
    try:
        raw = written(default_config(name, model_type), name)
    except Exception as error:  # the library's own classes raise anything
        return "", "refused", "", f"no default configuration: {type(error).__name__}"
    try:
        made = read_config(raw, file="config.json")
        counts = [stored(s) for s in (made.low, made.spec, made.high)]
    except BadInput as error:
        text = str(error).removeprefix("config.json: ").replace("|", "/").replace("\n", " ")
        return "", "refused", "", text if len(text) <= 120 else text[:119] + "…"
    if not made.spec.unknowns:
        return made.spec.family, "exact", f"{counts[1]:,}", ""
    spread = counts[2] / counts[0] - 1 if counts[0] else 0.0
    return made.spec.family, "range", f"{counts[1]:,}", f"±{spread / 2:.1%}: {why_range(made)}"


def counted(name: str, model_type: str) -> int | None:
    """Stored elements of the class on the meta device, tied ones once; None: it is not built."""
    try:
        config = default_config(name, model_type)
        cls = getattr(transformers, name)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = cls._from_config(config)
    except Exception:  # missing optional packages, defaults that build nothing
        return None
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return sum(v.numel() for k, v in model.state_dict().items() if k not in tied)


def rows(names: Iterable[str] = ()) -> list[tuple[str, ...]]:
    out = []
    wanted = set(names)
    for name, model_type in classes().items():
        if wanted and name not in wanted:
            continue
        family, state, parameters, why = read_state(name, model_type)
        checked = ""
        if state != "refused":
            count = counted(name, model_type)
            mine = int(parameters.replace(",", ""))
            if count is None:
                checked = BUILT_NOT
            else:
                checked = EQUAL if count == mine else f"{mine / count - 1:+.2%}"
        if state == "exact" and checked not in ("", EQUAL, BUILT_NOT):
            why = DIFFERS.get(name, "the difference is not understood")
        out.append((name, model_type, family, state, parameters, checked, why))
        print(name, state, checked, file=sys.stderr)
    return out


# Why an exact reading is not the library's number.
DIFFERS: dict[str, str] = {
    "FuyuForCausalLM": "the map from image patches (11 million elements) is not counted",
    "Gemma3nForCausalLM": "releases hold K and V of every layer, the library's class does not",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "its projector is not counted",
    "LongcatFlashForCausalLM": "the library makes half of each zero expert, which has no weights",
    "MiniMaxForCausalLM": "the library stores decay tables that are computed, not learned",
}


def page(table: list[tuple[str, ...]]) -> str:
    total = len(table)
    count = {s: sum(r[3] == s for r in table) for s in ("exact", "range", "refused")}
    equal = sum(r[5] == EQUAL for r in table)
    lines = [
        "# Inventory",
        "",
        "Generated by `tools/generate_inventory.py` from the classes of transformers "
        f"{transformers.__version__} that have a language head. Each class's default "
        "configuration was written out and read back.",
        "",
        f"Of {total} architecture classes **{count['exact']} ({count['exact'] / total:.0%}) are "
        f"read exactly**, {count['range']} as a range, {count['refused']} are refused by name; "
        f"none crashes. For {equal} classes the number of stored parameters equals that of the "
        "library's own model on the meta device (`equal`); `not built` means that the library "
        "builds no model from its own defaults, or needs a package that was absent.",
        "",
        "*exact*: every part is understood. *range*: the parts named under *why* are bracketed, "
        "and every figure that depends on them is shown from low to high. *refused*: nothing is "
        "priced; the sentence is what the user sees.",
        "",
        "Values such as a release has stand in for defaults from which the library itself builds "
        "no model in: " + ", ".join(f"`{name}`" for name in sorted(SETTINGS)) + ".",
        "",
        "| class | model type | read as | state | parameters | meta device | why |",
        "|---|---|---|---|--:|---|---|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join(lines) + "\n"


def main() -> None:
    transformers.logging.set_verbosity_error()
    temporary = PAGE.with_suffix(".md.part")
    temporary.write_text(page(rows()), encoding="utf-8")
    temporary.replace(PAGE)


if __name__ == "__main__":
    main()

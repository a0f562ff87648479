"""adapter_config.json: what each writer writes, and what none of them could have meant."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from ullage.anatomy.adapters.adapter import AdapterConfig
from ullage.anatomy.adapters.config import PEFT_TYPES, config_from, read_adapter_config
from ullage.errors import MalformedConfig

LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def read(**fields: object) -> AdapterConfig:
    return config_from({**LORA, **fields}, "adapter_config.json")


def test_what_peft_writes_is_read_whole(tmp_path: Path) -> None:
    import peft

    written = peft.LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=["q_proj", "v_proj"],
        exclude_modules=["lm_head"],
        modules_to_save=["lm_head"],
        rank_pattern={"q_proj": 8},
        alpha_pattern={"v_proj": 4},
        layers_to_transform=[0, 1],
        layers_pattern=["layers"],
        use_rslora=True,
        bias="lora_only",
        init_lora_weights="gaussian",
        task_type="CAUSAL_LM",
        base_model_name_or_path="owner/name",
        revision="main",
        trainable_token_indices={"embed_tokens": [1, 2]},
    )
    written.save_pretrained(tmp_path)
    config = read_adapter_config(tmp_path)
    assert (config.peft_type, config.writer, config.rank, config.alpha) == ("LORA", "peft", 16, 32)
    assert set(config.target_modules or ()) == {"q_proj", "v_proj"}
    assert config.exclude_modules == ("lm_head",)
    assert config.modules_to_save == ("lm_head",)
    assert (config.rank_pattern, config.alpha_pattern) == ((("q_proj", 8),), (("v_proj", 4.0),))
    assert (config.layers_to_transform, config.layers_pattern) == ((0, 1), ("layers",))
    assert (config.use_rslora, config.use_dora, config.bias) == (True, False, "lora_only")
    assert config.init_lora_weights == "gaussian"
    assert (config.base_model, config.revision) == ("owner/name", "main")
    assert config.task_type == "CAUSAL_LM"
    assert config.trainable_token_indices == {"embed_tokens": (1, 2)}
    assert (config.variants, config.unread) == ((), ())


def test_no_field_of_pefts_own_config_is_left_unread() -> None:
    import peft

    fields = dict.fromkeys(asdict(peft.LoraConfig()))
    assert read(**{**fields, **LORA}).unread == ()
    assert read(fancy_new_scaling=2.0).unread == ("fancy_new_scaling",)


def test_every_method_that_peft_knows_is_known_by_name() -> None:
    from peft import PeftType

    assert {kind.value for kind in PeftType} <= PEFT_TYPES


@pytest.mark.parametrize(
    ("fields", "variants"),
    [
        ({"use_dora": True}, ("dora",)),
        ({"use_qalora": True, "qalora_group_size": 16}, ("qalora",)),
        ({"alora_invocation_tokens": [1, 2]}, ("alora",)),
        ({"layer_replication": [[0, 2], [1, 3]]}, ("layer_replication",)),
        ({"use_bdlora": {"nblocks": 2}}, ("bdlora",)),
        ({"arrow_config": {"top_k": 2}}, ("arrow",)),
        ({"use_dora": False, "kasa_config": None, "layer_replication": None}, ()),
    ],
)
def test_what_changes_the_sum_is_named(
    fields: dict[str, object], variants: tuple[str, ...]
) -> None:
    assert read(**fields).variants == variants


def test_mlx_and_its_older_relative_are_told() -> None:
    mlx = config_from(
        {
            "model": "owner/name",
            "fine_tune_type": "dora",
            "num_layers": 16,
            "lora_parameters": {
                "rank": 8,
                "dropout": 0.0,
                "scale": 20.0,
                "keys": ["self_attn.q_proj"],
            },
        },
        "f",
    )
    assert (mlx.writer, mlx.rank, mlx.scale, mlx.use_dora) == ("mlx", 8, 20.0, True)
    assert (mlx.target_modules, mlx.base_model) == (("self_attn.q_proj",), "owner/name")
    legacy = config_from({"rank": 10, "alpha": 0.1, "dropout": 0.1}, "f")
    assert (legacy.writer, legacy.rank, legacy.alpha) == ("mlx-vlm", 10, 0.1)
    assert config_from({"fine_tune_type": "full", "lora_parameters": None}, "f").peft_type == "FULL"


def test_unsloth_is_told_by_its_mark_and_a_missing_method_by_lora_fields() -> None:
    mark = {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}
    assert read(auto_mapping=mark).writer == "unsloth"
    assert config_from({"r": 8, "lora_alpha": 16}, "f").peft_type == "LORA"
    with pytest.raises(MalformedConfig, match="peft_type"):
        config_from({"target_modules": ["q_proj"]}, "f")


def test_adalora_keeps_ranks_as_lists_of_what_was_kept() -> None:
    config = config_from(
        {"peft_type": "ADALORA", "rank_pattern": {"q_proj": [True, False, True, True]}}, "f"
    )
    assert config.rank_pattern == (("q_proj", 3),)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("r", value) for value in (0, -8, 1.5, 8.0, "8", True, 10**9, 10**30, [8])),
        *(("lora_alpha", value) for value in ("16", 1e300, -1e300, float("inf"), True, [16])),
        *(("rank_pattern", value) for value in ({"q": -1}, {"q": "8"}, ["q"], {"q": 10**12}, 3)),
        *(("alpha_pattern", value) for value in ({"q": float("inf")}, {"q": None}, "q")),
        *(("target_modules", value) for value in ([1], {"q": 1}, 5, [["q"]], "x" * 20_000)),
        *(("modules_to_save", value) for value in ("lm_head", [None])),
        *(("use_rslora", value) for value in (1, "true")),
        *(("layers_to_transform", value) for value in ([-1], "all", [1.5])),
        *(("layer_replication", value) for value in ([[0]], [0, 4], "x", [[0, -1]])),
        *(("peft_type", value) for value in (5, ["LORA"])),
        *(("auto_mapping", value) for value in ("x", [1])),
        *(("trainable_token_indices", value) for value in ("x", {"e": "x"}, [-1])),
        ("bias", 1),
        ("init_lora_weights", 3),
    ],
)
def test_a_field_that_nobody_could_mean_is_one_sentence(field: str, value: object) -> None:
    with pytest.raises(MalformedConfig) as caught:
        read(**{field: value})
    text = str(caught.value)
    assert text.startswith(f"adapter_config.json: {field}")
    assert "expected" in text
    assert len(text) < 400


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"r": 8, "r": 64, "lora_alpha": 1}', "appears twice"),
        ('{"peft_type": "LORA", "lora_alpha": NaN}', "NaN"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 50_000, "nested too deeply"),
        ("[]", "expected a JSON object"),
        ("{", "not JSON"),
        ("", "not JSON"),
        ('{"r": ' + "9" * 5000 + "}", "digits"),
        ('{"peft_type": "LORA", "x": "' + "a" * (5 << 20) + '"}', "larger than"),
    ],
    ids=lambda text: str(text)[:12],
)
def test_a_file_that_is_no_configuration_is_one_sentence(
    tmp_path: Path, text: str, what: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(MalformedConfig, match=what):
        read_adapter_config(tmp_path)


def test_infinity_in_a_field_that_is_not_read_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**LORA, "other": float("inf")}))
    assert read_adapter_config(tmp_path).unread == ("other",)

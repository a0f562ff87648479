"""transformers' own configuration classes and modules as the oracle of families and towers."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from ullage.anatomy.config.defaults import class_defaults
from ullage.anatomy.config.read import read_config
from ullage.anatomy.spec import Anatomy, Attention
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.errors import BadInput

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

transformers.logging.set_verbosity_error()


def library_config(model_type: str, **changes: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CONFIG_MAPPING[model_type](**changes)


def written(config: Any) -> dict[str, Any]:
    """What the library would write into config.json, every default spelled out."""
    made = json.loads(json.dumps(config.to_dict(), default=str))
    assert isinstance(made, dict)
    return made


@pytest.mark.parametrize("start", range(0, 820, 41))
def test_every_default_configuration_is_read_or_refused(start: int) -> None:
    for model_type in sorted(CONFIG_MAPPING)[start : start + 41]:
        try:
            config = written(library_config(model_type))
        except Exception:  # its own class refuses it, or needs another package
            continue
        try:
            read_config(config, file=model_type)
        except BadInput as error:
            assert str(error).startswith(f"{model_type}: ")


FULL = (
    "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next gpt_oss deepseek_v3 "
    "minimax_m2 arcee apertus smollm3 cohere cohere2 gemma gemma2 gemma3_text glm glm4 granite "
    "granitemoe olmo olmo2 olmo3 olmoe phi phi3 falcon stablelm starcoder2 gpt2 gptj gpt_neox opt "
    "bloom mpt mamba mamba2 jamba bamba falcon_h1 recurrent_gemma minimax kimi_linear exaone4 "
    "ernie4_5 seed_oss helium llama4_text"
)


@pytest.mark.parametrize("model_type", FULL.split())
def test_a_written_configuration_has_nothing_unread_that_matters(model_type: str) -> None:
    made = read_config(written(library_config(model_type)), file=model_type)
    assert made.unread == () or made.unread == UNREAD[model_type]
    assert {u.field for u in made.spec.unknowns} <= {"dtype"}


# Keys that the library writes and that change no weight, cache or work here.
UNREAD = {
    "falcon_h1": ("projectors_bias",),
    "mpt": ("attn_config.qk_ln",),
}


@pytest.mark.parametrize("model_type", FULL.split())
def test_absent_keys_are_answered_as_the_class_answers_them(model_type: str) -> None:
    """The bare model type and the class's own configuration must give the same layers."""
    bare = read_config({"model_type": model_type, "torch_dtype": "bfloat16"}, file=model_type)
    full = read_config(written(library_config(model_type)), file=model_type)
    assert bare.spec.layers == full.spec.layers
    assert bare.spec.tie_embeddings == full.spec.tie_embeddings
    assert bare.spec.norm == full.spec.norm


def total(anatomy: Anatomy) -> int:
    return sum(t.num_elements for t in expected_tensors(anatomy.spec) if t.stack != "mtp")


def tower_of(model: Any) -> int:
    """Parameters outside the language model."""
    words = ("language_model", "lm_head", "text_model", "decoder.")
    return sum(
        p.numel() for name, p in model.named_parameters() if not any(w in name for w in words)
    )


TOWERS = (
    "qwen3_vl qwen3_5 qwen2_5_vl glm4v llava llava_next llava_onevision mistral3 gemma3 paligemma "
    "internvl idefics3 smolvlm mllama kimi_k25 llama4 qwen2_audio voxtral"
)


@pytest.mark.parametrize("model_type", TOWERS.split())
def test_towers_have_the_library_s_number_of_parameters(model_type: str) -> None:
    config = library_config(model_type)
    auto = (
        transformers.AutoModelForSeq2SeqLM
        if model_type in ("qwen2_audio", "voxtral")
        else transformers.AutoModelForImageTextToText
    )
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = auto.from_config(config)
    made = read_config(written(config), file=model_type)
    assert not [u for u in made.spec.unknowns if u.field != "dtype"]
    assert sum(t.parameters or 0 for t in made.spec.towers) == tower_of(model)


def test_defaults_say_which_class_and_version_they_are_from() -> None:
    known = class_defaults("qwen3")
    assert known is not None
    assert known.label.startswith("Qwen3Config (transformers ")
    assert class_defaults("no-such-model") is None
    assert class_defaults('qwen3","class":"x') is None


def test_a_config_class_s_window_rule_is_ours() -> None:
    """The library's layer_types against the rule that stands in where a file has none."""
    for model_type in ("gemma2", "gemma3_text", "cohere2", "olmo3", "exaone4", "gpt_oss"):
        stated = read_config(written(library_config(model_type)), file=model_type).spec
        bare = read_config({"model_type": model_type, "torch_dtype": "bfloat16"}, file="f").spec

        def windows(spec: Any) -> list[int | None]:
            return [x.mixer.window for x in spec.layers if isinstance(x.mixer, Attention)]

        assert windows(stated) == windows(bare), model_type
        assert None in windows(bare) and len(set(windows(bare))) == 2

"""The grammar of adapter keys: every writer's form, and texts that no writer wrote."""

from __future__ import annotations

import time
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.anatomy.adapters.adapter import Matrix
from ullage.anatomy.adapters.keys import parse_key
from ullage.anatomy.adapters.methods import OTHER_PARAMETERS

Q = "model.layers.0.self_attn.q_proj"

# key → (wrappers, module, matrix, adapter name)
KEYS = {
    # PEFT 0.21.2 and older
    f"base_model.model.{Q}.lora_A.weight": (("base_model", "model"), Q, "A", None),
    f"base_model.model.{Q}.lora_B.default.weight": (("base_model", "model"), Q, "B", "default"),
    f"base_model.model.{Q}.lora_B.my-name.bias": (("base_model", "model"), Q, "bias_B", "my-name"),
    f"base_model.model.{Q}.lora_B.bias": (("base_model", "model"), Q, "bias_B", None),
    f"base_model.model.{Q}.lora_magnitude_vector": (("base_model", "model"), Q, "magnitude", None),
    f"{Q}.lora_magnitude_vector.default.weight": ((), Q, "magnitude", "default"),
    f"{Q}.lora_magnitude_vector.weight": ((), Q, "magnitude", None),
    "base_model.model.model.embed_tokens.lora_embedding_A": (
        ("base_model", "model"),
        "model.embed_tokens",
        "embedding_A",
        None,
    ),
    "model.embed_tokens.lora_embedding_B.default": (
        (),
        "model.embed_tokens",
        "embedding_B",
        "default",
    ),
    "base_model.model.model.embed_tokens.base_layer.weight": (
        ("base_model", "model", "base_layer"),
        "model.embed_tokens",
        "base",
        None,
    ),
    f"{Q}.base_layer.bias": (("base_layer",), Q, "saved", None),
    f"{Q}.bias": ((), Q, "saved", None),
    "base_model.model.lm_head.weight": (("base_model", "model"), "lm_head", "saved", None),
    "base_model.model.lm_head.modules_to_save.default.weight": (
        ("base_model", "model", "modules_to_save"),
        "lm_head",
        "saved",
        "default",
    ),
    "score.modules_to_save.default.dense.weight": (
        ("modules_to_save",),
        "score.dense",
        "saved",
        "default",
    ),
    "lm_head.original_module.weight": (("original_module",), "lm_head", "base", None),
    "model.embed_tokens.token_adapter.trainable_tokens_delta": (
        ("token_adapter",),
        "model.embed_tokens",
        "tokens",
        None,
    ),
    "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight": (
        ("base_model", "model", "base_layer"),
        "model.layers.0.mlp.experts",
        "A",
        None,
    ),
    # what training wraps around models
    f"_orig_mod.base_model.model.{Q}.lora_A.weight": (
        ("_orig_mod", "base_model", "model"),
        Q,
        "A",
        None,
    ),
    f"module.module.base_model.model.{Q}.lora_A.default.weight": (
        ("module", "module", "base_model", "model"),
        Q,
        "A",
        "default",
    ),
    "base_model.model._orig_mod.model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module"
    ".self_attn.q_proj.lora_A.weight": (
        (
            *("base_model", "model", "_orig_mod"),
            *("_fsdp_wrapped_module", "_checkpoint_wrapped_module"),
        ),
        Q,
        "A",
        None,
    ),
    f"base_model._fsdp_wrapped_module.model.{Q}.lora_A.weight": (
        ("base_model", "_fsdp_wrapped_module", "model"),
        Q,
        "A",
        None,
    ),
    f"model.base_model.model.{Q}.lora_A.weight": (("model", "base_model", "model"), Q, "A", None),
    f"base_model.model.module.{Q}.lora_A.weight": (("base_model", "model", "module"), Q, "A", None),
    # PEFT around a part of a model (InternVL wraps its language model alone)
    f"language_model.base_model.model.{Q}.lora_A.default.weight": (
        ("base_model", "model"),
        f"language_model.{Q}",
        "A",
        "default",
    ),
    # one `model` short of the tree (peft#1579): what follows PEFT's two words is the path
    "base_model.model.layers.0.q_proj.lora_A.weight": (
        ("base_model", "model"),
        "layers.0.q_proj",
        "A",
        None,
    ),
    # MLX and torchtune
    f"{Q}.lora_a": ((), Q, "A", None),
    f"{Q}.lora_b": ((), Q, "B", None),
    "layers.0.attn.q_proj.lora_a.weight": ((), "layers.0.attn.q_proj", "A", None),
    "layers.0.attn.q_proj.magnitude": ((), "layers.0.attn.q_proj", "magnitude", None),
    # Megatron and NeMo
    "module.decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight": (
        ("module", "adapter"),
        "decoder.layers.0.self_attention.linear_qkv",
        "A",
        None,
    ),
    "model.decoder.layers.3.self_attention.adapter_layer.lora_kqv_adapter.linear_out.weight": (
        ("adapter_layer", "lora_kqv_adapter"),
        "model.decoder.layers.3.self_attention.linear_qkv",
        "B",
        None,
    ),
    "model.layers.3.mlp.lora_hto4h_adapter.linear_in.weight": (
        ("lora_hto4h_adapter",),
        "model.layers.3.mlp.linear_fc1",
        "A",
        None,
    ),
    "decoder.layers.0.self_attention.linear_qkv.adapter.adapter_k.linear_out.weight": (
        ("adapter", "adapter_k"),
        "decoder.layers.0.self_attention.linear_k",
        "B",
        None,
    ),
    # modules of the model's own whose names sound like an adapter's
    "model.vision.adapter.lora_A.weight": ((), "model.vision.adapter", "A", None),
    "model.mlp.linear_in.weight": ((), "model.mlp.linear_in", "saved", None),
    "model.magnitude.weight": ((), "model.magnitude", "saved", None),
    "base_model.model.model.module.q_proj.lora_A.weight": (
        ("base_model", "model"),
        "model.module.q_proj",
        "A",
        None,
    ),
    # other methods, and what is no key at all
    f"base_model.model.{Q}.vera_lambda_d": (("base_model", "model"), Q, "other", None),
    "base_model.vera_A": (("base_model",), "", "other", None),
    f"base_model.model.{Q}.ia3_l.default": (("base_model", "model"), Q, "other", "default"),
    "prompt_embeddings": ((), "", "other", None),
    f"{Q}.lora_A.weight.absmax": ((), Q, "other", "weight"),
    "": ((), "", "other", None),
    "weight": ((), "", "saved", None),
}


@pytest.mark.parametrize("text", KEYS)
def test_a_key_is_taken_apart(text: str) -> None:
    key = parse_key(text)
    found = (key.wrappers, key.module, str(key.matrix), key.adapter_name)
    assert (key.text, found) == (text, KEYS[text])


NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,11}", fullmatch=True).filter(
    lambda name: (
        name not in OTHER_PARAMETERS
        and not name.startswith("lora_")
        and name not in ("weight", "bias", "module", "base_model", "modules_to_save", "base_layer")
        and name not in ("original_module", "token_adapter", "trainable_tokens_delta", "magnitude")
    )
)
PATHS = st.lists(NAMES | st.integers(0, 200).map(str), min_size=1, max_size=8).filter(
    lambda parts: parts[0] not in ("module", "model", "actor", "policy", "student")
)
OUTER = st.lists(st.sampled_from(["module", "_orig_mod", "_fsdp_wrapped_module"]), max_size=3)
INNER = st.lists(st.sampled_from(["_orig_mod", "_checkpoint_wrapped_module"]), max_size=2)
PARAMETERS = st.sampled_from(
    [
        ("lora_A", "weight", Matrix.A),
        ("lora_B", "weight", Matrix.B),
        ("lora_B", "bias", Matrix.BIAS_B),
        ("lora_embedding_A", None, Matrix.EMBEDDING_A),
        ("lora_embedding_B", None, Matrix.EMBEDDING_B),
        ("lora_magnitude_vector", None, Matrix.MAGNITUDE),
        ("lora_magnitude_vector", "weight", Matrix.MAGNITUDE),
    ]
)


@given(OUTER, st.booleans(), INNER, PATHS, st.integers(0, 7), PARAMETERS, st.none() | NAMES)
def test_what_a_key_is_made_of_is_found_again(
    outer: list[str],
    peft: bool,
    inner: list[str],
    path: list[str],
    at: int,
    parameter: tuple[str, str | None, Matrix],
    name: str | None,
) -> None:
    word, leaf, matrix = parameter
    at = min(at, len(path) - 1)
    parts = [*outer, *(["base_model", "model"] if peft else []), *path[:at], *inner, *path[at:]]
    parts += [part for part in (word, name, leaf) if part is not None]
    key = parse_key(".".join(parts))
    assert key.module == ".".join(path)
    assert key.wrappers == (*outer, *(("base_model", "model") if peft else ()), *inner)
    assert (key.matrix, key.adapter_name, key.parameter) == (matrix, name, word)


@given(st.text() | st.lists(st.sampled_from([*"ab", "", "base_model", "lora_A"])).map(".".join))
def test_any_text_is_taken_without_an_error(text: str) -> None:
    assert parse_key(text).text == text


@pytest.mark.parametrize(
    "part", [".", "base_model.", "_orig_mod.", "a.", "base_layer.", "modules_to_save.", "lora_A."]
)
def test_a_key_takes_time_in_proportion_to_its_length(part: str) -> None:
    def seconds(times: int) -> float:
        text = part * times + "weight"
        begin = time.process_time()
        parse_key(text)
        return time.process_time() - begin

    short = min(seconds(20_000) for _ in range(3))
    long = min(seconds(200_000) for _ in range(3))
    assert long < 60 * short + 0.3


@pytest.mark.slow
def test_every_method_of_peft_betrays_itself_by_its_keys() -> None:
    peft = pytest.importorskip("peft")
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as configs

    from tests.adapters.peft_adapters import make_base

    settings: dict[str, dict[str, object]] = {
        "ADALORA": {"total_step": 10},
        "BOFT": {"boft_block_size": 8},
        "OFT": {"oft_block_size": 8, "r": 0},
        "IA3": {"feedforward_modules": []},
        "FOURIERFT": {"n_frequency": 8},
        "WAVEFT": {"n_frequency": 8},
        "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
        "TRAINABLE_TOKENS": {"token_indices": [1], "target_modules": ["embed_tokens"]},
        "C3A": {"block_size": 32},
        "VBLORA": {"num_vectors": 8, "vector_length": 16},
        "ROAD": {"group_size": 32},
        "SHIRA": {"r": 4},
    }
    # needs scikit-learn; needs other adapters; takes seconds to decompose the model
    left_out = {"ADAMSS", "XLORA", "FROD"}
    seen = 0
    for kind, config_class in configs.items():
        if kind.value in left_out:
            continue
        fields = config_class.__dataclass_fields__
        given = dict(settings.get(kind.value, {}))
        if "target_modules" in fields and kind.value != "ADAPTION_PROMPT":
            given.setdefault("target_modules", ["q_proj", "v_proj"])
        if "num_virtual_tokens" in fields:
            given["num_virtual_tokens"] = 4
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(
                make_base("llama"), config_class(task_type="CAUSAL_LM", **given)
            )
            keys = [parse_key(text) for text in peft.get_peft_model_state_dict(model)]
        others = {key.parameter for key in keys if key.matrix is Matrix.OTHER}
        told = {OTHER_PARAMETERS.get(word) for word in others}
        assert told <= {kind.value, "PROMPT_LEARNING"}, kind
        seen += 1
    assert seen >= 40

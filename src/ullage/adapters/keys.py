"""The grammar of adapter keys: a key of any known writer, taken apart into an `AdapterKey`.

Holds the grammar and its tables of words: wrappers, parameters, infixes. It looks at one key at a
time; what needs the configuration too (experts, modules_to_save) is `modules.py`.

    key       := wrapper* path infix* parameter
    parameter := WORD [adapter_name] ["weight" | "bias"]  |  "weight" | "bias"
"""

from __future__ import annotations

from collections.abc import Sequence

from ullage.adapters.adapter import AdapterKey, Matrix

# Words for LoRA's own parameters. PEFT 0.21.2 (tuners/lora/layer.py), MLX (mlx_lm 0.32.2
# tuner/lora.py) and torchtune 0.6.1 (modules/peft/lora.py), Megatron's adapters, kohya's scripts.
_MATRICES = {
    "lora_A": Matrix.A,
    "lora_B": Matrix.B,
    "lora_a": Matrix.A,
    "lora_b": Matrix.B,
    "lora_down": Matrix.A,
    "lora_up": Matrix.B,
    "lora_embedding_A": Matrix.EMBEDDING_A,
    "lora_embedding_B": Matrix.EMBEDDING_B,
    "lora_magnitude_vector": Matrix.MAGNITUDE,
    "magnitude": Matrix.MAGNITUDE,
    "trainable_tokens_delta": Matrix.TOKENS,
}
# Megatron's adapters are modules of their own below the adapted one: `adapter.linear_in.weight`.
_LINEARS = {"linear_in": Matrix.A, "linear_out": Matrix.B}

# Where Megatron's adapters stand for another module than the one that holds them: NeMo 1 names the
# site (`self_attention.adapter_layer.lora_kqv_adapter`), CanonicalLoRA of Megatron-Bridge the part
# of a fused module (`linear_qkv.adapter.adapter_q`).
_SITES = {
    "lora_kqv_adapter": "linear_qkv",
    "lora_dense_attention_adapter": "linear_proj",
    "lora_hto4h_adapter": "linear_fc1",
    "lora_4htoh_adapter": "linear_fc2",
    "adapter_q": "linear_q",
    "adapter_k": "linear_k",
    "adapter_v": "linear_v",
    "adapter_gate": "linear_fc1_gate",
    "adapter_up": "linear_fc1_up",
}

# Words for the parameters of other methods, and the PEFT type that they betray
# (PEFT 0.21.2, tuners/*/layer.py: adapter_layer_names and the buffers saved with them).
OTHER_PARAMETERS = {
    "lora_E": "ADALORA",
    "ranknum": "ADALORA",
    "lora_diag": "LORA",
    "lora_monteclora_sampler": "LORA",
    "vera_A": "VERA",
    "vera_B": "VERA",
    "vera_lambda_b": "VERA",
    "vera_lambda_d": "VERA",
    "pvera_A": "PVERA",
    "pvera_B": "PVERA",
    "pvera_lambda_b": "PVERA",
    "pvera_lambda_d": "PVERA",
    "ia3_l": "IA3",
    "hada_w1_a": "LOHA",
    "hada_w1_b": "LOHA",
    "hada_w2_a": "LOHA",
    "hada_w2_b": "LOHA",
    "hada_t1": "LOHA",
    "hada_t2": "LOHA",
    "lokr_w1": "LOKR",
    "lokr_w1_a": "LOKR",
    "lokr_w1_b": "LOKR",
    "lokr_w2": "LOKR",
    "lokr_w2_a": "LOKR",
    "lokr_w2_b": "LOKR",
    "lokr_t2": "LOKR",
    "oft_R": "OFT",
    "oft_embedding_R": "OFT",
    "oft_r": "OFT",
    "oft_s": "OFT",
    "boft_R": "BOFT",
    "boft_s": "BOFT",
    "hra_u": "HRA",
    "road_theta": "ROAD",
    "road_alpha": "ROAD",
    "randlora_A": "RANDLORA",
    "randlora_B": "RANDLORA",
    "randlora_lambda": "RANDLORA",
    "randlora_gamma": "RANDLORA",
    "fourierft_spectrum": "FOURIERFT",
    "waveft_spectrum": "WAVEFT",
    "vblora_logits_A": "VBLORA",
    "vblora_logits_A_topk_indices": "VBLORA",
    "vblora_logits_A_topk_weights": "VBLORA",
    "vblora_logits_B": "VBLORA",
    "vblora_logits_B_topk_indices": "VBLORA",
    "vblora_logits_B_topk_weights": "VBLORA",
    "vblora_vector_bank": "VBLORA",
    "unilora_theta_d": "UNILORA",
    "unilora_indices_A": "UNILORA",
    "unilora_indices_B": "UNILORA",
    "unilora_scales_A": "UNILORA",
    "unilora_scales_B": "UNILORA",
    "shira_weight": "SHIRA",
    "shira_indices": "SHIRA",
    "c3a_kernel": "C3A",
    "miss_block": "MISS",
    "bone_block": "BONE",
    "hira_A": "HIRA",
    "hira_B": "HIRA",
    "hira_embedding_A": "HIRA",
    "hira_embedding_B": "HIRA",
    "gralora_A": "GRALORA",
    "gralora_B": "GRALORA",
    "gralora_A_general": "GRALORA",
    "gralora_B_general": "GRALORA",
    "delora_A": "DELORA",
    "delora_B": "DELORA",
    "delora_lambda": "DELORA",
    "delora_w_norm": "DELORA",
    "osf_svd_params": "OSF",
    "ln_tuning_layers": "LN_TUNING",
    "poly_lora_A": "POLY",
    "poly_lora_B": "POLY",
    "poly_router": "POLY",
    "lily_A": "LILY",
    "lily_B": "LILY",
    "lily_router": "LILY",
    "psoft_R": "PSOFT",
    "psoft_A": "PSOFT",
    "psoft_B": "PSOFT",
    "psoft_alpha": "PSOFT",
    "psoft_beta": "PSOFT",
    "peanut_A": "PEANUT",
    "peanut_B": "PEANUT",
    "peanut_encoders": "PEANUT",
    "peanut_decoders": "PEANUT",
    "tinylora_v": "TINYLORA",
    "tinylora_A": "TINYLORA",
    "tinylora_B": "TINYLORA",
    "tinylora_P": "TINYLORA",
    "adamss_A": "ADAMSS",
    "adamss_B": "ADAMSS",
    "beft_bias": "BEFT",
    "deft_P": "DEFT",
    "deft_R": "DEFT",
    "frod_lambda_l": "FROD",
    "frod_lambda_s_values": "FROD",
    "supertuning_values": "SUPERTUNING",
    "supertuning_lora_A": "SUPERTUNING",
    "supertuning_lora_B": "SUPERTUNING",
    "adaption_gate": "ADAPTION_PROMPT",
    "adaption_prompt": "ADAPTION_PROMPT",
    "prompt_embeddings": "PROMPT_LEARNING",
    "prefix_task_cols": "MULTITASK_PROMPT_TUNING",
    "prefix_task_rows": "MULTITASK_PROMPT_TUNING",
    "internal_xlora_classifier": "XLORA",
}
# Words that PEFT (or another writer) puts between the adapted module and its parameter. The one
# that carries an adapter's name is followed by it.
_NAMED_INFIX = "modules_to_save"
_INFIXES = frozenset(
    ("base_layer", "original_module", "token_adapter", "adapter", "adapter_layer", _NAMED_INFIX)
)

# What wraps a whole model, and stands before its tree: torch's DDP and DeepSpeed (`module`),
# Lightning and RL trainers. Only words in front count: models have their own `model`, `module`.
_OUTER = frozenset(
    (
        *("module", "model", "pl_module", "_forward_module", "pretrained_model", "actor", "policy"),
        *("policy_model", "student"),
    )
)
# What wraps a module anywhere in the tree; no model of transformers has a child of these names.
_ANYWHERE = frozenset(
    (
        *("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module"),
        *("_forward_module", "_ddp_module", "_wrapped_module"),
    )
)


def parse_key(text: str) -> AdapterKey:
    """`text` taken apart. Never raises: what is no adapter key is `Matrix.OTHER`.

    A trailing `weight` or `bias` without a word of an adapter before it is a full tensor that was
    trained along (`Matrix.SAVED`), or the base's own where `base_layer` stands before a weight.
    """
    parts = text.split(".")
    end, word, matrix, name = _parameter(parts)
    wrappers, path = _path(parts[:end])
    if matrix is Matrix.SAVED:
        path, infixes, name = _infixes(path)
        kept = word == "weight" and "base_layer" in infixes[-1:]
        if kept or "original_module" in infixes[-1:]:
            matrix = Matrix.BASE
    else:
        path, infixes, _ = _infixes(path)
    return AdapterKey(text, (*wrappers, *infixes), ".".join(path), matrix, name, word)


def _parameter(parts: Sequence[str]) -> tuple[int, str, Matrix, str | None]:
    """Where the path ends, the writer's word for the parameter, what it is, the adapter's name."""
    last = len(parts) - 1
    leaf = parts[last] if parts[last] in ("weight", "bias") else None
    # `lora_A.weight`, `lora_A.default.weight`, `lora_A.default`, `lora_A`
    for position in (last, last - 1, last - 2):
        if position < 0 or (position == last - 2 and leaf is None):
            break
        word = parts[position]
        matrix = _MATRICES.get(word)
        if matrix is None and word in OTHER_PARAMETERS:
            matrix = Matrix.OTHER
        if matrix is None:
            continue
        between = parts[position + 1 : last] if leaf else parts[position + 1 :]
        if word == "magnitude" and leaf is not None:
            continue  # torchtune's is bare; a module of this name is the model's own
        return position, word, _of_leaf(matrix, leaf), between[0] if between else None
    if last >= 1 and leaf is not None and parts[last - 1] in _LINEARS:
        matrix = _of_leaf(_LINEARS[parts[last - 1]], leaf)
        return last - 1, parts[last - 1], matrix, None
    if leaf is not None:
        return last, leaf, Matrix.SAVED, None
    return last, parts[last], Matrix.OTHER, None


def _of_leaf(matrix: Matrix, leaf: str | None) -> Matrix:
    if leaf != "bias":
        return matrix
    return Matrix.BIAS_B if matrix is Matrix.B else Matrix.OTHER


def _path(parts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The wrappers in order, and the path in the model's own tree (infixes still at its end)."""
    wrappers: list[str] = []
    path: list[str] = []
    position = _outer_end(parts)
    wrappers.extend(parts[:position])
    while position < len(parts):
        part = parts[position]
        if part in _ANYWHERE:
            wrappers.append(part)
        elif part == "base_model" and (pair := _pair_end(parts, position)):
            # PEFT's two own words: at the root of what it wraps, which may be a part of the model.
            wrappers.extend(parts[position:pair])
            position = pair
            continue
        elif part in ("module", "base_model") and not path:
            wrappers.append(part)
        else:
            path.append(part)
        position += 1
    return wrappers, path


def _outer_end(parts: Sequence[str]) -> int:
    """How many words before PEFT's own `base_model.model` belong to what wraps the PEFT model."""
    position = 0
    while position < len(parts) and (parts[position] in _OUTER or parts[position] in _ANYWHERE):
        position += 1
    found = position < len(parts) and parts[position] == "base_model"
    return position if found and _pair_end(parts, position) else 0


def _pair_end(parts: Sequence[str], position: int) -> int:
    """The position after `base_model … model` at `position`, 0 when `model` does not follow."""
    position += 1
    while position < len(parts) and parts[position] in _ANYWHERE:
        position += 1
    return position + 1 if position < len(parts) and parts[position] == "model" else 0


def _infixes(path: list[str]) -> tuple[list[str], list[str], str | None]:
    """The path without the words of adapters at its end, those words, and an adapter's name."""
    end = len(path)
    name = None
    if end >= 2 and path[end - 2] == _NAMED_INFIX:
        name = path[end - 1]
        end -= 2
    elif _NAMED_INFIX in path[:-1]:
        # A module with children was saved: `score.modules_to_save.default.dense.weight`.
        at = path.index(_NAMED_INFIX)
        name = path[at + 1]
        return path[:at] + path[at + 2 :], [_NAMED_INFIX], name
    infixes = [_NAMED_INFIX] if name is not None else []
    site = path[end - 1] if end > 1 and path[end - 2] in _INFIXES else ""
    if site in _SITES:
        end -= 1
        infixes.insert(0, site)
    while end > 0 and path[end - 1] in _INFIXES:
        end -= 1
        infixes.insert(0, path[end])
    if site in ("adapter_q", "adapter_k", "adapter_v", "adapter_gate", "adapter_up") and end > 0:
        end -= 1  # a part of the fused module takes its place
    return path[:end] + ([_SITES[site]] if site in _SITES else []), infixes, name

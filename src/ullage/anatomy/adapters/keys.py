"""The grammar of adapter keys: a key of any known writer, taken apart into an `AdapterKey`.

Holds the grammar and its tables of words: wrappers, parameters, infixes. It looks at one key at a
time; what needs the configuration too (experts, modules_to_save) is `modules.py`.

    key       := wrapper* path infix* parameter
    parameter := WORD [adapter_name] ["weight" | "bias"]  |  "weight" | "bias"
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ullage.anatomy.adapters.adapter import AdapterKey, Matrix
from ullage.anatomy.adapters.methods import OTHER_PARAMETERS

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
    "trainable_tokens_delta": Matrix.TOKENS,
}
_WORDS = frozenset((*_MATRICES, *OTHER_PARAMETERS))
_LEAVES = frozenset(("weight", "bias"))
# torchtune's DoRA: a parameter, not a module; one of this name with a weight is the model's own.
_BARE = {"magnitude": Matrix.MAGNITUDE}

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

_FUSED_PARTS = frozenset(site for site in _SITES if not site.startswith("lora_"))

# Words that PEFT (or another writer) puts between the adapted module and its parameter. The one
# that carries an adapter's name is followed by it.
_NAMED_INFIX = "modules_to_save"
_INFIXES = frozenset(("base_layer", "original_module", "token_adapter", _NAMED_INFIX))
_MEGATRON_INFIXES = _INFIXES | {"adapter", "adapter_layer"}

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
    wrappers, path = _path(tuple(parts[:end]))
    if word in _LINEARS:
        path, infixes = _megatron_infixes(path)
    else:
        path, infixes, saved_name = _infixes(path)
        name = saved_name if matrix is Matrix.SAVED else name
    if matrix is Matrix.SAVED and infixes:
        kept = infixes[-1] == "base_layer" and word == "weight"
        matrix = Matrix.BASE if kept or infixes[-1] == "original_module" else matrix
    return AdapterKey(text, (*wrappers, *infixes), ".".join(path), matrix, name, word)


def _parameter(parts: Sequence[str]) -> tuple[int, str, Matrix, str | None]:
    """Where the path ends, the writer's word for the parameter, what it is, the adapter's name."""
    last = len(parts) - 1
    position = last
    while position >= 0 and parts[position] not in _WORDS:
        position -= 1
    if position >= 0:
        return position, parts[position], *_of_word(parts[position], parts[position + 1 :])
    if parts[last] not in _LEAVES:
        return last, parts[last], _BARE.get(parts[last], Matrix.OTHER), None
    if last >= 2 and parts[last - 1] in _LINEARS and _is_megatron(parts[last - 2]):
        matrix = _of_leaf(_LINEARS[parts[last - 1]], parts[last])
        return last - 1, parts[last - 1], matrix, None
    return last, parts[last], Matrix.SAVED, None


def _is_megatron(part: str) -> bool:
    return part in _SITES or part == "adapter"


def _of_word(word: str, tail: Sequence[str]) -> tuple[Matrix, str | None]:
    """What a parameter is by its word and what follows: `[adapter_name] ["weight" | "bias"]`."""
    matrix = _MATRICES.get(word, Matrix.OTHER)
    leaf = tail[-1] if tail and tail[-1] in _LEAVES else None
    names = tail[:-1] if leaf else tail
    if len(names) > 1:
        return Matrix.OTHER, names[0]
    return _of_leaf(matrix, leaf), names[0] if names else None


def _of_leaf(matrix: Matrix, leaf: str | None) -> Matrix:
    if leaf != "bias":
        return matrix
    return Matrix.BIAS_B if matrix is Matrix.B else Matrix.OTHER


@lru_cache(maxsize=4)  # A and B of one module follow one another
def _path(parts: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The wrappers in order, and the path in the model's own tree (infixes still at its end).

    Both lists are kept for the next key of the module: not to be changed.
    """
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
    begin = end
    while end > 0 and path[end - 1] in _INFIXES:
        end -= 1
    return path[:end], path[end:begin] + ([] if name is None else [_NAMED_INFIX]), name


def _megatron_infixes(path: list[str]) -> tuple[list[str], list[str]]:
    """The path of the module that Megatron's adapter stands for, and the words left out."""
    end = len(path)
    site = path[end - 1]
    if site in _SITES:
        end -= 1
    begin = end
    while end > 0 and path[end - 1] in _MEGATRON_INFIXES:
        end -= 1
    left_out = path[end:begin]
    if site not in _SITES:
        return path[:end], left_out
    if site in _FUSED_PARTS and end > 0:
        end -= 1  # the part takes the place of the fused module
    return [*path[:end], _SITES[site]], [*left_out, site]

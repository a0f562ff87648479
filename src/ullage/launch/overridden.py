"""A model as its server sees it: the configuration with the keys that the command replaces.

Holds what an engine makes of a replaced key. vLLM and SGLang set keys on the finished
configuration object, so a key can do nothing, or drop others; what they would make of a key that
is not known here stays open, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ullage.anatomy import Model, read_config
from ullage.anatomy.config.defaults import class_defaults
from ullage.anatomy.config.spellings import SPELLINGS, TEXT_KEYS
from ullage.launch.launch import EngineName, Launch
from ullage.launch.overrides import overrides_of

Config = dict[str, object]

_SET_LATE = """
max_position_embeddings vocab_size rms_norm_eps layer_norm_eps layer_norm_epsilon
num_key_value_heads intermediate_size moe_intermediate_size shared_expert_intermediate_size
num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok
num_nextn_predict_layers first_k_dense_replace attention_chunk_size index_topk
tie_word_embeddings eos_token_id bos_token_id pad_token_id
initializer_range attention_dropout use_cache hidden_dropout final_logit_softcapping
attn_logit_softcapping routed_scaling_factor
"""
SET_LATE = frozenset(_SET_LATE.split())
"""Keys of which no other is computed while the configuration object is made, so that setting them
afterwards is the same as writing them into the file (transformers 5.19, models/*/configuration_*).
"""

ROPE_OBJECTS = ("rope_parameters", "rope_scaling")
"""One attribute under two names (transformers 5.19: configuration_utils.py, rope_scaling)."""

ROPE_SCALARS = ("rope_theta", "rotary_emb_base")
PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction", "rotary_dim")
UNSAID_THETA = 10_000
"""What vLLM takes where rope_parameters says no rope_theta (model_executor/layers/
rotary_embedding/__init__.py, get_rope)."""

DTYPES = ("dtype", "torch_dtype")
"""One attribute under two names (same file)."""

EVERY_CLASS = frozenset({"tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id"})

WHOLE_OBJECTS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Replaced:
    """What became of the keys that the command replaces, each by its dotted name.

    `applied` are in the model that is judged, `written` are the keys of its configuration that
    they set. `idle` do nothing in the engine, with the reason.
    `unread` are keys that nothing here reads. `open` (key, why) leave the model unknown. `lost`
    are settings of the file that a replacement drops, `fatal` what stops the server, in words.
    """

    flag: str
    applied: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    idle: tuple[tuple[str, str], ...] = ()
    unread: tuple[str, ...] = ()
    open: tuple[tuple[str, str], ...] = ()
    lost: tuple[str, ...] = ()
    fatal: tuple[str, ...] = ()

    def missing(self) -> tuple[str, ...]:
        """What a verdict on the configuration lacks; empty when the model is known."""
        return tuple(f"what {self.flag} makes of {key} ({why})" for key, why in self.open)


@dataclass(slots=True)
class _Changes:
    engine: EngineName
    applied: list[str] = field(default_factory=list)
    idle: list[tuple[str, str]] = field(default_factory=list)
    open: list[tuple[str, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    fatal: list[str] = field(default_factory=list)
    drop_side: bool = False


def started_model(model: Model, launch: Launch | None) -> tuple[Model, Replaced | None]:
    """The model with the command's overrides in it, and what became of each; None without any.

    Raises:
        BadInput: the replaced configuration describes no model.
    """
    given = None if launch is None else overrides_of(launch)
    if given is None or launch is None:
        return model, None
    if given.hidden:
        return model, Replaced(given.flag, open=(("the configuration", given.hidden),))
    config = model.files.config
    if config is None or model.files.kind == "gguf":
        why = "the model has no config.json"
        return model, Replaced(given.flag, open=tuple((key, why) for key in given.values))
    changes = _Changes(launch.engine)
    made = _level(config, given.values, changes, "", _text_key(config))
    files = replace(
        model.files,
        config=made,
        quant_side=None if changes.drop_side else model.files.quant_side,
        quant_side_file=None if changes.drop_side else model.files.quant_side_file,
    )
    if not changes.applied:
        return model, _replaced(given.flag, changes, ())
    anatomy = read_config(
        made,
        file=f"{files.config_file} with {given.flag} of {launch.file}",
        quant_side_file=files.quant_side,
    )
    changed = Model(files, anatomy, model.checkpoint)
    return changed, _replaced(given.flag, changes, changed.anatomy.unread)


def _replaced(flag: str, changes: _Changes, unread: Iterable[str]) -> Replaced:
    nothing = {key.rsplit(".", 1)[-1] for key in unread}
    known = [key for key in changes.applied if key.rsplit(".", 1)[-1] not in nothing]
    return Replaced(
        flag,
        tuple(known),
        tuple(_written(name) for name in known),
        tuple(changes.idle),
        tuple(key for key in changes.applied if key not in known),
        tuple(changes.open),
        tuple(changes.lost),
        tuple(changes.fatal),
    )


def _written(name: str) -> str:
    """The key under which the configuration now says it."""
    parent, dot, key = name.rpartition(".")
    return f"{parent}{dot}{ROPE_OBJECTS[0] if key in ROPE_OBJECTS else key}"


def _text_key(config: Mapping[str, object]) -> str:
    return next((key for key in TEXT_KEYS if isinstance(config.get(key), Mapping)), "")


def _level(
    config: Mapping[str, object],
    values: Mapping[str, object],
    changes: _Changes,
    prefix: str,
    text_key: str,
) -> Config:
    """One level of the configuration with its keys replaced."""
    made = dict(config)
    for key, value in values.items():
        name = f"{prefix}{key}"
        inner = config.get(key)
        if key in ROPE_OBJECTS:
            _rope_object(made, name, value, changes, nested=bool(prefix), text_key=text_key)
        elif key in WHOLE_OBJECTS and not prefix:
            made[key] = value
            changes.drop_side = True
            changes.applied.append(name)
        elif isinstance(value, Mapping) and isinstance(inner, Mapping) and key.endswith("_config"):
            # SGLang too keeps the part and sets the keys in it.
            made[key] = _level(inner, value, changes, f"{name}.", "")
        elif isinstance(value, Mapping):
            if key in config or key.endswith("_config"):
                changes.open.append((name, "an object in the place of another"))
            else:
                made[key] = value
                changes.applied.append(name)
        else:
            _scalar(made, key, value, changes, prefix, text_key)
    return made


def _scalar(
    made: Config, key: str, value: object, changes: _Changes, prefix: str, text_key: str
) -> None:
    name = f"{prefix}{key}"
    inner = made.get(text_key) if text_key else None
    if isinstance(inner, Mapping) and key not in made and _is_structure(key, inner):
        changes.idle.append((name, f"the language model is read from {text_key}"))
    elif key in made and type(made[key]) is type(value) and made[key] == value:
        changes.applied.append(name)  # the same as in the file
    elif key in ROPE_SCALARS:
        if class_defaults(str(made.get("model_type"))) is None:
            changes.open.append((name, "a configuration class that is not known here"))
        else:
            changes.idle.append((name, "rope_parameters already has the file's"))
    elif key == "num_hidden_layers" and isinstance(value, int):
        _fewer_layers(made, name, value, changes)
    elif key in DTYPES:
        for other in DTYPES:
            made.pop(other, None)
        made[key] = value
        changes.applied.append(name)
    elif key in SET_LATE:
        others = [other for other in SPELLINGS.get(key, ()) if other in made]
        if others:
            changes.open.append((name, f"the file says {others[0]}"))
        elif isinstance(inner, Mapping) and key in inner:
            changes.open.append((name, f"{text_key} has one of its own"))
        elif key not in made and not _in_class(key, made):
            changes.open.append((name, "the file and its class have no such key"))
        else:
            made[key] = value
            changes.applied.append(name)
    elif key in made or _is_structure(key, made):
        changes.open.append((name, "other keys may have been computed from the file's"))
    else:
        made[key] = value
        changes.applied.append(name)


def _in_class(key: str, config: Mapping[str, object]) -> bool:
    known = class_defaults(str(config.get("model_type")))
    return key in EVERY_CLASS or (known is not None and key in known.defaults)


def _is_structure(key: str, config: Mapping[str, object]) -> bool:
    """Whether the key is one that this configuration, its class or any other has."""
    return (
        key in config
        or key in SET_LATE
        or key in SPELLINGS
        or key in ROPE_SCALARS
        or key in PARTIAL_KEYS
        or key in DTYPES
        or key in ("architectures", "model_type", "layer_types", "sliding_window", "head_dim")
        or _in_class(key, config)
    )


def _fewer_layers(made: Config, name: str, value: int, changes: _Changes) -> None:
    """The first layers only: lists of one entry per layer are indexed, so their heads stay."""
    layers = made.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(value, bool) or not 1 <= value <= layers:
        changes.open.append((name, "more layers than the file says"))
        return
    if any(isinstance(v, str) and len(v) == layers for v in made.values()):
        changes.open.append((name, "the layers are written as one text"))
        return
    for key, held in made.items():
        if isinstance(held, list) and len(held) == layers:
            made[key] = held[:value]
    made["num_hidden_layers"] = value
    changes.applied.append(name)


def _rope_object(
    made: Config, name: str, value: object, changes: _Changes, *, nested: bool, text_key: str
) -> None:
    """rope_parameters (or rope_scaling), which is one attribute however the file writes it."""
    if text_key:
        changes.idle.append((name, f"the language model is read from {text_key}"))
        return
    if value is not None and not isinstance(value, Mapping):
        changes.open.append((name, "expected an object"))
        return
    said = next((made[key] for key in ROPE_OBJECTS if isinstance(made.get(key), Mapping)), {})
    known = class_defaults(str(made.get("model_type")))
    usual = {} if known is None else known.defaults
    inner = usual.get("rope_parameters")
    inner = inner if isinstance(inner, Mapping) else {}
    by_kind = any(_by_kind(place) for place in (said, value, inner))
    if known is None or by_kind or "rope_local_base_freq" in made:
        changes.open.append((name, "rotary settings that differ between layers or classes"))
        return
    assert isinstance(said, Mapping)
    new: Config = dict(value or {})
    # vLLM merges inside a part and replaces at the top; SGLang the other way round.
    if nested == (changes.engine == "vllm") and value is not None:
        new = {**said, **new}
        for key in ROPE_OBJECTS:
            made.pop(key, None)
        made["rope_parameters"] = new
        changes.applied.append(name)
        return
    places = (made, said, usual, inner)
    partial = [key for key in PARTIAL_KEYS if any(key in place for place in places)]
    if partial and partial[0] not in new:
        changes.open.append((name, f"it drops {partial[0]}"))
        return
    theta = _theta(said, made, inner, usual)
    if changes.engine != "vllm" and "rope_theta" not in new:
        changes.open.append((name, "it drops rope_theta"))
        return
    for key in (*ROPE_OBJECTS, *ROPE_SCALARS):
        made.pop(key, None)
    if "rope_theta" not in new and theta != UNSAID_THETA:
        changes.lost.append(
            f"{name} says no rope_theta, so vLLM takes {UNSAID_THETA:,} and not the file's "
            f"{theta:,.10g}"
        )
    if new and "rope_type" not in new:
        # Old spellings were mended before this one came (config/model.py,
        # _get_and_verify_max_len, which reads rope_type of whatever is there).
        changes.fatal.append(f"{name} says no rope_type, which vLLM asks for at start")
    made["rope_parameters"] = {"rope_type": "default", "rope_theta": UNSAID_THETA, **new}
    changes.applied.append(name)


def _by_kind(value: object) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Mapping) for v in value.values())


def _theta(*places: Mapping[str, object]) -> float:
    """The first rope_theta that one of the places says."""
    for place in places:
        for key in (*ROPE_SCALARS, "default_theta"):
            found = place.get(key)
            if isinstance(found, int | float):
                return float(found)
    return float(UNSAID_THETA)

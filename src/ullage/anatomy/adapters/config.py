"""adapter_config.json → `AdapterConfig`: every field checked, what nobody reads listed.

Holds the dialects (PEFT and everything that writes its layout, MLX, mlx-vlm's older one). Which
tensors there are is `read.py`; the scale of one module is `scale.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ullage.anatomy.adapters.adapter import AdapterConfig
from ullage.anatomy.config.keys import show
from ullage.anatomy.open import read_json_object
from ullage.errors import MalformedConfig

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 4 << 20
MAX_RANK = 1 << 20
MAX_ALPHA = 1e9
MAX_PATTERNS = 100_000
_MAX_ITEMS = 1_000_000
_MAX_TEXT = 10_000

# What PEFT 0.21.2 knows (utils/peft_types.py), what older releases knew, and MLX's own word.
PEFT_TYPES = frozenset(
    (
        *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "LORA"),
        *("ADALORA", "ADAMSS", "BOFT", "ADAPTION_PROMPT", "IA3", "BEFT", "LILY", "LOHA", "LOKR"),
        *("OFT", "POLY", "LN_TUNING", "VERA", "FROD", "PVERA", "FOURIERFT", "GLORA", "XLORA"),
        *("HRA", "VBLORA", "UNILORA", "CPT", "MISS", "RANDLORA", "ROAD", "TRAINABLE_TOKENS"),
        *("HIRA", "SHIRA", "C3A", "WAVEFT", "OSF", "DELORA", "GRALORA", "CARTRIDGE", "TINYLORA"),
        *("PSOFT", "PEANUT", "SHADOW", "SUPERTUNING", "DEFT", "BONE", "CORDA", "FULL"),
    )
)
# Fields of a LoraConfig (PEFT 0.21.2) that change nothing of what is stored or how it is applied.
_WITHOUT_EFFECT = frozenset(
    (
        *("peft_type", "peft_version", "inference_mode", "lora_dropout", "megatron_config"),
        *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("velora_config", "runtime_config", "qalora_group_size", "ensure_weight_tying"),
        *("target_modules_to_tie", "lora_dtype", "ephemeral_gpu_offload"),
    )
)
# Fields that change the sum base + scale·B·A when they are set, and the name of what they bring.
_VARIANTS = {
    "use_dora": "dora",
    "use_qalora": "qalora",
    "use_bdlora": "bdlora",
    "alora_invocation_tokens": "alora",
    "arrow_config": "arrow",
    "kasa_config": "kasa",
    "monteclora_config": "monteclora",
    "layer_replication": "layer_replication",
}
_READ = frozenset(
    (
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
        *("exclude_modules", "target_parameters", "modules_to_save", "layers_to_transform"),
        *("layers_pattern", "bias", "lora_bias", "fan_in_fan_out", "init_lora_weights"),
        *("trainable_token_indices", "task_type", "base_model_name_or_path", "revision"),
        *("auto_mapping",),
        *_VARIANTS,
    )
)


def read_adapter_config(path: Path) -> AdapterConfig:
    """The configuration at `path`: an adapter_config.json, or the directory that holds one.

    Raises MalformedConfig: not there, not JSON, or a field that no writer could have meant.
    """
    file = path / CONFIG_NAME if path.is_dir() else path
    return config_from(read_json_object(file, MAX_CONFIG_BYTES), str(file))


def config_from(raw: Mapping[str, object], file: str) -> AdapterConfig:
    """The configuration in the parsed JSON `raw`; `file` is named in errors.

    Raises MalformedConfig.
    """
    fields = _Fields(raw, file)
    if "lora_parameters" in raw or "fine_tune_type" in raw:
        return _mlx(fields)
    if "peft_type" not in raw and "rank" in raw and "r" not in raw:
        return _mlx_vlm(fields)
    return _peft(fields)


def _peft(fields: _Fields) -> AdapterConfig:
    raw = fields.raw
    peft_type = _peft_type(fields)
    is_lora = peft_type in ("LORA", "ADALORA")
    auto_mapping = fields.mapping("auto_mapping")
    known = _READ | _WITHOUT_EFFECT
    return AdapterConfig(
        peft_type=peft_type,
        writer="unsloth" if (auto_mapping or {}).get("unsloth_fixed") is True else "peft",
        rank=fields.integer("r", 1, MAX_RANK) if peft_type == "LORA" else None,
        alpha=fields.number("lora_alpha", MAX_ALPHA) if is_lora else None,
        use_rslora=fields.boolean("use_rslora"),
        use_dora=fields.boolean("use_dora"),
        rank_pattern=fields.rank_pattern(peft_type == "ADALORA") if is_lora else (),
        alpha_pattern=fields.alpha_pattern() if is_lora else (),
        target_modules=fields.words_or_pattern("target_modules"),
        exclude_modules=fields.words_or_pattern("exclude_modules"),
        target_parameters=fields.words("target_parameters"),
        modules_to_save=fields.words("modules_to_save"),
        layers_to_transform=fields.integers_or_one("layers_to_transform"),
        layers_pattern=fields.words("layers_pattern", or_one=True),
        bias=fields.text("bias") or "none",
        lora_bias=fields.boolean("lora_bias"),
        fan_in_fan_out=fields.boolean("fan_in_fan_out"),
        init_lora_weights=fields.boolean_or_text("init_lora_weights", default=True),
        layer_replication=fields.pairs("layer_replication"),
        alora_invocation_tokens=fields.integers_or_one("alora_invocation_tokens"),
        trainable_token_indices=fields.token_indices("trainable_token_indices"),
        use_qalora=fields.boolean("use_qalora"),
        use_bdlora=bool(raw.get("use_bdlora")),
        task_type=fields.text("task_type"),
        base_model=fields.text("base_model_name_or_path"),
        revision=fields.text("revision"),
        auto_mapping=auto_mapping,
        variants=tuple(name for key, name in _VARIANTS.items() if raw.get(key)),
        raw=raw,
        unread=tuple(key for key in raw if key not in known) if peft_type == "LORA" else (),
        file=fields.file,
    )


def _peft_type(fields: _Fields) -> str:
    """The method's name in upper case; a file with LoRA's rank and alpha but no name is LoRA's."""
    given = fields.text("peft_type") or fields.text("swift_type")
    if given:
        return given.upper()
    if "r" in fields.raw and "lora_alpha" in fields.raw:
        return "LORA"
    raise fields.error("peft_type", "nothing", "the method, such as LORA")


def _mlx(fields: _Fields) -> AdapterConfig:
    """mlx_lm 0.32.2 (lora.py: the whole command line is saved) and mlx_vlm 0.7.10.

    The update is scale · (x A) B with A as [in, rank]; `alpha` of older files was never used.
    """
    kind = fields.text("fine_tune_type") or "lora"
    inner = _Fields(fields.mapping("lora_parameters") or {}, fields.file, "lora_parameters.")
    return AdapterConfig(
        peft_type="FULL" if kind == "full" else "LORA",
        writer="mlx",
        rank=inner.integer("rank", 1, MAX_RANK),
        scale=inner.number("scale", MAX_ALPHA),
        use_dora=kind == "dora",
        target_modules=inner.words("keys") or None,
        base_model=fields.text("model"),
        variants=("dora",) if kind == "dora" else (),
        raw=fields.raw,
        file=fields.file,
    )


def _mlx_vlm(fields: _Fields) -> AdapterConfig:
    """The older layout of mlx_vlm (trainer/peft/utils.py of 0.7.10 calls it legacy)."""
    rank = fields.integer("rank", 1, MAX_RANK)
    alpha = fields.number("alpha", MAX_ALPHA)
    return AdapterConfig(
        peft_type="LORA",
        writer="mlx-vlm",
        rank=rank,
        alpha=alpha,
        raw=fields.raw,
        file=fields.file,
    )


class _Fields:
    """The fields of one JSON object, each taken as the type that it must have."""

    __slots__ = ("file", "prefix", "raw")

    def __init__(self, raw: Mapping[str, object], file: str, prefix: str = "") -> None:
        self.raw = raw
        self.file = file
        self.prefix = prefix

    def error(self, field: str, found: object, expected: str) -> MalformedConfig:
        text = found if isinstance(found, str) else show(found)
        return MalformedConfig(
            text[:200], file=self.file, field=self.prefix + field, expected=expected
        )

    def integer(self, field: str, low: int, high: int) -> int | None:
        value = self.raw.get(field)
        return None if value is None else self._integer(field, value, low, high)

    def _integer(self, field: str, value: object, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.error(field, show(value), f"a whole number from {low} to {high}")
        return value

    def number(self, field: str, high: float) -> float | None:
        value = self.raw.get(field)
        return None if value is None else self._number(field, value, high)

    def _number(self, field: str, value: object, high: float) -> float:
        # Below zero an adapter is subtracted: unusual, but PEFT and the engines compute it.
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not -high <= value <= high:  # type: ignore[operator]
            raise self.error(field, show(value), f"a number from {-high:.0f} to {high:.0f}")
        return float(value)  # type: ignore[arg-type]

    def boolean(self, field: str) -> bool:
        value = self.raw.get(field)
        if value is not None and type(value) is not bool:
            raise self.error(field, show(value), "true or false")
        return value is True

    def boolean_or_text(self, field: str, *, default: bool) -> bool | str:
        value = self.raw.get(field)
        if value is None:
            return default if field not in self.raw else False
        return value if isinstance(value, bool) else self._text(field, value)

    def text(self, field: str) -> str | None:
        value = self.raw.get(field)
        return None if value is None else self._text(field, value)

    def _text(self, field: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.error(field, show(value), "a string")
        if len(value) > _MAX_TEXT:
            raise self.error(field, f"a string of {len(value)} characters", f"at most {_MAX_TEXT}")
        return value

    def mapping(self, field: str) -> Mapping[str, object] | None:
        value = self.raw.get(field)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(field, show(value), "an object")
        return value

    def _list(self, field: str, value: object, what: str) -> list[object]:
        if not isinstance(value, list):
            raise self.error(field, show(value), f"a list of {what}")
        if len(value) > _MAX_ITEMS:
            raise self.error(field, f"{len(value)} items", f"at most {_MAX_ITEMS}")
        return value

    def words(self, field: str, *, or_one: bool = False) -> tuple[str, ...]:
        value = self.raw.get(field)
        if value is None:
            return ()
        if or_one and isinstance(value, str):
            return (self._text(field, value),)
        return tuple(self._text(field, item) for item in self._list(field, value, "strings"))

    def words_or_pattern(self, field: str) -> tuple[str, ...] | str | None:
        value = self.raw.get(field)
        if value is None or isinstance(value, str):
            return None if value is None else self._text(field, value)
        return self.words(field)

    def integers_or_one(self, field: str) -> tuple[int, ...] | None:
        value = self.raw.get(field)
        if value is None:
            return None
        items = [value] if type(value) is int else self._list(field, value, "whole numbers")
        return tuple(self._integer(field, item, 0, 1 << 40) for item in items)

    def pairs(self, field: str) -> tuple[tuple[int, int], ...] | None:
        value = self.raw.get(field)
        if value is None:
            return None
        found: list[tuple[int, int]] = []
        for item in self._list(field, value, "pairs of layers"):
            if not isinstance(item, list) or len(item) != 2:
                raise self.error(field, show(item), "pairs of layers")
            first, last = (self._integer(field, layer, 0, 1 << 20) for layer in item)
            found.append((first, last))
        return tuple(found)

    def token_indices(self, field: str) -> Mapping[str, tuple[int, ...]] | tuple[int, ...] | None:
        value = self.raw.get(field)
        if not isinstance(value, Mapping):
            return self.integers_or_one(field)
        inner = _Fields(value, self.file, f"{self.prefix}{field}.")
        return {key: inner.integers_or_one(key) or () for key in value}

    def rank_pattern(self, is_adalora: bool) -> tuple[tuple[str, int], ...]:
        """Rank by pattern. AdaLoRA keeps a list of which singular values it kept instead."""
        found = []
        for key, value in self._pattern("rank_pattern"):
            field = f"rank_pattern.{key[:80]}"
            if is_adalora and isinstance(value, list):
                kept = sum(1 for item in value if item is True)
                found.append((key, self._integer(field, kept, 0, MAX_RANK)))
            else:
                found.append((key, self._integer(field, value, 1, MAX_RANK)))
        return tuple(found)

    def alpha_pattern(self) -> tuple[tuple[str, float], ...]:
        return tuple(
            (key, self._number(f"alpha_pattern.{key[:80]}", value, MAX_ALPHA))
            for key, value in self._pattern("alpha_pattern")
        )

    def _pattern(self, field: str) -> list[tuple[str, object]]:
        items = list((self.mapping(field) or {}).items())
        if len(items) > MAX_PATTERNS:
            raise self.error(field, f"{len(items)} patterns", f"at most {MAX_PATTERNS}")
        return items

"""What transformers says a checkpoint of a model holds: the oracle of the tensor tests.

Builds models on the meta device (no memory) and turns their state back into the names and shapes
that `save_pretrained` would write.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING  # noqa: E402
from transformers.core_model_loading import revert_weight_conversion  # noqa: E402

transformers.logging.set_verbosity_error()

AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
)
SHORT = {
    "num_hidden_layers": 4, "n_layer": 4, "num_layers": 4, "n_layers": 4,
    "encoder_layers": 3, "decoder_layers": 3, "num_decoder_layers": 3,
}  # fmt: skip

Shapes = dict[str, tuple[int, ...]]


def short_config(model_type: str, auto_class: str | None, **changes: Any) -> tuple[Any, Any]:
    """(configuration, meta model) of the library's defaults for a type, cut to a few layers."""
    cls = CONFIG_MAPPING[model_type]
    known = set(getattr(cls, "__dataclass_fields__", {}))
    settings = {k: v for k, v in SHORT.items() if k in known} | changes
    config = cls(**settings)
    return config, build(config, auto_class)


def build(config: Any, auto_class: str | None = None) -> Any:
    """The model of a configuration, on the meta device."""
    for name in (auto_class,) if auto_class else AUTO_CLASSES:
        try:
            with torch.device("meta"):
                return getattr(transformers, name).from_config(config)
        except ValueError:
            continue
    raise AssertionError(f"no auto class builds {type(config).__name__}")


def from_file(raw: dict[str, Any]) -> Any:
    """The meta model of a real config.json, unquantised."""
    kept = {k: v for k, v in raw.items() if k not in ("quantization_config", "auto_map", "dtype")}
    config = CONFIG_MAPPING[kept.pop("model_type")].from_dict(kept)
    with torch.device("meta"):
        cls = getattr(transformers, raw["architectures"][0], None)
        return build(config) if cls is None else cls._from_config(config)


def as_json(config: Any, model: Any) -> dict[str, Any]:
    """What config.json would say of this model."""
    raw: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    raw |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    return raw


def state_shapes(model: Any) -> Shapes:
    """Names and shapes in memory, tied tensors once."""
    return {k: tuple(v.shape) for k, v in _state(model).items()}


def disk_shapes(model: Any) -> Shapes:
    """Names and shapes as `save_pretrained` writes them: experts one by one where they came so."""
    state = revert_weight_conversion(model, _state(model))
    return {k: tuple(v.shape) for k, v in state.items()}


def _state(model: Any) -> dict[str, Any]:
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return {k: v for k, v in model.state_dict().items() if k not in tied}

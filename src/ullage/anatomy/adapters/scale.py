"""The rank and scale that training meant for one module: PEFT's rule for patterns and rsLoRA.

Holds ΔW = scale · B · A as the trainer applied it. What an engine applies is the engine's module;
matching the patterns is `patterns.py`.
"""

from __future__ import annotations

import math

from ullage.anatomy.adapters.adapter import AdapterConfig
from ullage.anatomy.adapters.patterns import first_match
from ullage.errors import MalformedConfig

# PEFT 0.21.2, tuners/lora/config.py: what it takes where the file does not say.
DEFAULT_RANK = 8
DEFAULT_ALPHA = 8.0
# mlx_vlm 0.7.10, trainer/peft/utils.py, of its older layout.
_DEFAULT_ALPHA_MLX_VLM = 0.1

# PEFT 0.21.2, tuners/lora/layer.py: these only draw the adapter's first values (lora_ga changes the
# base weights in training alone). Others (PiSSA, OLoRA, CorDA, LoftQ) change them at every load.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


def changes_base(init: bool | str) -> bool:
    """Whether an adapter of this `init_lora_weights` is more than base + scale · B · A.

    An init that is not known counts as one that does.
    """
    return isinstance(init, str) and init.lower() not in _PLAIN_INITS


def expected_scale(config: AdapterConfig, module: str) -> tuple[int | None, float | None]:
    """The rank and the scale of `module` (its path in the trained tree), None where not defined.

    alpha/rank, with rsLoRA alpha/√rank; both first looked up in the patterns (PEFT 0.21.2,
    tuners/lora/model.py `_create_and_replace` and layer.py `update_layer`). MLX names the scale
    itself. Other methods than LoRA have no scale of this kind.

    Raises MalformedConfig for a pattern that cannot be evaluated.
    """
    if config.peft_type != "LORA":
        return config.rank, None
    if config.writer == "mlx":
        return config.rank, config.scale
    rank = config.rank or DEFAULT_RANK
    alpha = config.alpha
    if alpha is None:
        alpha = _DEFAULT_ALPHA_MLX_VLM if config.writer == "mlx-vlm" else DEFAULT_ALPHA
    rank = int(_matched(config, "rank_pattern", config.rank_pattern, module, rank))
    alpha = _matched(config, "alpha_pattern", config.alpha_pattern, module, alpha)
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)


def _matched(
    config: AdapterConfig,
    field: str,
    patterns: tuple[tuple[str, float], ...],
    module: str,
    otherwise: float,
) -> float:
    if not patterns:
        return otherwise
    try:
        index = first_match(tuple(pattern for pattern, _ in patterns), module)
    except ValueError as error:
        raise MalformedConfig(
            str(error), file=config.file, field=field, expected="regular expressions of paths"
        ) from None
    return otherwise if index is None else patterns[index][1]

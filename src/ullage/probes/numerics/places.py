"""Which layer and which kind a module of a transformers model is, by its path.

Holds the words that paths are made of. What is done with a module is `trace` and others.
"""

from __future__ import annotations

import re
from typing import Any

from ullage.probes.numerics.numerics import Place

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks?|layer)\.([0-9]+)(?:\.|$)")
# The last word of a path, then the words before it, decide; the first that matches does.
_LEAVES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"norm|(^|_)ln(_|$)|layernorm|^ln", "norm"),
        (r"rotary|rope", "rope"),
        (r"qkv|query_key_value|c_attn|^kv_[ab]_proj|W_pack|Wqkv", "qkv"),
        (r"^(q|query)(_|$)|^q_[ab]_proj", "q"),
        (r"^(k|key)(_|$)", "k"),
        (r"^(v|value)(_|$)", "v"),
        (r"^o_proj|^out_proj$|^wo$", "o"),
        (r"embed|^wte|^wpe|lm_head|embd|project_(in|out)", "embedding"),
        (r"mlp|feed_forward|ffn|expert|moe|gate|^up_|^down_|^fc|^act|router|^w[123]$", "mlp"),
        (r"attn|attention", "attention"),
    )
)
_WITHIN: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"attn|attention"), "o"),
    (re.compile(r"mlp|feed_forward|ffn|expert|moe"), "mlp"),
)
# What GPT-2's and BLOOM's blocks call the matrix after attention, and that after the MLP.
_AFTER = frozenset(("c_proj", "dense", "linear", "dropout", "resid_dropout"))


def place_of(path: str, module: Any) -> Place:
    """Where `module` is; `path` as in `named_modules()`, empty for the model itself."""
    found = _LAYER.search(path)
    layer = None if found is None else int(found[1])
    return Place(path, layer, _kind(path, layer), type(module).__name__)


def _kind(path: str, layer: int | None) -> str:
    *before, last = path.split(".")
    if not path:
        return "model"
    if last.isdigit() and layer is not None and not any(p.search(path) for p, _ in _WITHIN):
        return "layer"
    if last in _AFTER:
        for word in reversed(before):
            for pattern, kind in _WITHIN:
                if pattern.search(word):
                    return kind
    for word in (last, *reversed(before)):
        for pattern, kind in _LEAVES:
            if pattern.search(word):
                return kind
    return "other" if layer is not None else "model"

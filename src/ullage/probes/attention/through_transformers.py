"""Attention of a whole prompt, read in a model that transformers runs.

Holds loading, the check that the probe's attention is the model's own, and the reading. How a
model is watched is `registry`. Imports transformers when it is used, not before.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ullage.anatomy import load
from ullage.errors import BadUsage, UnsupportedModel
from ullage.probes.attention.embedded import require_prompt, spread_rows
from ullage.probes.attention.entropy import HeadTotals
from ullage.probes.attention.readings import AttentionReading, LayerReading
from ullage.probes.attention.registry import Choose, attention_of, probing

SOURCE = "transformers"
# Tokens of a prompt that also run through the model's own attention, to see that it is the same.
_OWN_TOKENS = 32
# How far a token's outputs may be off, of their norm. Layers add their roundings up; another
# attention is off by far more.
_OWN_TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 2e-3,
    torch.float32: 2e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 0.1,
}


def read_model(
    model: Any,
    prompt_ids: tuple[int, ...],
    *,
    name: str | None = None,
    rows: int | None = None,
    layers: Collection[int] | None = None,
) -> AttentionReading:
    """How every head of a loaded model attends to a prompt, at `rows` positions (None: all).

    Raises UnsupportedModel where the model's own attention gives other outputs than the probe's.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            "encoder-decoder", file=type(model).__name__, expected="decoder or encoder"
        )
    ids_1T = torch.tensor([prompt_ids], device=model.device)
    wanted = spread_rows(len(prompt_ids), rows)
    seen: dict[int, HeadTotals] = {}
    last = {"logits_to_keep": 1} if _keeps_logits(model) else {}
    with torch.inference_mode():
        _require_own(model, ids_1T[:, :_OWN_TOKENS], range if rows is None else _none)
        with probing(
            model,
            lambda _: wanted,
            lambda place, readings: seen.setdefault(place.layer, HeadTotals()).add(readings),
            layers,
        ):
            model(ids_1T, use_cache=False, **last)
    if not seen:
        raise UnsupportedModel("no attention was met", file=type(model).__name__)
    return AttentionReading(
        type(model).__name__ if name is None else name,
        SOURCE,
        len(prompt_ids),
        len(wanted),
        tuple(LayerReading(layer, seen[layer].readings()) for layer in sorted(seen)),
    )


def _keeps_logits(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _none(count: int) -> tuple[int, ...]:  # noqa: ARG001
    return ()


def _require_own(model: Any, ids_1T: torch.Tensor, choose: Choose) -> None:
    """Raise unless the model's plain attention and the probe's give the same outputs."""
    with attention_of(model, "eager"):
        own = model(ids_1T, use_cache=False)[0].float()
    with probing(model, choose, lambda *_: None):
        found = model(ids_1T, use_cache=False)[0].float()
    if not (own.isfinite().all() and found.isfinite().all()):
        return  # the readings will tell
    off_BT = (own - found).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-6)
    # Of the middle token: where experts are chosen, rounding may choose another for some.
    off = float(off_BT.median())
    if off > _OWN_TOLERANCES.get(model.dtype, 0.1):
        raise UnsupportedModel(
            f"its own attention gives other outputs than the probe's, by {off:.2g} of their norm",
            file=type(model).__name__,
        )


def load_model(path: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model at `path` in the class that its configuration names; from safetensors alone.

    Raises UnsupportedModel for a class that transformers lacks, that needs code of the
    checkpoint's, or that has two stacks.
    """
    import transformers

    found = load(path)
    spec = found.anatomy.spec
    if spec.kind == "encoder-decoder":
        raise UnsupportedModel(spec.kind, file=path, field="kind", expected="decoder or encoder")
    kind = getattr(transformers, spec.architecture, None)
    if kind is None:
        raise UnsupportedModel(
            f"{spec.architecture!r} is no class of transformers {transformers.__version__}",
            file=path,
            field="architectures",
        )
    if found.files.kind != "directory":
        raise BadUsage("one file", file=path, expected="a directory that transformers can load")
    if found.checkpoint is None or found.checkpoint.format != "safetensors":
        raise UnsupportedModel("no safetensors", file=path, expected="weights in safetensors")
    try:
        loaded = kind.from_pretrained(
            found.files.path, dtype=dtype, use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        said = str(error).strip().partition("\n")[0]
        raise UnsupportedModel(f"transformers does not load it: {said}", file=path) from error
    return loaded.eval()


def read_prompt(
    model: str | Path,
    prompt_ids: tuple[int, ...],
    *,
    name: str | None = None,
    rows: int | None = None,
    layers: Collection[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> AttentionReading:
    """As `embedded.read_prompt`, for models that transformers runs."""
    spec = load(model).anatomy.spec
    # Without a limit of its own, as under ALiBi, a model takes what it is given.
    require_prompt(prompt_ids, spec.max_positions or len(prompt_ids), spec.vocab_size)
    return read_model(
        load_model(model, dtype), prompt_ids, name=name or str(model), rows=rows, layers=layers
    )

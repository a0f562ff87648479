"""The oracle of attention readings: transformers' own attention weights, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ullage.probes.attention.readings import AttentionReading, HeadReading, Spread

BAND = 16


@torch.inference_mode()
def attention_weights(model: Any, prompt_ids: Sequence[int], **inputs: Any) -> list[torch.Tensor]:
    """Float64 [heads, tokens, keys] per layer of a model that was loaded with eager attention."""
    out = model(torch.tensor([list(prompt_ids)]), output_attentions=True, use_cache=False, **inputs)
    return [weights[0].double() for weights in out.attentions]


def eager_model(directory: Path, kind: str = "AutoModelForCausalLM") -> Any:
    import transformers

    return (
        getattr(transformers, kind)
        .from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )


def assert_reading(
    reading: AttentionReading,
    weights: Sequence[torch.Tensor],
    rows: Sequence[int],
    atol: float = 1e-4,
) -> None:
    """Every figure of every head against the weights at `rows`, within `atol`."""
    assert [layer.layer for layer in reading.layers] == list(range(len(weights)))
    assert reading.rows == len(rows)
    for layer, weights_HTS in zip(reading.layers, weights, strict=True):
        assert [head.head for head in layer.heads] == list(range(len(weights_HTS)))
        for head, weights_TS in zip(layer.heads, weights_HTS, strict=True):
            assert_head(head, weights_TS[list(rows)], rows, atol)


def assert_head(
    head: HeadReading, weights_RS: torch.Tensor, rows: Sequence[int], atol: float
) -> None:
    assert (head.rows, head.not_finite) == (len(rows), 0)
    # A learned sink takes a share of a row: what is left is of the keys alone.
    shares_R = weights_RS.sum(-1)
    p_RS = weights_RS / shares_R[:, None]
    entropy_R = _entropy(p_RS)
    visible_R = (p_RS > 0).sum(-1)
    distance_RS = torch.arange(p_RS.shape[1]) - torch.tensor(list(rows))[:, None]
    band_RS = p_RS * (distance_RS.abs() <= BAND)
    several_R = visible_R > 1
    expected = {
        "entropy_normalized": (entropy_R / visible_R.log())[several_R].mean(),
        "sink_mass": p_RS[range(len(rows)), 0].mean(),
        "band_mass": band_RS.sum(-1).mean(),
        "band_entropy_nats": _entropy(band_RS / band_RS.sum(-1, keepdim=True)).nanmean(),
        "effective_context": entropy_R.exp().mean(),
    }
    for name, value in expected.items():
        found = getattr(head, name)
        assert found is not None, name
        assert abs(found - float(value)) <= atol * max(1.0, abs(float(value))), name
    assert_spread(head.entropy_nats, entropy_R, atol)
    if head.learned_sink_mass is not None:
        assert abs(head.learned_sink_mass - float((1 - shares_R).mean())) <= atol
        with_sink_RS = torch.cat([weights_RS, 1 - shares_R[:, None]], dim=-1)
        assert_spread(head.entropy_with_sink_nats, _entropy(with_sink_RS), atol)


def assert_spread(found: Spread | None, values: torch.Tensor, atol: float) -> None:
    assert found is not None
    p5, p95 = np.quantile(values.numpy(), [0.05, 0.95])
    for one, value in ((found.mean, float(values.mean())), (found.p5, p5), (found.p95, p95)):
        assert abs(one - value) <= atol


def _entropy(p_RS: torch.Tensor) -> torch.Tensor:
    return -torch.special.xlogy(p_RS, p_RS).sum(-1)

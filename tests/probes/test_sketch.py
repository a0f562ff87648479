"""The sketch is what dense products in float64 are, of weights as they are held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.probes.planting import tappable
from ullage.engine.engine import Engine
from ullage.engine.linear import Int8Linear, Linear
from ullage.engine.options import EngineOptions
from ullage.errors import UnsupportedModel
from ullage.probes.baseline import sketch as sketches
from ullage.probes.baseline.sketch import signs

WAYS: dict[str, dict[str, Any]] = {
    "float32": {}, "int8": {"quantization": "int8"}, "bfloat16": {"dtype": "bfloat16"},
}  # fmt: skip


def dense(linear: Linear) -> np.ndarray:
    """The matrix that is multiplied, float64."""
    if isinstance(linear, Int8Linear):
        whole = linear.weight_OI[:, : linear.in_features].double()
        return (whole * linear.scales_O[:, None].double()).numpy()
    return linear.weight_OI.double().numpy()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "llama-biases", "llama-tied-mha", "qwen3"])
def test_sums_are_those_of_the_dense_weights(
    family: str, way: str, family_dir: Callable[[str], Path]
) -> None:
    engine = tappable(family_dir(family), EngineOptions(enforce_eager=True, **WAYS[way]))
    assert engine is not None
    found, decoder = sketches.take(engine.decoder), engine.decoder
    form = found.form
    r_hidden, r_inner = signs(form.hidden, "hidden"), signs(form.inner, "inner")
    r_heads = signs((form.heads + 2 * form.kv_heads) * form.head_dim, "heads")
    for index, layer in enumerate(decoder.layers):
        qkv, output, gate_up, down = layer.linears
        per_head = (r_heads[:, None] * dense(qkv)).reshape(-1, form.head_dim, form.hidden).sum(1)
        wanted = {
            "heads_LHI": per_head,
            "o_LI": r_hidden @ dense(output),
            "gate_LI": r_inner @ dense(gate_up)[: form.inner],
            "up_LI": r_inner @ dense(gate_up)[form.inner :],
            "down_LI": r_hidden @ dense(down),
        }
        for name, expected in wanted.items():
            np.testing.assert_allclose(getattr(found, name)[index], expected, rtol=2e-6, atol=1e-6)
    head = signs(form.vocab, "vocab") @ dense(decoder.head)
    np.testing.assert_allclose(found.head_E, head, rtol=2e-6, atol=1e-6)
    embedded = decoder.embedding_VE.double().numpy() @ r_hidden
    np.testing.assert_allclose(found.embedding_V, embedded, rtol=2e-6, atol=1e-6)
    assert form.rounds_inputs == (way == "int8")


def test_biases_are_summed_as_their_outputs_are(family_dir: Callable[[str], Path]) -> None:
    engine = tappable(family_dir("llama-biases"))
    assert engine is not None
    found = sketches.take(engine.decoder)
    form = found.form
    for index, layer in enumerate(engine.decoder.layers):
        bias = layer.linears[3].bias_O.double().numpy()  # type: ignore[attr-defined]
        expected = float(signs(form.hidden, "hidden") @ bias)
        assert found.down_bias_L[index] == pytest.approx(expected, rel=1e-5)


def test_outputs_count_differently_whatever_their_place() -> None:
    """Two rows that change places, whichever they are, change the sum."""
    for of in ("heads", "hidden", "inner", "vocab"):
        drawn = signs(2_000, of)
        assert len(np.unique(drawn)) == len(drawn)
        assert np.abs(drawn).min() >= 0.5 and np.abs(drawn).max() <= 1.5
        assert abs(float(np.sign(drawn).mean())) < 0.1
    assert not np.array_equal(signs(64, "hidden"), signs(64, "inner"))
    np.testing.assert_array_equal(signs(64, "hidden"), signs(64, "hidden"))


@pytest.mark.parametrize("family", ["mixtral", "olmo2", "gemma2", "cohere", "opt-post"])
def test_what_cannot_be_held_is_said(family: str, family_dir: Callable[[str], Path]) -> None:
    engine = Engine.load(family_dir(family), EngineOptions(enforce_eager=True))
    with pytest.raises(UnsupportedModel, match="live activations"):
        sketches.take(engine.decoder)


def test_a_sketch_does_not_hold_the_weights_themselves(
    family_dir: Callable[[str], Path],
) -> None:
    """Norm weights are kept whole; nothing that is taken changes with the model afterwards."""
    engine = tappable(family_dir("llama"))
    assert engine is not None
    found = sketches.take(engine.decoder)
    norm = engine.decoder.layers[0].mixer_norm
    assert norm is not None and norm.weight is not None
    before = found.mixer_norm_LE.copy()
    with torch.inference_mode():
        norm.weight.mul_(2)
    np.testing.assert_array_equal(found.mixer_norm_LE, before)
    with torch.inference_mode():
        norm.weight.div_(2)

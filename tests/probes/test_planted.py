"""Every planted fault is found at the default sampling, and nowhere but where it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.probes.planted_faults import FAULTS, Fault
from tests.probes.planting import OTHERS, PROMPTS, changed, judged, tappable
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.probes.baseline.baseline import Baseline
from ullage.probes.baseline.learning import learn

LAYER = 1
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "torch": {"enforce_eager": True},
    "int8": {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.fixture(scope="session")
def healthy(family_dir: Callable[[str], Path]) -> Callable[[str, str], tuple[Engine, Baseline]]:
    """A model and its baseline, by family and way; the model is shared, and left as it was."""

    @cache
    def made(family: str, way: str) -> tuple[Engine, Baseline]:
        options = EngineOptions(**WAYS[way])
        engine = tappable(family_dir(family), options)
        assert engine is not None
        return engine, learn(family_dir(family), PROMPTS, options, new_tokens=24)

    return made


@pytest.mark.parametrize("way", ["float32", "torch", "int8"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_is_found_where_it_is(
    fault: Fault, way: str, healthy: Callable[[str, str], tuple[Engine, Baseline]]
) -> None:
    engine, baseline = healthy("llama", way)
    with ExitStack() as stack:
        found = judged(fault.plant(engine, stack, LAYER), baseline)
    assert fault.found_by(found, LAYER), found.places
    assert found.tokens is not None and found.tokens <= 64
    assert not judged(engine, baseline).fired  # and it is gone with the fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_in_bfloat16_it_is_found_too(
    fault: Fault, healthy: Callable[[str, str], tuple[Engine, Baseline]]
) -> None:
    engine, baseline = healthy("llama", "bfloat16")
    with ExitStack() as stack:
        found = judged(fault.plant(engine, stack, LAYER), baseline)
    assert fault.found_by(found, LAYER), found.places


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("q of one head times 4", "P001"),
        ("one channel of down times 1.5", "P001"),  # and not P002: the norm behind it is sound
        ("k zeroed", "P001"),  # and not P004: attention to what lies in the cache is right
        ("an exponent bit of a norm weight", "P002"),
        ("theta times 5", "P003"),
        ("scores times 1/head_dim", "P004"),
        ("one row of the head times 1.5", "P005"),
    ],
)
def test_the_example_of_a_rule_fires_it_and_no_other(
    fault: str, rule: str, healthy: Callable[[str, str], tuple[Engine, Baseline]]
) -> None:
    """What docs/rules/ says of P001 to P005."""
    engine, baseline = healthy("llama", "torch")
    (planted,) = [one for one in FAULTS if one.name == fault]
    with ExitStack() as stack:
        found = judged(planted.plant(engine, stack, LAYER), baseline)
    assert {one.finding.id for one in found.fired} == {rule}


@pytest.mark.parametrize(
    ("family", "way"), [*(("llama", way) for way in WAYS), ("mistral-window", "torch")]
)
def test_a_request_five_times_as_long_as_the_baselines_raises_nothing(
    family: str, way: str, healthy: Callable[[str, str], tuple[Engine, Baseline]]
) -> None:
    """Positions, keys and (of a window) hidden keys that the baseline never saw."""
    engine, baseline = healthy(family, way)
    assert engine.tokenizer is not None
    longest = max(len(engine.tokenizer.encode(one)) for one in PROMPTS) + 24
    found = judged(engine, baseline, OTHERS[:1], every=4, new_tokens=5 * longest)
    assert found.rows >= longest and not found.fired, found.places


@pytest.mark.parametrize("way", WAYS)
def test_other_texts_of_a_healthy_model_raise_nothing(
    way: str, healthy: Callable[[str, str], tuple[Engine, Baseline]]
) -> None:
    engine, baseline = healthy("llama", way)
    assert engine.tokenizer is not None
    known, others = (
        {token for one in texts for token in engine.tokenizer.encode(one)}
        for texts in (PROMPTS, OTHERS)
    )
    assert others - known
    found = judged(engine, baseline, OTHERS, every=1, new_tokens=40)
    assert found.rows >= 40 and not found.fired, found.places


@pytest.mark.parametrize(
    ("family", "tensor", "kind"),
    [
        ("llama-biases", "qkv", "q"),
        ("llama-biases", "output", "o"),
        ("llama-biases", "down", "mlp"),
        ("gpt2", "qkv", "q"),
        ("gpt2", "up", "mlp"),
        ("gpt2", "norm", "norm"),
    ],
)
def test_a_dropped_bias_is_found(
    family: str, tensor: str, kind: str,
    healthy: Callable[[str, str], tuple[Engine, Baseline]],
) -> None:  # fmt: skip
    engine, baseline = healthy(family, "torch")
    layer = engine.decoder.layers[LAYER]
    qkv, output, up, down = layer.linears
    biased = {
        "qkv": getattr(qkv, "bias_O", None), "output": getattr(output, "bias_O", None),
        "up": getattr(up, "bias_O", None), "down": getattr(down, "bias_O", None),
        "norm": layer.mixer_norm.bias if layer.mixer_norm is not None else None,
    }[tensor]  # fmt: skip
    rows = slice(layer.num_heads * layer.head_dim) if tensor == "qkv" else slice(None)
    with changed(biased):
        biased[rows] = 0
        found = judged(engine, baseline)
    assert found.places == {(kind, (LAYER,))}


@pytest.mark.parametrize("which", ["q_norm", "k_norm"])
def test_a_norm_of_heads_is_found(
    which: str, healthy: Callable[[str, str], tuple[Engine, Baseline]]
) -> None:
    engine, baseline = healthy("qwen3", "float32")
    weight = getattr(engine.decoder.layers[LAYER], which).weight
    with changed(weight):
        weight[3] *= 1.5
        found = judged(engine, baseline)
    assert {kind for kind, _ in found.places} <= {"norm", "rope"}
    assert {layers for _, layers in found.places} == {(LAYER,)}


def test_a_scaling_of_angles_that_is_missing_is_found(
    family_dir: Callable[[str], Path],
    healthy: Callable[[str, str], tuple[Engine, Baseline]],
) -> None:
    """The same weights, served without the llama3 scaling of their configuration."""
    from ullage.engine.positions.rope import rotary_tables
    from ullage.engine.positions.scaling import Angles
    from ullage.probes.baseline import sketch as sketches

    engine, baseline = healthy("llama3-rope", "float32")
    plain, _ = healthy("llama", "float32")
    (tables,) = engine.decoder.ropes
    (turning,) = sketches._turnings(plain.decoder)
    new = rotary_tables(Angles(turning.frequencies, 1.0, False), len(tables.cos_ND))
    with changed(tables.cos_ND, tables.sin_ND):
        tables.cos_ND.copy_(new.cos_ND)
        tables.sin_ND.copy_(new.sin_ND)
        found = judged(engine, baseline)
    assert {kind for kind, _ in found.places} == {"rope"}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_step_that_is_given_other_positions_is_found(
    family: str,
    healthy: Callable[[str, str], tuple[Engine, Baseline]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the tables: the numbers that index them."""
    from dataclasses import replace

    from ullage.engine import engine as module

    build = module.build_batch

    def wrong(*given: Any) -> Any:
        batch = build(*given)
        return replace(batch, positions_T=batch.positions_T + 1)

    engine, baseline = healthy(family, "torch")
    monkeypatch.setattr(module, "build_batch", wrong)
    found = judged(engine, baseline)
    kinds = {kind for kind, _ in found.places}
    assert kinds == ({"rope"} if family == "llama" else {"embedding"})


@pytest.mark.parametrize("window", [None, 23], ids=["ignored", "off by one"])
def test_another_window_is_found_once_there_is_more_than_it_shows(
    window: int | None, healthy: Callable[[str, str], tuple[Engine, Baseline]]
) -> None:
    from dataclasses import replace

    from tests.probes.planting import with_layer

    engine, baseline = healthy("mistral-window", "torch")
    assert engine.decoder.layers[LAYER].rule.window == 24

    # The cache is laid out for the window; only the layer's rule is another.
    with with_layer(
        engine, LAYER, lambda layer: replace(layer, rule=replace(layer.rule, window=window))
    ) as other:
        found = judged(other, baseline)
    assert found.places == {("attention", (LAYER,))}


def test_a_residual_that_is_dropped_is_found(
    healthy: Callable[[str, str], tuple[Engine, Baseline]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ullage.engine.model import decoder

    engine, baseline = healthy("llama", "torch")
    monkeypatch.setattr(decoder, "_added", lambda layer, x_TE, part_TE: part_TE)
    found = judged(engine, baseline)
    assert {kind for kind, _ in found.places} == {"o", "mlp"}


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("qkv", "q"), ("output", "o"), ("gate_up", "mlp"), ("down", "mlp"),
        ("mixer_norm", "norm"), ("feed_forward_norm", "norm"), ("head", "embedding"),
        ("final_norm", "norm"), ("embedding", "embedding"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_traced_to_where_it_begins(
    place: str, kind: str, value: float, healthy: Callable[[str, str], tuple[Engine, Baseline]]
) -> None:
    engine, baseline = healthy("llama", "torch")
    decoder, layer = engine.decoder, engine.decoder.layers[LAYER]
    qkv, output, gate_up, down = layer.linears
    assert layer.mixer_norm is not None and layer.feed_forward_norm is not None
    assert decoder.final_norm is not None
    tensor: Any = {
        "qkv": qkv.tensors, "output": output.tensors, "gate_up": gate_up.tensors,
        "down": down.tensors, "mixer_norm": layer.mixer_norm.tensors,
        "feed_forward_norm": layer.feed_forward_norm.tensors, "head": decoder.head.tensors,
        "final_norm": decoder.final_norm.tensors, "embedding": (decoder.embedding_VE,),
    }[place]  # fmt: skip
    outside = place in ("head", "final_norm", "embedding")
    with changed(*tensor):
        if place == "embedding":
            tensor[0][:, 2] = value
        else:
            tensor[0][2] = value
        found = judged(engine, baseline, every=1)
    (one,) = [one for one in found.fired if one.finding.id == "P007"]
    assert (one.kind, one.layers) == (kind, () if outside else (LAYER,))


@pytest.mark.parametrize("bit", range(20, 32))
@pytest.mark.parametrize("place", ["o", "up", "down", "q", "norm"])
@pytest.mark.parametrize("way", ["float32", "torch"])
def test_a_flipped_bit_is_named_where_it_is_and_nowhere_else(
    place: str, bit: int, way: str, healthy: Callable[[str, str], tuple[Engine, Baseline]]
) -> None:
    """Mantissa, exponent or sign: also where it makes numbers whose squares are infinite."""
    from tests.probes.planting import flip_bit

    engine, baseline = healthy("llama", way)
    layer = engine.decoder.layers[LAYER]
    qkv, output, gate_up, down = layer.linears
    norm = layer.mixer_norm
    assert norm is not None and norm.weight is not None
    tensors: dict[str, tuple[Any, tuple[int, ...], str]] = {
        "q": (qkv, (5, 7), "q"), "o": (output, (5, 7), "o"), "up": (gate_up, (100, 7), "mlp"),
        "down": (down, (5, 7), "mlp"), "norm": (norm, (9,), "norm"),
    }  # fmt: skip
    holder, index, kind = tensors[place]
    with changed(*holder.tensors):
        flip_bit(holder.tensors[0], index, bit)
        found = judged(engine, baseline)
        if not found.rows:
            # The engine ends a request whose logits are no numbers: it has its first row only.
            found = judged(engine, baseline, every=1)
            assert (kind, (LAYER,)) in found.places
            return
    assert found.places == {(kind, (LAYER,))}


def test_a_cache_that_is_changed_between_steps_is_not_seen_in_products(
    healthy: Callable[[str, str], tuple[Engine, Baseline]],
) -> None:
    """What a step reads is what it is held to: an older token's keys are not remembered."""
    from ullage.engine.request import SamplingParams
    from ullage.probes.baseline.checking import Watched

    engine, baseline = healthy("llama", "torch")
    watched = Watched(engine, baseline, every=1)
    assert engine.tokenizer is not None
    ids = tuple(engine.tokenizer.encode(OTHERS[0]))
    engine.add_request("a", ids, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    step = 0
    while engine.has_work:
        engine.step()
        step += 1
        if step == 5:
            with torch.inference_mode():
                for keys in engine.kv.keys:
                    keys[:2] = 0
    engine.reader = None
    fired = [one.finding.id for one in watched.findings() if one.finding.state == "fired"]
    assert not {"P001", "P002", "P003", "P004", "P005", "P007"} & set(fired)

"""Same weights, same model in other precision, or not the same: every kind of fault is located."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.adapters import write_adapter
from tests.engine.families import FAMILIES, write_model
from tests.engine.gguf_models import GGUF_CASES, write_gguf
from ullage.anatomy import load, read_config
from ullage.cli.main import main
from ullage.engine.linear import FloatLinear
from ullage.engine.model.decoder import Decoder
from ullage.engine.model.weights import Weights
from ullage.engine.options import EngineOptions
from ullage.errors import BadUsage
from ullage.probes.sameness.answers import PROMPTS
from ullage.probes.sameness.distances import NOT_FINITE, answers_apart, weights_apart
from ullage.probes.sameness.fingerprints import of_model, of_server, rope_of, settings_of
from ullage.probes.sameness.marks import Fingerprint, Noise, ValueMark, from_document, to_document
from ullage.probes.sameness.sameness import SAME_NATS, SKETCH_SPREAD, Sameness, compare, rounding
from ullage.probes.sameness.values import sketch, streamed_marks, value_marks
from ullage.serving.app import start_server

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def mark(healthy: Path) -> Fingerprint:
    return of_model(healthy)


def changed(model: Path, to: Path, change: Callable[[Tensors], object], **config: Any) -> Path:
    """A copy of `model` after `change` and with other keys in its configuration."""
    shutil.copytree(model, to)
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    held = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(held, to / "model.safetensors", metadata={"format": "pt"})
    file = to / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return to


def cast(dtype: torch.dtype) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()})


def judged(mark: Fingerprint, path: Path, **options: bool) -> Sameness:
    return compare(mark, of_model(path, noise=False, **options))


# --- sketches ------------------------------------------------------------------------------------


def marked(weight: torch.Tensor) -> ValueMark:
    return ValueMark("w", 0, "q", tuple(weight.shape), *sketch(weight))


@pytest.mark.parametrize("size", [1e-7, 1e-3, 0.5])
def test_a_sketch_tells_how_far_two_weights_are_apart(size: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 700)
    told = []
    for _ in range(20):
        other = weight + size * torch.randn_like(weight)
        true = (weight.double() - other.double()).norm() / max(weight.norm(), other.norm())
        told.append(weights_apart(marked(weight), marked(other)) / true.item())
    assert 0.85 < sum(told) / len(told) < 1.15
    assert min(told) > 0.5
    assert max(told) < 1.7


def test_one_changed_element_is_told_exactly() -> None:
    weight = torch.randn(64, 33)
    other = weight.clone()
    other[5, 7] += 3.0
    true = 3.0 / max(weight.norm().item(), other.norm().item())
    assert weights_apart(marked(weight), marked(other)) == pytest.approx(true, rel=1e-5)


@pytest.mark.parametrize("rows", [1, 32, 1024])
def test_rows_that_change_places_do_not_cancel(rows: int) -> None:
    """At distances of whole chunks too."""
    weight = torch.randn(3072, 1024)
    other = weight.clone()
    other[:rows], other[1024 : 1024 + rows] = weight[1024 : 1024 + rows], weight[:rows]
    true = (weight - other).norm() / weight.norm()
    assert weights_apart(marked(weight), marked(other)) == pytest.approx(true.item(), rel=0.6)


def test_weights_that_are_not_finite_are_far_from_any_other() -> None:
    weight = torch.ones(8, 8)
    for bad in (math.nan, math.inf):
        other = weight.clone()
        other[1, 1] = bad
        assert weights_apart(marked(weight), marked(other)) == NOT_FINITE
        assert weights_apart(marked(other), marked(other)) == 0.0
    assert weights_apart(marked(weight * 0), marked(weight * 0)) == 0.0


# --- tolerances ----------------------------------------------------------------------------------

SHAPED = {
    "normal": lambda: torch.randn(256, 512) * 0.02,
    "heavy tails": lambda: torch.distributions.StudentT(4.0).sample((256, 512)) * 0.02,
    "outlier channels": lambda: torch.randn(256, 512) * 0.02 * (1 + 20 * (torch.rand(512) > 0.99)),
    "uneven rows": lambda: torch.randn(256, 512) * torch.logspace(-4, 0, 256)[:, None],
}


def rounded(weight: torch.Tensor, dtype: str) -> torch.Tensor:
    floats = {"F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
              "F8_E5M2": torch.float8_e5m2}  # fmt: skip
    if dtype in ("F8_E4M3", "F8_E5M2"):  # stored with a scale, as every engine does it
        scale = weight.abs().max() / 400
        return (weight / scale).to(floats[dtype]).float() * scale
    if dtype in floats:
        return weight.to(floats[dtype]).float()
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    kind = GGMLQuantizationType[dtype]
    return torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind))


@pytest.mark.parametrize("shape", SHAPED)
@pytest.mark.parametrize(
    "dtype", ["F16", "BF16", "F8_E4M3", "F8_E5M2", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"]
)
def test_tolerances_hold_what_rounding_does_and_not_much_more(dtype: str, shape: str) -> None:
    torch.manual_seed(1)
    weight = SHAPED[shape]()
    off = rounded(weight, dtype)
    true = ((weight - off).norm() / weight.norm()).item()
    assert rounding(dtype) / 6 < true < rounding(dtype)
    allowed = rounding(dtype) * SKETCH_SPREAD
    assert weights_apart(marked(weight), marked(off)) < allowed


def test_of_an_unknown_type_only_gross_differences_are_called_one() -> None:
    assert rounding("TQ1_0") > 1.0
    assert rounding("Q3_K") < rounding("IQ2_XS") < rounding("TQ1_0")


# --- one layout ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma", "gpt2", "llama: Mixtral"])
def test_values_are_the_same_from_gguf_and_from_safetensors(case: str, tmp_path: Path) -> None:
    """llama.cpp permutes rows of q and k, adds 1 to Gemma's norms, turns GPT-2's matrices."""
    model = load(write_gguf(case, tmp_path / "model.gguf"))
    weights = Weights(model)
    spec = model.anatomy.spec
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GGUF_CASES[case].config))
    held = {}
    for tensor in weights.slots._by_name.values():
        held |= dict(_as_hf(weights, tensor, spec))
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    ours = value_marks(Decoder(spec, weights, FloatLinear, 64))
    found = load(folder)
    theirs = value_marks(Decoder(found.anatomy.spec, Weights(found), FloatLinear, 64))
    assert [one.name for one in ours] == [one.name for one in theirs]
    for one, match in zip(ours, theirs, strict=True):
        assert weights_apart(one, match) < 1e-6, one.name


@pytest.mark.parametrize("case", GGUF_CASES)
def test_settings_and_angles_are_the_same_from_gguf_and_from_a_configuration(
    case: str, tmp_path: Path
) -> None:
    """Else every quantised copy would be called another model."""
    ours = load(write_gguf(case, tmp_path / "model.gguf")).anatomy.spec
    theirs = read_config(GGUF_CASES[case].config, file="config.json").spec
    assert settings_of(ours) == settings_of(theirs)
    assert rope_of(ours, {}) == rope_of(theirs, {})


def _as_hf(weights: Weights, tensor: Any, spec: Any) -> list[tuple[str, torch.Tensor]]:
    """What Hugging Face would have stored, by formulas of our own."""
    shape = tensor.shape
    if tensor.count > 1:
        stack = weights._entries[tensor.name]
        size = stack.num_bytes // tensor.count
        return [
            (tensor.name.replace("{e}", str(e)), _decoded(stack, stack.start + e * size, shape))
            for e in range(tensor.count)
        ]
    entry = weights._entry(tensor.name)
    assert entry is not None
    value = _decoded(entry, entry.start, entry.shape)
    if weights.architecture == "gpt2" and tensor.in_dim == 0 and len(shape) == 2:
        value = value.T
    if tensor.role in ("q", "k") and weights.architecture == "llama":
        heads = shape[0] // spec.layers[0].mixer.head_dim
        value = value.view(heads, -1, 2, *shape[1:]).transpose(1, 2).reshape(shape)
    if tensor.role == "norm" and weights.norms_hold_offset:
        value = value - 1
    return [(tensor.name, value.clone().contiguous())]


def _decoded(entry: Any, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    with Path(entry.file).open("rb") as stream:
        stream.seek(start)
        raw = stream.read(4 * math.prod(shape))
    return torch.from_numpy(np.frombuffer(raw, np.float32).reshape(shape).copy())


def test_every_part_of_a_layer_has_its_kind(mark: Fingerprint) -> None:
    kinds = {one.name: (one.layer, one.kind) for one in mark.values}
    assert kinds["embed"] == (None, "embedding")
    assert kinds["lm_head"] == (None, "embedding")
    assert kinds["final_norm"] == (None, "norm")
    for layer in range(3):
        inside = {n.split(".")[-1]: k for n, (at, k) in kinds.items() if at == layer}
        norms = dict.fromkeys(("mixer_norm", "feed_forward_norm"), "norm")
        mlp = dict.fromkeys(("gate", "up", "down"), "mlp")
        assert inside == {**norms, **mlp, "q": "q", "k": "k", "v": "v", "o": "o"}


TELLING = ("llama-biases", "gemma3", "gpt2", "opt-post", "qwen2-moe", "granite-moe", "falcon-40b",
           "gptj", "cohere", "olmo")  # fmt: skip


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in TELLING else pytest.mark.slow)
        for name in sorted(FAMILIES)
    ],
)
def test_no_number_of_a_model_is_left_out(family: str, tmp_path: Path) -> None:
    """Whatever parts a family has: each element that the engine holds is in exactly one mark."""
    model = load(write_model(family, tmp_path, tokenizer=False))
    decoder = Decoder(model.anatomy.spec, Weights(model), FloatLinear, 64)
    marks = value_marks(decoder)
    assert len({one.name for one in marks}) == len(marks)
    assert 4 * sum(math.prod(one.shape) for one in marks) == decoder.weights_bytes
    assert streamed_marks(model.anatomy.spec, Weights(model)) == marks


# --- the verdict ---------------------------------------------------------------------------------


def test_a_copy_has_the_same_weights(mark: Fingerprint, healthy: Path, tmp_path: Path) -> None:
    found = judged(mark, changed(healthy, tmp_path / "copy", lambda _: None))
    assert (found.verdict, found.same, found.differences) == ("same_weights", True, ())
    assert found.answers is not None
    assert found.answers.mean_nats == 0


def test_a_wider_copy_of_the_same_numbers_has_the_same_values(
    healthy: Path, tmp_path: Path
) -> None:
    narrow = changed(healthy, tmp_path / "narrow", cast(torch.bfloat16))
    wide = changed(narrow, tmp_path / "wide", cast(torch.float32))
    found = judged(of_model(narrow, noise=False), wide)
    assert (found.verdict, found.same) == ("same_values", True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounded_copy_is_the_same_model(
    mark: Fingerprint, healthy: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    found = judged(mark, changed(healthy, tmp_path / "copy", cast(dtype)))
    assert (found.verdict, found.same) == ("same_model_other_precision", True)


def layer(index: int, name: str) -> str:
    return f"model.layers.{index}.{name}.weight"


def flip_exponent(tensors: Tensors, name: str, element: int, bit: int = 23) -> None:
    words = tensors[name].contiguous().view(-1).view(torch.int32)
    words[element] ^= 1 << bit
    tensors[name] = words.view(torch.float32).view(tensors[name].shape)


def swap(tensors: Tensors, one: str, other: str) -> None:
    tensors[one], tensors[other] = tensors[other], tensors[one]


def scale(tensors: Tensors, name: str, rows: slice, factor: float) -> None:
    tensors[name][rows] *= factor


def nan(tensors: Tensors, name: str) -> None:
    tensors[name].view(-1)[3] = math.nan


# What is done, the layer and kind that must come first, whether bfloat16 beside it leaves it seen.
FAULTS: dict[str, tuple[Callable[[Tensors], object], int | None, str, bool]] = {
    "one head's q times 4": (
        lambda t: scale(t, layer(1, "self_attn.q_proj"), slice(16, 32), 4), 1, "q", True),
    "k zeroed": (
        lambda t: scale(t, layer(0, "self_attn.k_proj"), slice(None), 0), 0, "k", True),
    "one row of v turned": (
        lambda t: scale(t, layer(2, "self_attn.v_proj"), slice(3, 4), -1), 2, "v", True),
    "o of another layer": (
        lambda t: swap(t, layer(0, "self_attn.o_proj"), layer(2, "self_attn.o_proj")), 0, "o",
        True),
    "gate and up swapped": (
        lambda t: swap(t, layer(2, "mlp.gate_proj"), layer(2, "mlp.up_proj")), 2, "mlp", True),
    "down one percent larger": (
        lambda t: scale(t, layer(1, "mlp.down_proj"), slice(None), 1.01), 1, "mlp", True),
    "an exponent bit of a norm": (
        lambda t: flip_exponent(t, layer(1, "input_layernorm"), 5), 1, "norm", True),
    "a mantissa bit of a norm": (
        lambda t: flip_exponent(t, layer(1, "input_layernorm"), 5, 3), 1, "norm", False),
    "NaN in q": (lambda t: nan(t, layer(2, "self_attn.q_proj")), 2, "q", True),
    "an embedding row lost": (
        lambda t: scale(t, "model.embed_tokens.weight", slice(70, 71), 0), None, "embedding", True),
    "a bit of the head": (lambda t: flip_exponent(t, "lm_head.weight", 77, 25), None, "embedding",
                          True),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_located(mark: Fingerprint, healthy: Path, tmp_path: Path, fault: str) -> None:
    change, at, kind, _ = FAULTS[fault]
    found = judged(mark, changed(healthy, tmp_path / "bad", change))
    assert (found.verdict, found.same) == ("not_the_same_model", False)
    first = found.differences[0]
    if "mantissa" in fault:  # too small for a sketch, so that the bytes alone tell
        assert (first.part, first.layer) == ("stored", at)
        assert layer(1, "input_layernorm") in first.what
    else:
        assert (first.part, first.layer, first.kind) == ("values", at, kind)


@pytest.mark.parametrize("fault", [name for name, row in FAULTS.items() if row[3]])
def test_a_fault_is_located_behind_another_precision(
    mark: Fingerprint, healthy: Path, tmp_path: Path, fault: str
) -> None:
    change, at, kind, _ = FAULTS[fault]

    def both(tensors: Tensors) -> None:
        change(tensors)
        cast(torch.bfloat16)(tensors)

    found = judged(mark, changed(healthy, tmp_path / "bad", both))
    assert found.verdict == "not_the_same_model"
    assert (found.differences[0].layer, found.differences[0].kind) == (at, kind)
    # And nothing that was only rounded is called a difference.
    places = {(one.layer, one.kind) for one in found.differences if one.part == "values"}
    assert places <= {(at, kind), (2, "o") if "another layer" in fault else (at, kind)}


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}, "rope"),
        ({"rms_norm_eps": 0.001}, "settings"),
        ({"hidden_act": "gelu"}, "settings"),
    ],
)
def test_equal_weights_under_other_settings_are_another_model(
    mark: Fingerprint, healthy: Path, tmp_path: Path, config: dict[str, Any], part: str
) -> None:
    found = judged(mark, changed(healthy, tmp_path / "bad", lambda _: None, **config))
    assert (found.verdict, found.same) == ("not_the_same_model", False)
    assert found.differences[0].part == part
    assert "the weights do not differ" in found.sentence


def test_a_tensor_that_is_missing_is_named(
    mark: Fingerprint, healthy: Path, tmp_path: Path
) -> None:
    lost = changed(healthy, tmp_path / "lost", lambda t: t.pop(layer(2, "mlp.down_proj")))
    found = judged(mark, lost)
    assert found.verdict == "not_the_same_model"
    assert f"{layer(2, 'mlp.down_proj')} is missing in B" in found.differences[0].what


def test_a_tokenizer_that_cuts_otherwise_is_another_model(mark: Fingerprint) -> None:
    first = mark.answers[0]
    shorter = replace(first, num_tokens=first.num_tokens - 1, logprobs=first.logprobs[1:])
    found = compare(mark, replace(mark, answers=(shorter, *mark.answers[1:])))
    assert found.verdict == "not_the_same_model"
    assert found.differences[0].part == "tokenizer"


def test_equal_weights_with_other_answers_are_a_machine_that_computes_otherwise(
    mark: Fingerprint,
) -> None:
    off = tuple(
        replace(one, logprobs=tuple(value - 0.05 for value in one.logprobs)) for one in mark.answers
    )
    found = compare(mark, replace(mark, answers=off))
    assert (found.verdict, found.same) == ("same_weights_other_answers", False)


def test_unlike_types_whose_values_were_not_read_are_not_decided(mark: Fingerprint) -> None:
    """An FP8 checkpoint, which the embedded engine does not run, beside its original."""
    packed = replace(
        mark,
        stored=tuple(replace(one, dtype="F8_E4M3", sum64="0" * 16) for one in mark.stored),
        values=(),
        answers=(),
    )
    assert compare(mark, packed).verdict == "not_decided"


# --- answers alone -------------------------------------------------------------------------------


def outside(mark: Fingerprint, off: float, precision: str | None = None) -> Fingerprint:
    """What a server that is `off` by so many nats shows of the model."""
    answers = tuple(
        replace(one, token_ids=None, logprobs=tuple(value - off for value in one.logprobs))
        for one in mark.answers
    )
    return Fingerprint("http://x", "served", precision, (), (), answers, (), (), None, None, ())


NOISE = (Noise("bfloat16", 0.02, 0.3), Noise("int8", 0.08, 0.9))


@pytest.mark.parametrize(
    ("off", "precision", "verdict"),
    [
        (0.0, None, "same_answers"),
        (SAME_NATS / 2, None, "same_answers"),
        (0.03, None, "same_model_other_precision"),
        (0.03, "bfloat16", "same_model_other_precision"),
        (0.03, "float32", "not_the_same_model"),
        (0.1, None, "same_model_other_precision"),
        (0.1, "bfloat16", "not_the_same_model"),
        (0.1, "int8", "same_model_other_precision"),
        (0.2, None, "not_the_same_model"),
    ],
)
def test_answers_are_judged_by_the_measured_noise_of_the_precision_that_is_told(
    mark: Fingerprint, off: float, precision: str | None, verdict: str
) -> None:
    model = replace(mark, noise=NOISE)
    assert compare(model, outside(mark, off, precision)).verdict == verdict
    assert compare(outside(mark, off, precision), model).verdict == verdict


def test_a_server_that_turns_otherwise_is_another_model(mark: Fingerprint) -> None:
    found = compare(mark, replace(outside(mark, 0.0), rope="0" * 16))
    assert (found.verdict, found.differences[0].part) == ("not_the_same_model", "rope")
    assert "weights were not seen" in found.sentence
    assert compare(mark, replace(outside(mark, 0.0), rope=mark.rope)).verdict == "same_answers"


@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--precision", "bfloat16"], 1)])
def test_a_server_that_does_not_tell_its_precision_may_be_spoken_for(
    mark: Fingerprint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    code: int,
) -> None:
    saved = tmp_path / "mark.json"
    saved.write_text(json.dumps(to_document(replace(mark, noise=NOISE))))
    monkeypatch.setattr(
        "ullage.probes.sameness.fingerprints.of_server", lambda *_: outside(mark, 0.1)
    )
    assert main(["probe", "compare", str(saved), "http://127.0.0.1:9", *flags]) == code


def test_two_servers_are_decided_by_a_reference_only(mark: Fingerprint) -> None:
    one, other = outside(mark, 0.0), outside(mark, 0.03)
    assert compare(one, outside(mark, 0.0)).verdict == "same_answers"
    assert compare(one, other).verdict == "not_decided"
    reference = replace(mark, noise=NOISE)
    assert compare(one, other, reference).verdict == "same_model_other_precision"
    assert compare(one, outside(mark, 0.5), reference).verdict == "not_the_same_model"


def test_the_noise_of_a_model_is_measured_the_finer_precision_first(mark: Fingerprint) -> None:
    assert [one.precision for one in mark.noise] == ["bfloat16", "int8"]
    assert SAME_NATS < mark.noise[0].mean_nats < mark.noise[1].mean_nats < 0.2


def test_another_implementation_in_float32_stays_within_what_is_called_equal(
    mark: Fingerprint, healthy: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(healthy, dtype=torch.float32).eval()
    theirs = []
    for one in mark.answers:
        assert one.token_ids is not None
        ids = torch.tensor([one.token_ids])
        with torch.inference_mode():
            logprobs = model(ids).logits[0].double().log_softmax(-1)
        picked = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
        theirs.append(replace(one, logprobs=tuple(picked.tolist())))
    found = answers_apart(mark.answers, theirs)
    assert found is not None
    assert found[0] < SAME_NATS / 10


# --- adapters ------------------------------------------------------------------------------------


def test_a_half_applied_adapter_is_another_model(healthy: Path, tmp_path: Path) -> None:
    adapter = write_adapter(healthy, tmp_path / "adapter")
    half = tmp_path / "half"
    shutil.copytree(adapter, half)
    tensors = load_file(half / "adapter_model.safetensors")
    for name in tensors:
        if ".layers.2." in name and "lora_B" in name:
            tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, half / "adapter_model.safetensors")
    whole = of_model(healthy, str(adapter), noise=False)
    assert whole.stored == whole.values == ()
    assert compare(whole, of_model(healthy, str(adapter), noise=False)).verdict == "same_answers"
    assert compare(whole, of_model(healthy, str(half), noise=False)).verdict == "not_the_same_model"
    base = replace(of_model(healthy, noise=False), stored=(), values=())
    assert compare(whole, base).verdict == "not_the_same_model"


# --- documents and servers -----------------------------------------------------------------------


def test_a_saved_fingerprint_is_read_as_it_was(mark: Fingerprint) -> None:
    assert from_document(json.loads(json.dumps(to_document(mark)))) == mark
    assert {one.prompt for one in mark.answers} == set(PROMPTS)


def test_servers_are_compared_with_a_model_on_disk(
    mark: Fingerprint, healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = EngineOptions(kv_cache_memory_bytes=1 << 22, max_num_seqs=4)
    saved = tmp_path / "mark.json"
    saved.write_text(json.dumps(to_document(mark)))
    server = start_server(healthy, options, served_model_name="tiny")
    try:
        assert main(["probe", "compare", str(saved), server.url, "--output", "json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["verdict"] == "same_answers"
        assert document["b"].endswith("#tiny")
        assert document["not_compared"]["B: stored"]
        assert of_server(server.url, None, None).rope == mark.rope
        assert of_server(server.url, "tiny", None).precision == "float32"
        assert main(["probe", "compare", str(saved), f"{server.url}#other"]) == 2
        assert "other" in capsys.readouterr().err
    finally:
        server.stop()
    assert main(["probe", "compare", str(saved), server.url]) == 3


@pytest.mark.parametrize("quantization", ["int8", "none"])
def test_a_quantised_server_is_another_precision_and_a_faulty_one_another_model(
    mark: Fingerprint, healthy: Path, tmp_path: Path, quantization: str
) -> None:
    change = FAULTS["k zeroed"][0] if quantization == "none" else lambda _: None
    options = EngineOptions(
        kv_cache_memory_bytes=1 << 22, max_num_seqs=4, quantization=quantization
    )
    server = start_server(changed(healthy, tmp_path / "served", change), options)
    try:
        found = compare(mark, of_server(server.url, None, None))
    finally:
        server.stop()
    expected = "not_the_same_model" if quantization == "none" else "same_model_other_precision"
    assert found.verdict == expected


# --- the commands --------------------------------------------------------------------------------


def test_a_fingerprint_is_saved_and_compared(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, model = tmp_path / "mark.json", str(healthy)
    flags = ["--weights-only", "--save", str(saved)]
    assert main(["probe", "fingerprint", model, *flags]) == 0
    printed = capsys.readouterr().out
    assert "tensors" in printed
    assert "no answers: not asked for" in printed
    assert main(["probe", "fingerprint", model, "--weights-only", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["stored"][0]["sum64"]
    assert main(["probe", "compare", str(saved), model, "--weights-only"]) == 0
    assert "same weights" in capsys.readouterr().out
    narrow = changed(healthy, tmp_path / "narrow", cast(torch.bfloat16))
    asked = ["probe", "compare", str(saved), str(narrow), "--weights-only"]
    assert main(asked) == 0
    assert main([*asked, "--strict"]) == 1
    bad = changed(healthy, tmp_path / "bad", FAULTS["one head's q times 4"][0])
    capsys.readouterr()
    assert main(["probe", "compare", str(saved), str(bad), "--weights-only"]) == 1
    assert "layer 1 q" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": "ullage-fingerprint-1"}', "ullage probe fingerprint"),
        ('{"format": "ullage-fingerprint-1", "stored": 7', "JSON"),
        ('{"format": "ullage-fingerprint-10"}', "ullage-fingerprint-10"),
    ],
)
def test_what_is_no_fingerprint_is_one_sentence(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    assert main(["probe", "compare", str(file), str(healthy)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("part", "key", "value", "said"),
    [
        ("values", "sketch", [1.0] * 31, "a sketch of 31 numbers"),
        ("values", "sketch", [1e999] * 32, "finite"),
        ("values", "norm", None, "float"),
        ("answers", "logprobs", [0.0], "1 logprobs of"),
        ("answers", "token_ids", [1, 2], "logprobs of"),
        ("stored", "shape", 7, "iterable"),
        ("noise", "mean_nats", "much", "much"),
    ],
)
def test_a_saved_fingerprint_that_was_changed_is_one_sentence(
    mark: Fingerprint, healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    part: str, key: str, value: object, said: str,
) -> None:  # fmt: skip
    document = json.loads(json.dumps(to_document(mark)))
    document[part][0][key] = value
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(document))
    assert main(["probe", "compare", str(file), str(healthy)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_a_model_that_does_not_fit_in_memory_is_compared_a_layer_at_a_time(
    mark: Fingerprint, healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage.probes.sameness.fingerprints.MEMORY_MARGIN", 1e9)
    found = of_model(healthy)
    assert found.values == mark.values
    assert found.answers == ()
    assert "GB in float32" in dict(found.absent)["answers"]
    assert compare(mark, found).verdict == "same_weights"
    with pytest.raises(BadUsage, match="GB in float32"):
        of_model(healthy, "an adapter")


def test_where_values_cannot_be_read_the_bytes_name_the_tensor(
    mark: Fingerprint, healthy: Path, tmp_path: Path
) -> None:
    bad = changed(healthy, tmp_path / "bad", FAULTS["k zeroed"][0])
    there = replace(of_model(bad, answers=False), values=())
    found = compare(replace(mark, values=()), there)
    assert found.verdict == "not_the_same_model"
    assert layer(0, "self_attn.k_proj") in found.differences[0].what


def test_flags_that_do_not_go_together_are_one_sentence(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, url = str(healthy), "http://127.0.0.1:9"
    for arguments, said in (
        (["fingerprint", model, "--weights-only", "--lora", "x"], "--weights-only"),
        (["fingerprint", model, "--save", "/nowhere/x.json", "--weights-only"], "/nowhere/x.json"),
        (["compare", url, model, "--weights-only"], "--weights-only"),
        (["compare", url, model, "--lora-a", "x"], "--lora-a"),
        (["compare", model, str(tmp_path / "none")], "none"),
        (["compare", model, "http://"], "URL"),
    ):
        assert main(["probe", *arguments]) == 2, arguments
        printed = capsys.readouterr()
        assert printed.out == ""
        assert said in printed.err
        assert printed.err.count("\n") == 1

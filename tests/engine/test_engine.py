"""The engine as a whole: how requests end, what it refuses, that nothing outlives a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driving import finish, generate, greedy_params
from ullage.anatomy import load
from ullage.anatomy.spec import Attention, Experts, LatentAttention, ModelSpec, Unknown
from ullage.engine.engine import Engine, RequestRefused
from ullage.engine.model.support import require_supported
from ullage.engine.options import EngineOptions
from ullage.engine.request import FinishReason, Request, SamplingParams
from ullage.errors import BadUsage, MalformedCheckpoint, UnsupportedModel

FamilyDir = Callable[[str], Path]
PROMPT = tuple(range(10, 30))


@pytest.fixture(scope="module")
def engine(family_dir: FamilyDir) -> Engine:
    return Engine.load(family_dir("llama"), EngineOptions(kv_cache_memory_bytes=1 << 22))


@pytest.fixture(scope="module")
def spec(family_dir: FamilyDir) -> ModelSpec:
    return load(family_dir("llama")).anatomy.spec


def one(engine: Engine, **params: Any) -> tuple[Request, str]:
    (request,) = engine.add_request("r", PROMPT, SamplingParams(**params))
    return request, finish(engine).get("r", "")


def test_max_tokens_ends_with_length(engine: Engine) -> None:
    request, _ = one(engine, max_tokens=5, temperature=0.0, ignore_eos=True)
    assert request.finish_reason is FinishReason.LENGTH
    assert len(request.output_ids) == 5


def test_a_stop_token_ends_with_stop_and_is_not_shown(engine: Engine) -> None:
    whole, text = one(engine, max_tokens=12, temperature=0.0, ignore_eos=True)
    third = whole.output_ids[2]
    at = whole.output_ids.index(third)
    request, shorter = one(
        engine, max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(third,)
    )
    assert request.finish_reason is FinishReason.STOP
    assert request.output_ids == whole.output_ids[: at + 1]
    assert engine.tokenizer is not None
    assert shorter == engine.tokenizer.decode(whole.output_ids[:at])
    assert text.startswith(shorter) or "\N{REPLACEMENT CHARACTER}" in shorter


def test_eos_ends_unless_ignored(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = one(engine, max_tokens=12, temperature=0.0, ignore_eos=True)
    eos = whole.output_ids[4]
    assert engine.tokenizer is not None
    monkeypatch.setattr(engine, "tokenizer", replace(engine.tokenizer, eos_ids=frozenset({eos})))
    stopped, _ = one(engine, max_tokens=12, temperature=0.0)
    ignored, _ = one(engine, max_tokens=12, temperature=0.0, ignore_eos=True)
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.output_ids == whole.output_ids[: whole.output_ids.index(eos) + 1]
    assert ignored.output_ids == whole.output_ids


def test_a_seed_repeats_and_seeds_differ(engine: Engine) -> None:
    def sampled(seed: int) -> list[int]:
        return one(engine, max_tokens=20, temperature=1.5, seed=seed, ignore_eos=True)[0].output_ids

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_a_seeded_answer_survives_preemption(family_dir: FamilyDir) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.5, seed=5, ignore_eos=True)
    prompts = [PROMPT, PROMPT[:7], PROMPT[3:]]
    token_bytes = 3 * 2 * 2 * 16 * 4
    roomy = Engine.load(family_dir("llama"), EngineOptions(kv_cache_memory_bytes=1 << 22))
    tight_options = EngineOptions(
        kv_cache_memory_bytes=96 * token_bytes, max_model_len=96, block_size=4
    )
    tight = Engine.load(family_dir("llama"), tight_options)
    wanted = [r.output_ids for r in generate(roomy, prompts, params)]
    requests = generate(tight, prompts, params)
    assert sum(r.num_preemptions for r in requests) > 0
    assert [r.output_ids for r in requests] == wanted


def test_abort_frees_blocks_at_once(engine: Engine) -> None:
    (request,) = engine.add_request("r", PROMPT, greedy_params(100))
    engine.step()
    assert engine.pool.num_used > 0
    engine.abort(request)
    assert engine.pool.num_used == 0
    assert request.finish_reason is FinishReason.ABORT
    engine.abort(request)  # again changes nothing
    assert not engine.has_work


def test_numbers_that_are_not_finite_end_one_request_and_leave_no_trace(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy, _ = one(engine, max_tokens=4, temperature=0.0, ignore_eos=True)
    forward = engine._decoder.forward
    monkeypatch.setattr(
        engine._decoder, "forward", lambda *a: torch.full_like(forward(*a), float("nan"))
    )
    engine.add_request("sick", PROMPT, greedy_params(4))
    blocks = {b for w in (engine.step().plan.work) for t in w.tables for b in t}
    monkeypatch.undo()
    assert blocks
    assert all(not engine.kv.keys[0][b].any() for b in blocks)
    again, _ = one(engine, max_tokens=4, temperature=0.0, ignore_eos=True)
    assert again.output_ids == healthy.output_ids


def test_requests_that_can_never_run_are_refused(engine: Engine) -> None:
    limit, vocab = engine.max_model_len, engine.spec.vocab_size
    for prompt, params, said in (
        ((), greedy_params(1), "at least one token"),
        (PROMPT, greedy_params(limit), f"at most {limit} together"),
        ((3, vocab), greedy_params(1), f"outside the vocabulary: {vocab}"),
        ((3, -1), greedy_params(1), "outside the vocabulary: -1"),
    ):
        with pytest.raises(RequestRefused, match=said):
            engine.add_request("r", prompt, params)
    assert not engine.has_work
    engine.add_request("r", PROMPT, greedy_params(limit - len(PROMPT)))
    with pytest.raises(RequestRefused, match="already running"):
        engine.add_request("r", PROMPT, greedy_params(1))
    finish(engine)


def test_invariants_are_checked_in_the_running_engine(
    family_dir: FamilyDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ULLAGE_CHECK", "1")
    checked = Engine.load(family_dir("llama"), EngineOptions(kv_cache_memory_bytes=1 << 22))
    checked.add_request("r", PROMPT, greedy_params(4))
    checked.step()
    checked.pool.allocate(1)  # a leak
    with pytest.raises(AssertionError, match="references"):
        checked.step()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs: 0"),
        ({"block_size": -1}, "--block-size"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "--max-num-batched-tokens"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(BadUsage, match=said):
        EngineOptions(**options)


def test_limits_are_checked_against_the_model(family_dir: FamilyDir) -> None:
    with pytest.raises(BadUsage, match=r"--max-model-len: 513; expected 1 to 512"):
        Engine.load(family_dir("llama"), EngineOptions(max_model_len=513))
    with pytest.raises(BadUsage, match=r"--kv-cache-memory-bytes.*--max-model-len 32"):
        Engine.load(family_dir("llama"), EngineOptions(kv_cache_memory_bytes=40 * 768))


def attention(spec: ModelSpec, **changes: Any) -> ModelSpec:
    layers = list(spec.layers)
    mixer = layers[1].mixer
    assert isinstance(mixer, Attention)
    layers[1] = replace(layers[1], mixer=replace(mixer, **changes))
    return replace(spec, layers=tuple(layers))


def layer(spec: ModelSpec, **changes: Any) -> ModelSpec:
    layers = (*spec.layers[:1], replace(spec.layers[1], **changes), *spec.layers[2:])
    return replace(spec, layers=layers)


UNSUPPORTED: dict[str, Callable[[ModelSpec], ModelSpec]] = {
    "kind": lambda s: replace(s, kind="encoder"),
    "positions.kind": lambda s: replace(s, positions=replace(s.positions, kind="alibi")),
    "unknowns": lambda s: replace(s, unknowns=(Unknown("x", "y"),)),
    "residual_streams": lambda s: replace(s, residual_streams=4),
    r"layers\[1\].mixer": lambda s: layer(s, mixer=LatentAttention(4, 8, 8, 8, 8)),
    r"layers\[1\].mixer.chunk": lambda s: attention(s, chunk=16),
    r"layers\[1\].mixer.sinks": lambda s: attention(s, sinks=True),
    r"layers\[1\].mixer.qk_norm": lambda s: attention(s, qk_norm="layer"),
    r"layers\[1\].mixer.v_head_dim": lambda s: attention(s, v_head_dim=8),
    r"layers\[1\].mixer.kv_shared_from": lambda s: attention(s, kv_shared_from=0),
    r"layers\[1\].feed_forward.zero_experts": lambda s: layer(
        s, feed_forward=Experts(8, 2, 32, "silu", True, zero_experts=2)
    ),
    r"layers\[1\].feed_forward.activation": lambda s: layer(
        s, feed_forward=replace(s.layers[1].feed_forward, activation="xielu")
    ),
    "family": lambda s: replace(s, family="ctrl"),
    "judges": lambda s: replace(s, judges="sequence", num_labels=2),
    "clip_qkv": lambda s: replace(s, numerics=(("clip_qkv", 8.0),)),
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_a_spec_that_would_run_wrongly_is_refused_by_field(field: str, spec: ModelSpec) -> None:
    require_supported(spec, 512)
    with pytest.raises(UnsupportedModel, match=f"^{field}: .*embedded engine"):
        require_supported(UNSUPPORTED[field](spec), 512)


def test_missing_and_misshapen_weights_are_refused(tmp_path: Path, family_dir: FamilyDir) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(family_dir("llama"), tmp_path / "model")
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, copy / "model.safetensors")
    with pytest.raises(MalformedCheckpoint, match=f"{name}: missing"):
        Engine.load(copy)
    save_file({**tensors, name: tensors[name].T.contiguous()}, copy / "model.safetensors")
    with pytest.raises(MalformedCheckpoint, match=rf"{name}: shape \[64, 96\]"):
        Engine.load(copy)
    save_file({**tensors, name: tensors[name].to(torch.int8)}, copy / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=f"{name}: dtype I8"):
        Engine.load(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(MalformedCheckpoint, match="weights are missing"):
        Engine.load(copy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_run_as_float32(
    tmp_path: Path, family_dir: FamilyDir, dtype: torch.dtype
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    halved = shutil.copytree(family_dir("llama"), tmp_path / "half")
    widened = shutil.copytree(family_dir("llama"), tmp_path / "wide")
    tensors = {k: v.to(dtype) for k, v in load_file(halved / "model.safetensors").items()}
    save_file(tensors, halved / "model.safetensors")
    save_file({k: v.float() for k, v in tensors.items()}, widened / "model.safetensors")
    options = EngineOptions(kv_cache_memory_bytes=1 << 22)
    found = [
        generate(Engine.load(where, options), [PROMPT], greedy_params(12))[0].output_ids
        for where in (halved, widened)
    ]
    assert found[0] == found[1]


def test_int8_weights_stay_close_to_float(
    family_dir: FamilyDir, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random wide weights are harder to quantise than trained ones; a wrong scale gives noise."""
    options = EngineOptions(kv_cache_memory_bytes=1 << 22, quantization="int8")
    quantized = Engine.load(family_dir("llama"), options)
    seen: list[torch.Tensor] = []
    for served in (engine, quantized):
        forward = served._decoder.forward
        monkeypatch.setattr(
            served._decoder, "forward", lambda *a, f=forward: seen.append(f(*a)) or seen[-1]
        )
        generate(served, [PROMPT], greedy_params(1))
    assert 0.95 < torch.nn.functional.cosine_similarity(*seen).item() < 1

"""Rules of vLLM that no case of the field shows: versions, limits, order, whole messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.adapters.cases import ALL, QV, Case, names, pairs, works, write
from tests.adapters.test_cases import spec_of
from ullage.adapters.check import check
from ullage.adapters.verdict import Judgement, ServeOptions, State
from ullage.anatomy.adapters.read import read_adapter
from ullage.errors import BadUsage

PLAIN = works("llama", pairs(names(*QV)), 4)


def judged(case: Case, folder, **options: object) -> Judgement:
    given = ServeOptions(engine="vllm", **{**case.options, **options})  # type: ignore[arg-type]
    return check(read_adapter(write(case, folder)), spec_of(case.base), given)


def test_the_default_version_is_the_one_that_is_verified(tmp_path):
    judgement = judged(PLAIN, tmp_path)
    assert (judgement.engine, judgement.version, judgement.basis) == ("vllm", "0.32", "verified")
    assert not judgement.notes
    assert judgement.limits == (("--max-lora-rank", 16), ("--max-loras", 1))


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "v0.32"])
def test_a_patch_release_is_judged_as_its_release(version, tmp_path):
    assert judged(PLAIN, tmp_path, version=version).basis == "verified"


@pytest.mark.parametrize(
    ("version", "verdict"), [("0.6.4", "partial"), ("0.7.0", "works"), ("0.32", "works")]
)
def test_rslora_is_read_since_0_7(version, verdict, tmp_path):
    judgement = judged(replace(PLAIN, config={"use_rslora": True}), tmp_path, version=version)
    assert judgement.verdict == verdict
    applied = {module.scale_applied for module in judgement.modules}
    assert applied == ({16 / 8} if verdict == "partial" else {16 / 8**0.5})
    assert {module.scale_expected for module in judgement.modules} == {16 / 8**0.5}


def test_patterns_in_an_older_version_are_not_known(tmp_path):
    patterned = replace(PLAIN, config={"alpha_pattern": {"q_proj": 4}})
    assert judged(patterned, tmp_path / "a", version="0.20").verdict == "unknown"
    assert judged(patterned, tmp_path / "b").verdict == "works"
    older = judged(PLAIN, tmp_path / "c", version="0.20")
    assert (older.verdict, older.basis) == ("works", "source")
    assert older.notes


@pytest.mark.parametrize("version", ["9.9", "0.4", "new", "0", "0.", "0.x", "-1.2"])
def test_a_version_that_is_not_known_is_a_sentence(version, tmp_path):
    with pytest.raises(BadUsage, match="--engine-version"):
        judged(PLAIN, tmp_path, version=version)


@pytest.mark.parametrize("rank", [2, 24, 100, 513, 1024])
def test_limits_that_vllm_does_not_take_are_a_sentence(rank, tmp_path):
    with pytest.raises(BadUsage, match="--max-lora-rank"):
        judged(PLAIN, tmp_path, max_lora_rank=rank)


def test_all_complaints_about_a_configuration_stand_in_one_message(tmp_path):
    many = replace(PLAIN, config={"use_dora": True, "lora_bias": True, "bias": "all", "r": 64})
    assert judged(many, tmp_path).message == (
        "vLLM does not yet support DoRA. vLLM does not support LoRA bias (lora_bias). "
        "LoRA rank 64 is greater than max_lora_rank 16. Adapter bias is not supported."
    )


def test_the_modules_that_are_expected_are_those_of_this_base(tmp_path):
    strange = replace(PLAIN, shapes=pairs(names("self_attn.wq"), sides={"wq": (64, 64)}))
    assert judged(strange, tmp_path).message == (
        f"While loading {tmp_path}, expected target modules in {{'down_proj', 'embed_tokens', "
        "'gate_proj', 'k_proj', 'lm_head', 'o_proj', 'q_proj', 'up_proj', 'v_proj'} but received "
        "['model.layers.0.self_attn.wq', 'model.layers.0.self_attn.wq', "
        "'model.layers.1.self_attn.wq', 'model.layers.1.self_attn.wq']. Please verify that the "
        "loaded LoRA module is correct"
    )


def test_a_slot_costs_the_same_whatever_the_adapter(tmp_path):
    small = judged(PLAIN, tmp_path / "a")
    large = judged(works("llama", pairs(names("mlp.up_proj"), rank=16), 2, config={"r": 16}),
                   tmp_path / "b")  # fmt: skip
    refused = judged(replace(PLAIN, config={"use_dora": True}), tmp_path / "c")
    # By hand, in bfloat16, rank 16, two layers: q, k, v, o, gate, up, down; embedding and head.
    layer = 16 * (3 * 64 + 64 + 32 + 32 + 64 + 64 + 2 * 64 + 128 + 128 + 128 + 64)
    rest = 16 * 2 * (256 + 64)
    assert small.slot_bytes == large.slot_bytes == refused.slot_bytes == 2 * (2 * layer + rest)


def test_a_filter_of_modules_makes_slots_smaller(tmp_path):
    few = judged(PLAIN, tmp_path / "a", lora_target_modules=("qkv_proj",))
    assert few.slot_bytes == 2 * 2 * 16 * (3 * 64 + 64 + 32 + 32)
    assert few.verdict == "works"


def test_tensor_parallelism_and_sharding_change_no_verdict(tmp_path):
    for number, (size, sharded) in enumerate(((2, False), (2, True), (4, False))):
        judgement = judged(PLAIN, tmp_path / str(number), tensor_parallel_size=size,
                           fully_sharded_loras=sharded)  # fmt: skip
        assert judgement.verdict == "works"


def test_a_class_that_nobody_knows_is_named(tmp_path):
    spec = replace(spec_of("llama"), architecture="SomethingNewForCausalLM")
    adapter = read_adapter(write(PLAIN, tmp_path))
    judgement = check(adapter, spec, ServeOptions(engine="vllm"))
    assert (judgement.verdict, judgement.basis) == ("unknown", "source")


def test_what_was_refused_says_so_of_every_module(tmp_path):
    case = next(pair[0] for pair in ALL.values() if pair[0].verdict == "rejected")
    judgement = judged(case, tmp_path)
    assert {module.state for module in judgement.modules} == {State.REFUSED}
    assert {module.detail for module in judgement.modules} == {"the engine refuses the adapter"}
    assert all(module.scale_applied is None for module in judgement.modules)

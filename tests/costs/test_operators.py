"""FLOPs against PyTorch's own counter, pairs and experts against brute force."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.anatomy import load
from ullage.anatomy.spec import (
    Attention,
    Dense,
    Experts,
    Indexer,
    LatentAttention,
    LayerSpec,
    LinearAttention,
    Mamba,
    ModelSpec,
    Norm,
    Positions,
)
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.costs.deployment import Parallel
from ullage.costs.operators import (
    expected_experts,
    layer_operators,
    step_operators,
    total_flops,
    total_weight_elements,
)
from ullage.costs.step import Operator, Step, visible_keys, visible_pairs
from ullage.errors import BadUsage

GQA = Attention(num_heads=8, num_kv_heads=2, head_dim=16, v_head_dim=16)
MLA = LatentAttention(
    num_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    q_lora_rank=24,
)
SWIGLU = Dense(intermediate=96, activation="silu", gated=True)


def model(mixer, feed_forward=SWIGLU, *, num_layers=2, hidden_size=64, vocab_size=100):
    """A ModelSpec of identical layers."""
    return ModelSpec(
        model_type="test",
        architecture="Test",
        family="generic",
        kind="decoder",
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_positions=1024,
        layers=tuple(LayerSpec(i, mixer, feed_forward) for i in range(num_layers)),
        norm=Norm("rms", 1e-6),
        positions=Positions("rope"),
        tie_embeddings=False,
        dtype="bfloat16",
    )


def named(operators: list[Operator] | tuple[Operator, ...]) -> dict[str, Operator]:
    return {o.name: o for o in operators}


# --- what a query sees ---------------------------------------------------------------------------

lengths = st.integers(0, 40)
limits = st.one_of(st.none(), st.integers(1, 20))


def seen(position: int, window: int | None, chunk: int | None) -> range:
    """The keys that one causal query sees, by definition."""
    first = 0
    if chunk is not None:
        first = position // chunk * chunk
    elif window is not None:
        first = max(0, position - window + 1)
    return range(first, position + 1)


@given(st.integers(1, 40), lengths, limits, limits)
def test_visible_pairs_and_keys_equal_a_mask_written_out(new, context, window, chunk):
    rows = [set(seen(context + i, window, chunk)) for i in range(new)]
    asked = {"window": window, "chunk": chunk}
    assert visible_pairs(new, context, **asked) == sum(len(row) for row in rows)
    assert visible_keys(new, context, **asked) == len(set().union(*rows))


def test_without_causality_every_query_sees_every_key():
    assert visible_pairs(3, 4, causal=False) == 3 * 7


# --- FLOPs against torch -------------------------------------------------------------------------


def counted_flops(module, *args, **kwargs) -> dict[str, float]:
    """What torch counts per module while running it, by the module's last name."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        module(*args, **kwargs)
    totals = {}
    for name, operations in counter.get_flop_counts().items():
        totals[name.removeprefix(type(module).__name__ + ".")] = sum(operations.values())
    return totals


def tiny_llama():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=100,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def test_prefill_of_a_llama_costs_what_torch_counts():
    torch = pytest.importorskip("torch")
    network, batch, length = tiny_llama(), 3, 10
    counts = counted_flops(network, torch.zeros(batch, length, dtype=torch.long), use_cache=False)
    spec, step = model(GQA), Step(batch, length)
    layer = named(layer_operators(spec.layers[0], spec, step, Parallel()))
    assert counts["model.layers.0.mlp"] == layer["mlp.up"].flops + layer["mlp.down"].flops
    # Eager attention multiplies the masked half too; the formula counts what is visible.
    whole = layer["attention"].flops * length**2 / visible_pairs(length, 0)
    projections = sum(layer[name].flops for name in ("q", "kv", "o"))
    assert counts["model.layers.0.self_attn"] == projections + whole
    # transformers makes logits of every position, an engine of each sequence's last.
    head = named(step_operators(spec, step))["lm_head"]
    assert counts["lm_head"] == head.flops * length


def test_decode_of_a_llama_costs_what_torch_counts():
    torch = pytest.importorskip("torch")
    network, batch, context = tiny_llama(), 3, 10
    with torch.no_grad():
        cache = network(torch.zeros(batch, context, dtype=torch.long)).past_key_values
        token = torch.zeros(batch, 1, dtype=torch.long)
        counts = counted_flops(network, token, cache=cache)
    spec = model(GQA)
    operators = step_operators(spec, Step(batch, 1, context))
    layers = sum(counts[f"model.layers.{i}"] for i in range(2))
    assert layers + counts["lm_head"] == total_flops(operators)


def test_expanded_latent_attention_costs_what_torch_counts():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        vocab_size=100,
        attn_implementation="eager",
    )
    network, batch, length = transformers.DeepseekV3ForCausalLM(config).eval(), 2, 7
    counts = counted_flops(network, torch.zeros(batch, length, dtype=torch.long), use_cache=False)
    spec = model(MLA, num_layers=1)
    layer = named(layer_operators(spec.layers[0], spec, Step(batch, length), Parallel()))
    whole = layer["attention"].flops * length**2 / visible_pairs(length, 0)
    projections = sum(layer[name].flops for name in ("q_a", "q_b", "kv_a", "kv_b", "o"))
    assert counts["model.layers.0.self_attn"] == projections + whole


def test_absorbed_latent_attention_costs_what_its_products_cost():
    """Decode in the latent, written out as the einsums that it is."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    batch, context, heads, latent, rope, nope, value = 2, 9, 4, 32, 8, 16, 16
    keys = context + 1
    with FlopCounterMode(display=False) as counter:
        q_nope_BHN = torch.randn(batch, heads, nope)
        up_k_HNL, up_v_HLV = torch.randn(heads, nope, latent), torch.randn(heads, latent, value)
        cache_BSC = torch.randn(batch, keys, latent + rope)
        q_HBL = torch.bmm(q_nope_BHN.transpose(0, 1), up_k_HNL)
        q_BHC = torch.cat([q_HBL.transpose(0, 1), torch.randn(batch, heads, rope)], -1)
        weights_BHS = torch.bmm(q_BHC, cache_BSC.transpose(1, 2)).softmax(-1)
        out_BHL = torch.bmm(weights_BHS, cache_BSC[..., :latent])
        torch.bmm(out_BHL.transpose(0, 1), up_v_HLV)
    spec = model(MLA, num_layers=1)
    layer = named(layer_operators(spec.layers[0], spec, Step(batch, 1, context), Parallel()))
    assert counter.get_total_flops() == layer["attention"].flops + layer["kv_b"].flops


def test_experts_cost_what_torch_counts():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        vocab_size=100,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    network, length = transformers.MixtralForCausalLM(config).eval(), 11
    counts = counted_flops(network, torch.zeros(1, length, dtype=torch.long), use_cache=False)
    experts = Experts(5, 2, 96, "silu", gated=True)
    spec = model(GQA, experts, num_layers=1)
    layer = named(layer_operators(spec.layers[0], spec, Step(1, length), Parallel()))
    routed = layer["experts.up"].flops + layer["experts.down"].flops
    assert counts["model.layers.0.mlp"] == routed + layer["router"].flops


@pytest.mark.parametrize(
    ("mixer", "per_element"),
    [
        (Mamba(2, d_inner=64, d_state=8, d_conv=4, num_heads=4, head_dim=16), 5),
        (Mamba(1, d_inner=64, d_state=8, d_conv=4, dt_rank=4), 6),
        (LinearAttention("gated_delta_net", 2, 4, 16, 16, d_conv=4), 7),
    ],
)
def test_a_scan_costs_its_recurrence_written_out(mixer, per_element):
    """Counts every multiply, add and exp of one token's update, element by element."""
    spec = model(mixer, num_layers=1)
    scan = named(layer_operators(spec.layers[0], spec, Step(3, 5), Parallel()))["scan"]
    if isinstance(mixer, LinearAttention):
        state = mixer.num_v_heads * mixer.k_head_dim * mixer.v_head_dim
        # decay·S; Σ k·S (multiply, add); S + k⊗δ (multiply, add); Σ q·S (multiply, add)
        operations = 1 + 2 + 2 + 2
    elif mixer.version == 2:
        state = mixer.num_heads * mixer.head_dim * mixer.d_state
        # decay·S; S + x⊗B (multiply, add); Σ C·S (multiply, add)
        operations = 1 + 2 + 2
    else:
        state = mixer.d_inner * mixer.d_state
        # exp(dt·A) per element besides
        operations = 1 + 1 + 2 + 2
    assert operations == per_element
    assert scan.flops == 3 * 5 * state * operations
    assert scan.cache_elements == 3 * state * 2


# --- experts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_experts", "top_k", "tokens"), [(8, 2, 1), (8, 2, 5), (64, 6, 32)])
def test_expected_experts_is_the_mean_of_random_draws(num_experts, top_k, tokens):
    draw = random.Random(0)  # noqa: S311
    trials = 4000
    touched = 0
    for _ in range(trials):
        hit: set[int] = set()
        for _ in range(tokens):
            hit.update(draw.sample(range(num_experts), top_k))
        touched += len(hit)
    assert expected_experts(num_experts, top_k, tokens) == pytest.approx(touched / trials, rel=0.01)


def test_one_token_touches_exactly_top_k_experts():
    assert expected_experts(128, 8, 1) == pytest.approx(8)


def test_expert_parallel_ranks_share_the_experts_and_the_tokens():
    experts = Experts(16, 4, 96, "silu", gated=True)
    spec, step = model(GQA, experts, num_layers=1), Step(32, 1, 100)
    one = named(step_operators(spec, step))["experts.up"]
    cut = named(step_operators(spec, step, Parallel(tensor=4)))["experts.up"]
    spread = named(step_operators(spec, step, Parallel(tensor=4, expert=True)))["experts.up"]
    assert cut.flops == spread.flops == one.flops / 4
    assert cut.weight_elements == pytest.approx(spread.weight_elements)


# --- the weights that a step reads are the checkpoint's matrices ---------------------------------

CONFIGS = Path(__file__).parents[3] / "shared" / "configs"
SHARED = sorted(p for p in CONFIGS.glob("*_config.json") if "hf_quant" not in p.name)
NOT_MULTIPLIED = {"embed", "position", "norm", "bias", "expert_bias", "scale", "hyper", "sinks",
                  "hash_table", "attn_bias_table", "per_layer"}  # fmt: skip


@pytest.mark.parametrize("path", SHARED or [None], ids=lambda p: p and p.name[:-12])
def test_a_large_batch_reads_every_matrix_of_the_checkpoint_once(path):
    """Two derivations that share nothing: operators from the mixers, tensors from the naming."""
    if path is None:
        pytest.skip(f"{CONFIGS} is not here")
    spec = load(path).anatomy.spec
    stored = sum(
        tensor.num_elements
        for tensor in expected_tensors(spec)
        if tensor.stack not in ("mtp", "tower")
        and tensor.role not in NOT_MULTIPLIED
        and len(tensor.shape) > 1
    )
    if spec.tie_embeddings:
        stored += spec.vocab_size * spec.hidden_size
    read = total_weight_elements(step_operators(spec, Step(1, 10**6)))
    # DeepSeek-V4 stores position biases of its compressors as matrices: 5e-6 of the whole.
    assert read == pytest.approx(stored, rel=1e-5)


# --- structure -----------------------------------------------------------------------------------


def test_tensor_ranks_divide_the_work_and_copy_scarce_kv_heads():
    spec, step = model(GQA), Step(1, 8)
    whole, eighth = (named(step_operators(spec, step, Parallel(tensor=t))) for t in (1, 8))
    assert eighth["q"].flops == whole["q"].flops / 8
    # Two KV heads on eight ranks: each rank holds one whole head.
    assert eighth["kv"].flops == whole["kv"].flops / 2
    assert eighth["all_reduce.mlp"].link_elements == 8 * spec.hidden_size
    assert not [o for o in whole.values() if o.kind == "link"]


def test_shared_kv_is_neither_projected_nor_written():
    shared = replace(GQA, kv_shared_from=0)
    step = Step(2, 1, 50)
    own, borrowed = (named(step_operators(model(m), step)) for m in (GQA, shared))
    assert "kv" not in borrowed
    written = 2 * GQA.num_kv_heads * 32
    assert own["attention"].cache_elements - borrowed["attention"].cache_elements == written


def test_a_sparse_indexer_bounds_attention_but_not_itself():
    sparse = replace(MLA, indexer=Indexer(num_heads=2, head_dim=8, topk=16))
    step = Step(1, 1, 999)
    operators = named(step_operators(model(sparse), step))
    latent = MLA.kv_lora_rank + MLA.qk_rope_head_dim
    assert operators["attention"].cache_elements == (16 + 1) * latent
    assert operators["indexer.scores"].flops == 2 * 1000 * 2 * 8
    shared = replace(sparse, indexer=replace(sparse.indexer, shared=True))
    assert "indexer.scores" not in named(step_operators(model(shared), step))


def test_equal_layers_are_counted_not_repeated():
    deep, shallow = (step_operators(model(GQA, num_layers=n), Step(1, 4)) for n in (10, 1))
    assert len(deep) == len(shallow)
    head = named(shallow)["lm_head"].weight_elements
    per_layer = total_weight_elements(shallow) - head
    assert total_weight_elements(deep) - head == 10 * per_layer


@pytest.mark.parametrize("step", [Step(0, 1), Step(1, 0), Step(1, 1, -1)])
def test_a_step_of_nothing_is_refused(step):
    with pytest.raises(BadUsage):
        step_operators(model(GQA), step)

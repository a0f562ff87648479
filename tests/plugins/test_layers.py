"""Where keys and values lie in vLLM's caches: orders that a kernel tells, halves, latent form."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ullage_vllm import layers
from ullage_vllm.layers import Unreadable, fetches, layers_of
from ullage_vllm.sampling import Probe

from tests.plugins.vllm_worker import Attention, Dispatcher, Metadata, entropy

BLOCK, DIM, HEADS = 32, 24, 2
ORDERS = {
    "as they are": (torch.arange(BLOCK * DIM), torch.arange(BLOCK * DIM)),
    "keys turned": (
        torch.arange(BLOCK * DIM).view(DIM, BLOCK).t().reshape(-1),
        torch.arange(BLOCK * DIM),
    ),
    "packed somehow": (
        torch.randperm(BLOCK * DIM, generator=torch.Generator().manual_seed(1)),
        torch.randperm(BLOCK * DIM, generator=torch.Generator().manual_seed(2)),
    ),
}
"""Where number [position, dim] of a block goes, of keys and of values."""


class Kernel:
    """cpu_attn_reshape_and_cache with these orders; `lossy` leaves the last number out."""

    def __init__(self, orders: tuple[torch.Tensor, torch.Tensor], lossy: bool = False) -> None:
        self.orders, self.lossy = orders, lossy

    def cpu_attn_reshape_and_cache(
        self, key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, isa: str,
        k_scale: float, v_scale: float, kv_cache_dtype: str,
    ) -> None:  # fmt: skip
        assert (isa, k_scale, v_scale, kv_cache_dtype) == ("amx", 1.0, 1.0, "auto")
        size, dim = key_cache.shape[2:]
        for given, cache, order in (
            (key, key_cache, self.orders[0]),
            (value, value_cache, self.orders[1]),
        ):
            for token, slot in enumerate(slot_mapping.tolist()):
                places = order.view(size, dim)[slot % size]
                for head in range(given.shape[1]):
                    inside = cache[slot // size, head].view(-1)
                    inside[places] = given[token, head]
                    if self.lossy:
                        inside[-1] = 0


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel(ORDERS[request.param])
    package = SimpleNamespace(_custom_ops=made)
    monkeypatch.setitem(sys.modules, "vllm", package)
    return made


@pytest.mark.parametrize("kernel", ORDERS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cpus_cache_is_read_in_whatever_order_its_kernel_writes(
    kernel: Kernel, dtype: torch.dtype
) -> None:
    layer: Any = Attention(backend="CPU_ATTN")
    layer.num_heads = layer.num_kv_heads = HEADS
    layer.head_size = layer.head_size_v = DIM
    layer.isa = "amx"
    layer.kv_cache = torch.zeros(7, HEADS, BLOCK, 2 * DIM, dtype=dtype)
    draw = torch.Generator().manual_seed(3)
    key, value = (torch.randn(3 * BLOCK, HEADS, DIM, generator=draw).to(dtype) for _ in range(2))
    table = torch.tensor([5, 2, 6, 0], dtype=torch.int32)
    slots = torch.cat([torch.arange(BLOCK) + int(block) * BLOCK for block in table[:3]])
    parts = layer.kv_cache.view(7, HEADS, 2 * BLOCK, DIM).chunk(2, dim=2)
    kernel.cpu_attn_reshape_and_cache(key, value, *parts, slots, "amx", 1.0, 1.0, "auto")
    runner = SimpleNamespace(
        model=SimpleNamespace(modules=lambda: [layer]),
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={"l.4.attn": layer})
        ),
    )
    (found,), refused = layers_of(runner)
    assert refused == []
    keys, values = fetches(found, layer.kv_cache, table)
    for start, stop in ((0, 3 * BLOCK), (5, 6), (31, 70), (64, 96)):
        whole = torch.cat(list(keys.pieces(start, stop)), -1)
        assert whole.equal(key[start:stop].permute(1, 2, 0).float())
        assert values(start, stop).equal(value[start:stop].transpose(0, 1).float())


@pytest.mark.parametrize("kernel", ["as they are"], indirect=True)
def test_a_kernel_that_leaves_numbers_out_is_not_read(kernel: Kernel) -> None:
    kernel.lossy = True
    with pytest.raises(Unreadable, match="leaves out numbers"):
        layers.cpu_orders("amx", torch.float32, BLOCK, DIM)


# --- latent attention ---

RANK, ROPE, SCALE = 16, 8, 0.2


class MLAAttention:
    def __init__(self) -> None:
        self.num_heads, self.kv_lora_rank, self.qk_rope_head_dim = 4, RANK, ROPE
        self.kv_cache = torch.randn(8, 16, RANK + ROPE, generator=torch.Generator().manual_seed(4))
        self.impl = SimpleNamespace(
            scale=SCALE, is_sparse=False, dcp_world_size=1, forward_mqa=self.forward_mqa
        )
        self.rope_counts = True

    def keys(self, metadata: Any, number: int) -> torch.Tensor:
        length = int(metadata.decode.seq_lens[number])
        flat = self.kv_cache[metadata.decode.block_table[number].long()].reshape(-1, RANK + ROPE)
        return flat[:length]

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, None]:
        query, out = torch.cat(q, -1), []
        for number, q_HD in enumerate(query):
            keys = self.keys(attn_metadata, number)
            used = keys if self.rope_counts else keys[:, :RANK]
            weights = torch.softmax(q_HD[:, : used.shape[1]] @ used.T * SCALE, -1)
            out.append(weights @ keys[:, :RANK])
        return torch.stack(out), None


@pytest.mark.parametrize("rope_counts", [True, False])
def test_latent_attention_is_one_kv_head_of_rank_and_rope(rope_counts: bool) -> None:
    """Of decode rows; where vLLM computes anything else it is refused as any layer is."""
    layer = MLAAttention()
    layer.rope_counts = rope_counts
    q = (torch.randn(2, 4, RANK), torch.randn(2, 4, ROPE))
    tables = torch.tensor([[3, 1, 0], [2, 5, 6]])
    decode = SimpleNamespace(seq_lens=torch.tensor([20, 45]), block_table=tables)
    metadata: Any = Metadata(torch.tensor([0, 1, 2]), torch.empty(0), torch.empty(0))
    metadata.decode = decode
    runner = SimpleNamespace(
        model=SimpleNamespace(modules=lambda: [layer]),
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={"l.0.attn": layer})
        ),
        model_config=SimpleNamespace(dtype=torch.float32),
        input_batch=SimpleNamespace(req_ids=["a", "b"]),
        cudagraph_dispatcher=Dispatcher(),
    )
    runner.execute_model = lambda _: layer.impl.forward_mqa(q, layer.kv_cache, metadata, layer)
    probe = Probe(SimpleNamespace(model_runner=runner), 1)
    scheduled = SimpleNamespace(
        num_scheduled_tokens={"a": 1, "b": 1}, scheduled_spec_decode_tokens={}
    )
    for _ in range(2):
        runner.execute_model(scheduled)
    if not rope_counts:
        assert "vLLM's output is" in probe.refused[0]
        return
    assert (probe.counts.sampled, probe.counts.missed, probe.refused) == (2, 0, [])
    query = torch.cat(q, -1)
    (told,) = probe.memory.report(0)
    for head in told["heads"]:
        both = [
            entropy(query[number, head["head"]], layer.keys(metadata, number), SCALE)
            for number in (0, 1)
        ]
        assert head["entropy_nats"]["mean"] == pytest.approx(sum(both) / 2, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_cache": torch.zeros(8, 16, 24, dtype=torch.uint8)}, "quantised"),
        ({"kv_cache": torch.zeros(8, 16, 30)}, "a cache of shape"),
        ({"impl": SimpleNamespace(is_sparse=True, dcp_world_size=1)}, "sparse"),
        ({"impl": SimpleNamespace(dcp_world_size=2)}, "spread over ranks"),
    ],
)
def test_latent_attention_otherwise_than_it_was_read_is_refused(
    changes: dict[str, Any], says: str
) -> None:
    layer = MLAAttention()
    vars(layer).update(changes)
    runner = SimpleNamespace(
        model=SimpleNamespace(modules=lambda: [layer]),
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={"l.0.attn": layer})
        ),
    )
    assert says in layers_of(runner)[1][0]

"""Which of a vLLM model's attention layers can be read, and how keys and values lie in its cache.

Holds what was read of vLLM's layers and backends; what is not as it was read is refused by name.
The arithmetic is `entropy`, when something is read is `worker`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ullage_vllm.entropy import Fetch, Keys, Rule

QUANTISED = "its KV cache is quantised"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PIECE_BYTES = 384 << 10
"""Of keys that are copied at once: what a core's second cache holds."""
MASKS = ("mm_prefix_range", "mm_prefix_query_range_tensor", "rswa_prefix_lens", "dynamic_causal")
"""Of a step's metadata: where one is there, rows see something else than a rule says."""


class Unreadable(Exception):
    """Why a layer, or what a step gave to it, cannot be read."""


@dataclass(frozen=True)
class Cache:
    """From a layer's cache and block numbers to float32 keys [kv heads, dim, positions of those
    blocks] and values [kv heads, positions, dim]."""

    block_size: Callable[[torch.Tensor], int]
    keys: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    values: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """`method` of `owner` is what vLLM calls with queries, cache and metadata in every step."""

    name: str
    number: int
    heads: int
    owner: Any
    method: str
    rule: Rule
    cache: Cache


def layers_of(runner: Any) -> tuple[list[Layer], list[str]]:
    """The layers of the model that this worker runs, and what of it cannot be read, in words."""
    model = runner.get_model() if hasattr(runner, "get_model") else runner.model
    own = {id(module) for module in model.modules()}
    context = runner.vllm_config.compilation_config.static_forward_context
    found, refused = [], []
    for name, layer in context.items():
        if id(layer) not in own or not hasattr(layer, "impl"):
            continue  # a draft model's, or no attention: Mamba, experts
        try:
            found.append(_layer(name, layer))
        except Unreadable as reason:
            refused.append(f"{name}: {reason}")
    return sorted(found, key=lambda one: one.number), refused


def _layer(name: str, layer: Any) -> Layer:
    kind = type(layer).__name__
    numbers = re.findall(r"\.(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise Unreadable("its name says no one layer number")
    make = {"Attention": _attention, "MLAAttention": _latent}.get(kind)
    if make is None:
        raise Unreadable(f"{kind} has a mask of its own")
    if getattr(layer.impl, "dcp_world_size", 1) > 1 or getattr(layer.impl, "pcp_world_size", 1) > 1:
        raise Unreadable("its keys are spread over ranks")
    return make(name, int(numbers[0]), layer)


# --- attention with keys and values ---


def _attention(name: str, number: int, layer: Any) -> Layer:
    backend = layer.attn_backend.get_name()
    make = CACHES.get(backend)
    if make is None:
        raise Unreadable(f"the cache of {backend} was not read")
    if str(getattr(layer.attn_type, "value", layer.attn_type)) != "decoder":
        raise Unreadable(f"it is no decoder's attention but {layer.attn_type}")
    if getattr(layer, "use_alibi_sqrt", False):
        raise Unreadable("the square root of ALiBi")
    if layer.kv_cache.dtype not in FLOATS:
        raise Unreadable(QUANTISED)
    shape, expected = tuple(layer.kv_cache.shape), layer.head_size + layer.head_size_v
    if len(shape) != 4 or shape[1] != layer.num_kv_heads or shape[3] != expected:
        raise Unreadable(f"a cache of shape {shape}, which was read as [blocks, heads, positions, "
                         f"keys and values]")  # fmt: skip
    _takes(layer.impl.forward, ("layer", "query", "key", "value", "kv_cache", "attn_metadata",
                                "output"))  # fmt: skip
    impl, device = layer.impl, layer.kv_cache.device
    slopes, sinks = getattr(impl, "alibi_slopes", None), getattr(impl, "sinks", None)
    rule = Rule(
        float(impl.scale),
        layer.sliding_window or None,
        getattr(impl, "logits_soft_cap", None) or None,
        None if slopes is None else torch.as_tensor(slopes, device=device).float(),
        None if sinks is None else sinks.detach().to(device).float(),
    )
    return Layer(name, number, layer.num_heads, impl, "forward", rule, make(layer))


def halves(layer: Any) -> Cache:
    """Keys beside values in the last dimension (FlashAttention, Triton). Not run on a GPU."""
    dim = layer.head_size
    return Cache(
        lambda cache: int(cache.shape[2]),
        lambda cache, blocks: _flat_keys(_blocks(cache[..., :dim], blocks).transpose(2, 3)),
        lambda cache, blocks: _flat_values(_blocks(cache[..., dim:], blocks)),
    )


def cpu(layer: Any) -> Cache:
    """All keys of a block, then all its values, in an order that depends on the machine: vLLM's
    own kernel is asked for it."""
    size, dim = int(layer.kv_cache.shape[2]), layer.head_size
    key_order, value_order = cpu_orders(layer.isa, layer.kv_cache.dtype, size, dim)

    def half(cache: torch.Tensor, blocks: torch.Tensor, which: int) -> torch.Tensor:
        parts = cache.view(cache.shape[0], cache.shape[1], 2, -1)
        return _blocks(parts[:, :, which], blocks)

    def keys(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        found = half(cache, blocks, 0)
        found = found if key_order is None else found[..., key_order]
        return _flat_keys(found.view(*found.shape[:2], dim, size))

    def values(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        found = half(cache, blocks, 1)
        found = found if value_order is None else found[..., value_order]
        return _flat_values(found.view(*found.shape[:2], size, dim))

    return Cache(lambda _: size, keys, values)


def cpu_orders(
    isa: str, dtype: torch.dtype, size: int, dim: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where the kernel puts each number of a block: of keys as [dim, position], of values as
    [position, dim]; None: in that order."""
    from vllm import _custom_ops as ops

    cache = torch.zeros(2, 1, 2 * size, dim, dtype=dtype)
    halves_of_it = cache.chunk(2, dim=2)
    numbers = torch.arange(size * dim).view(size, 1, dim)
    found = torch.zeros(2, size * dim, dtype=torch.int64)
    # In digits that every type holds exactly.
    for power in range(4):
        digit = (numbers // 64**power % 64).to(dtype).contiguous()
        ops.cpu_attn_reshape_and_cache(
            digit, digit, *halves_of_it, torch.arange(size, 2 * size), isa,
            k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto",
        )  # fmt: skip
        for which in (0, 1):
            found[which] += halves_of_it[which][1, 0].reshape(-1).long() * 64**power
    as_keys = numbers.view(size, dim).t().reshape(-1)
    orders = []
    for told, wanted in ((found[0], as_keys), (found[1], numbers.view(-1))):
        if not told.sort().values.equal(numbers.view(-1)):
            raise Unreadable(f"the kernel for {isa} leaves out numbers of a block")
        orders.append(None if told.equal(wanted) else told.argsort()[wanted])
    return orders[0], orders[1]


CACHES: dict[str, Callable[[Any], Cache]] = {
    "CPU_ATTN": cpu,
    "FLASH_ATTN": halves,
    "TRITON_ATTN": halves,
}
"""By vLLM's name of the backend. Whether a layer is read rightly is checked as it runs (`worker`),
so that a cache that lies otherwise is refused and not misread."""


# --- MLA in its latent form: one kv head of rank + rotary dimensions ---


def _latent(name: str, number: int, layer: Any) -> Layer:
    if layer.kv_cache.dtype not in FLOATS:
        raise Unreadable(QUANTISED)
    if getattr(layer.impl, "is_sparse", False):
        raise Unreadable("a sparse attention's keys are chosen for each row")
    rank, shape = layer.kv_lora_rank, tuple(layer.kv_cache.shape)
    if len(shape) != 3 or shape[2] != rank + layer.qk_rope_head_dim:
        raise Unreadable(f"a cache of shape {shape}, which was read as [blocks, positions, latent]")
    _takes(layer.impl.forward_mqa, ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"))
    cache = Cache(
        lambda cache: int(cache.shape[1]),
        lambda cache, blocks: _flat_keys(_blocks(cache, blocks)[:, None].transpose(2, 3)),
        lambda cache, blocks: _flat_values(_blocks(cache, blocks)[:, None, :, :rank]),
    )
    rule = Rule(float(layer.impl.scale))
    return Layer(name, number, layer.num_heads, layer.impl, "forward_mqa", rule, cache)


# --- both ---


def fetches(layer: Layer, cache: torch.Tensor, table: torch.Tensor) -> tuple[Keys, Fetch]:
    """Keys and values of one sequence by position; `table` are its blocks, in order."""
    size = layer.cache.block_size(cache)
    block_bytes = cache[0].numel() // 2 * 4
    at_once = max(PIECE_BYTES // block_bytes, 1) * size

    def blocks(start: int, stop: int) -> torch.Tensor:
        return table[start // size : (stop - 1) // size + 1]

    def keys(start: int, stop: int) -> torch.Tensor:
        first = start // size * size
        found = layer.cache.keys(cache, blocks(start, stop))
        return found[..., start - first : stop - first]

    def values(start: int, stop: int) -> torch.Tensor:
        first = start // size * size
        found = layer.cache.values(cache, blocks(start, stop))
        return found[:, start - first : stop - first]

    return Keys(keys, at_once), values


def _blocks(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    return cache.index_select(0, blocks)


def _flat_keys(found: torch.Tensor) -> torch.Tensor:
    """[blocks, kv heads, dim, positions] → [kv heads, dim, all positions], float32."""
    _, heads, dim, _ = found.shape
    return found.permute(1, 2, 0, 3).reshape(heads, dim, -1).float()


def _flat_values(found: torch.Tensor) -> torch.Tensor:
    """[blocks, kv heads, positions, dim] → [kv heads, all positions, dim], float32."""
    _, heads, _, dim = found.shape
    return found.transpose(0, 1).reshape(heads, -1, dim).float()


def _takes(method: Any, wanted: tuple[str, ...]) -> None:
    found = tuple(inspect.signature(method).parameters)
    if found[: len(wanted)] != wanted:
        raise Unreadable(f"{method.__name__} takes ({', '.join(found)})")

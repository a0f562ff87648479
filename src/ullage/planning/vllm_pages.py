"""vLLM 0.32's page of one layer: how many tokens or states it holds and how many bytes it takes.

Holds the pages of a ModelSpec's layers. How layers share a pool is `vllm_groups.py`; the block
size, dtypes and limits that go in come from `vllm_decisions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

from ullage.anatomy.distinct import mixer_parts
from ullage.anatomy.spec import (
    Attention,
    CompressedAttention,
    Indexer,
    LatentAttention,
    LayerSpec,
    LinearAttention,
    Mamba,
    Mixer,
    ModelSpec,
    ShortConv,
)
from ullage.costs.kv import kv_heads_per_rank, recurrent_dtype, state_elements
from ullage.costs.kv_formats import (
    attention_token_bytes,
    element_bytes,
    index_key_bytes,
    latent_token_bytes,
)

Kind = Literal["full", "mla", "window", "window_mla", "chunk", "state"]

PACKED_KEY_BYTES = 584
"""One fp8_ds_mla key of compressed attention: 448 + 64 × 2 + 8 scale bytes
(vllm/models/deepseek_v4/attention.py)."""


POOLING = {4: (2, 4), 128: (1, 8)}
"""Of each ratio of compressed attention that vLLM 0.32 knows: how often its windows overlap, and
tokens per block of its running sums (vllm/models/deepseek_v4/compressor.py)."""


@dataclass(frozen=True, slots=True)
class Page:
    """What one layer reserves per block.

    A page holds `block_size` tokens, `tokens_per_state` of them to each stored state of
    `state_bytes` bytes; a recurrent state fills one page whatever its block_size. `identity` is
    all that must agree for layers to share a group (heads, sizes, dtype, format). `padded_bytes`
    replaces the natural size. `stride_base` is the largest kernel block of a kernel with fixed
    sizes (0: any), which packed blocks must keep whole. `extra_states` counts the blocks that a
    cached prefill checkpoint adds to a state's own.
    """

    kind: Kind
    block_size: int
    state_bytes: int
    identity: tuple[object, ...]
    tokens_per_state: int = 1
    bound: int = 0
    padded_bytes: int = 0
    stride_base: int = 0
    extra_states: int = 0

    @property
    def natural_bytes(self) -> int:
        if self.kind == "state":
            return self.state_bytes
        return self.block_size // self.tokens_per_state * self.state_bytes

    @property
    def page_bytes(self) -> int:
        return self.padded_bytes or self.natural_bytes

    @property
    def stride_alignment(self) -> int:
        """Bytes that the distance between blocks must divide into (kv_cache_interface.py)."""
        if not self.stride_base:
            return 1
        kernel_block = gcd(self.stride_base, self.block_size)
        if kernel_block == self.block_size:
            return 1
        return replace(self, block_size=kernel_block).page_bytes

    def blocks_per_request(self, max_model_len: int, in_flight: int, *, aligned: bool) -> int:
        """Blocks that vLLM keeps for one request of max_model_len tokens.

        `in_flight` tokens are scheduled but not settled; `aligned` says whether states are cached
        at block ends (mamba_cache_mode align). From max_memory_usage_bytes of each cache spec in
        vllm/v1/kv_cache_interface.py.
        """
        match self.kind:
            case "full" | "mla":
                return -(-max_model_len // self.block_size)
            case "window" | "window_mla":
                tokens = min(self.bound - 1 + in_flight, max_model_len)
                return -(-tokens // self.block_size) + 1
            case "chunk":
                return -(-min(self.bound + in_flight, max_model_len) // self.block_size)
            case "state":
                return 2 + self.extra_states if aligned else 1


@dataclass(frozen=True, slots=True)
class PageRules:
    """What the engine has decided that shapes pages; see `vllm_blocks.py`.

    `kernel_block` is the granularity of the attention kernel's blocks in tokens, and
    `latent_stride_base` the same where it takes that size only (0: multiples too).
    `state_block_size` and `state_padded_bytes` (0: natural) are what hybrids come to.
    """

    tensor: int
    dtype: str
    kv_cache_dtype: str
    block_size: int
    kernel_block: int
    latent_stride_base: int = 0
    state_block_size: int = 0
    state_padded_bytes: int = 0


def layer_pages(layer: LayerSpec, rules: PageRules) -> tuple[Page, ...]:
    """The pages that one layer registers, in vLLM's order; empty when it caches nothing."""
    mixers = mixer_parts(layer.mixer)
    return tuple(page for mixer in mixers for page in _mixer_pages(mixer, rules))


def stack_pages(spec: ModelSpec, rules: PageRules) -> tuple[tuple[Page, ...], ...]:
    """`layer_pages` of every layer of the generating stack, equal mixers computed once."""
    memo: dict[Mixer, tuple[Page, ...]] = {}
    pages = []
    for layer in spec.layers:
        if layer.mixer not in memo:
            memo[layer.mixer] = layer_pages(layer, rules)
        pages.append(memo[layer.mixer])
    return tuple(pages)


def _mixer_pages(mixer: Mixer, rules: PageRules) -> tuple[Page, ...]:
    match mixer:
        case Attention():
            return _attention_pages(mixer, rules)
        case LatentAttention():
            latent = Page(
                "mla",
                rules.block_size,
                latent_token_bytes(mixer, rules.kv_cache_dtype, rules.dtype),
                (
                    "latent",
                    mixer.kv_lora_rank + mixer.qk_rope_head_dim,
                    rules.kv_cache_dtype,
                    mixer.indexer is not None and not mixer.indexer.shared,
                ),
                stride_base=rules.latent_stride_base,
            )
            # vLLM registers the indexer's cache before the latent's: it is built first.
            return (*_index_pages(mixer.indexer, rules, quantized=True), latent)
        case CompressedAttention():
            return _compressed_pages(mixer, rules)
        case Mamba() | LinearAttention() | ShortConv():
            return (_state_page(mixer, rules),)
        case _:
            return ()


def _attention_pages(mixer: Attention, rules: PageRules) -> tuple[Page, ...]:
    # Sharers read an earlier layer's cache; bidirectional layers keep none.
    if mixer.kv_shared_from is not None or not mixer.causal:
        return ()
    heads = kv_heads_per_rank(mixer.num_kv_heads, rules.tensor)
    shape = (heads, mixer.head_dim, mixer.v_head_dim, rules.kv_cache_dtype)
    size = attention_token_bytes(
        heads, mixer.head_dim, mixer.v_head_dim, rules.kv_cache_dtype, rules.dtype
    )
    if mixer.window:
        # A window layer takes the largest multiple of the kernel's block that is not above the
        # block size (model_executor/layers/attention/attention.py, _largest_kernel_block_within).
        kernel = rules.kernel_block
        block = max(kernel, rules.block_size // kernel * kernel)
        return (Page("window", block, size, shape, bound=mixer.window),)
    if mixer.chunk:
        return (Page("chunk", rules.block_size, size, shape, bound=mixer.chunk),)
    full = Page("full", rules.block_size, size, shape)
    return (full, *_index_pages(mixer.sparse_index, rules, quantized=False))


def _index_pages(indexer: Indexer | None, rules: PageRules, *, quantized: bool) -> tuple[Page, ...]:
    if indexer is None or indexer.shared:
        return ()
    size = index_key_bytes(indexer, quantized=quantized)
    return (Page("mla", rules.block_size, size, ("index", size), stride_base=rules.kernel_block),)


def _compressed_pages(mixer: CompressedAttention, rules: PageRules) -> tuple[Page, ...]:
    """The caches of one compressed-attention layer (vllm/models/deepseek_v4).

    A window of raw keys in 64-token pages; above ratio 1 the pooled keys and the running sums of
    the pooling (float32, twice head_dim, doubled at the overlapping fine ratio), and for the
    indexer the same again. With fp8_ds_mla pages are padded to 576 bytes, else to 512.
    """
    packed = rules.kv_cache_dtype == "fp8_ds_mla"
    align = 576 if packed else 512
    key = (
        PACKED_KEY_BYTES
        if packed
        else mixer.head_dim * element_bytes(rules.kv_cache_dtype, rules.dtype)
    )
    window = Page("window_mla", 64, key, ("key", key), bound=mixer.window, stride_base=64)
    pages = [window]
    if mixer.ratio > 1:
        overlap, block = POOLING.get(mixer.ratio, (1, 8))
        pages.append(_pooled_page(key, mixer.ratio, rules.block_size))
        pages.append(_sums_page(2 * overlap * mixer.head_dim * 4, overlap * mixer.ratio, block))
        if mixer.indexer is not None and not mixer.indexer.shared:
            index = index_key_bytes(mixer.indexer, quantized=True)
            pages.append(_pooled_page(index, mixer.ratio, rules.block_size))
            sums = 2 * overlap * mixer.indexer.head_dim * 4
            pages.append(_sums_page(sums, overlap * mixer.ratio, block))
    return tuple(replace(p, padded_bytes=round_up(p.natural_bytes, align)) for p in pages)


def _pooled_page(state_bytes: int, ratio: int, block_size: int) -> Page:
    return Page("mla", block_size, state_bytes, ("pooled", state_bytes), ratio, stride_base=256)


def _sums_page(state_bytes: int, window: int, block_size: int) -> Page:
    return Page("window_mla", block_size, state_bytes, ("sums", state_bytes), bound=window)


def state_page_bytes(mixer: Mamba | LinearAttention | ShortConv, tensor: int, dtype: str) -> int:
    """Bytes of the convolution and recurrent state of one sequence in one layer on one rank."""
    conv, recurrent = state_elements(mixer, tensor)
    size = conv * element_bytes("auto", dtype)
    return size + recurrent * element_bytes("auto", recurrent_dtype(mixer, dtype))


def _state_page(mixer: Mamba | LinearAttention | ShortConv, rules: PageRules) -> Page:
    # Only the Mamba-2 mixer exports a checkpoint from inside a prefill, which costs one more block
    # (model_executor/layers/mamba/mamba_mixer2.py).
    checkpoint = 1 if isinstance(mixer, Mamba) and mixer.version == 2 else 0
    size = state_page_bytes(mixer, rules.tensor, rules.dtype)
    return Page(
        "state",
        rules.state_block_size,
        size,
        ("state", mixer, rules.dtype),
        padded_bytes=rules.state_padded_bytes,
        extra_states=checkpoint,
    )


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple

"""How many bytes the KV of one token takes in each format that a cache can be kept in.

Holds formats by vLLM's names, scales included. What layers a model has is `kv.py`'s business.
"""

from __future__ import annotations

from ullage.anatomy.spec import Indexer, LatentAttention
from ullage.errors import BadUsage

ELEMENT_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "fp8_ds_mla": 1,
    "int8": 1,
    "int8_per_token_head": 1,
    "fp8_per_token_head": 1,
}
"""Bytes of one cached element, scales apart, by vLLM's and PyTorch's names."""

PER_TOKEN_HEAD = ("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head")
"""Formats that keep one float32 scale for K and one for V beside every token and head."""

NVFP4 = ("nvfp4", "nvfp4_4over6")
"""Packed 4-bit values with one 8-bit scale per 16 of them (utils/torch_utils.py)."""

DS_MLA_TOKEN_BYTES = 656
"""DeepSeek's fp8 latent of one token: 512 × 1 + 4 scales × 4 + 64 rotary × 2 (FlashMLA)."""

KNOWN_FORMATS = tuple(sorted({*ELEMENT_BYTES, *PER_TOKEN_HEAD, *NVFP4, "nvfp4_ds_mla"}))

INDEX_SCALE_GROUP = 128
"""Indexer keys are kept in 8 bits with one float32 scale per 128 elements (DeepSeek-V3.2's
reference code and vLLM 0.32's model_executor/models/deepseek_v2.py alike)."""


def element_bytes(kv_cache_dtype: str, dtype: str) -> int:
    """Bytes of one cached element; `auto` means the model's own dtype. Raises BadUsage."""
    name = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    size = ELEMENT_BYTES.get(name)
    if size is None:
        raise BadUsage(
            f"the size of a KV element of dtype {name[:40]!r} is not known",
            field="--kv-cache-dtype",
            expected=f"auto, or one of {', '.join(KNOWN_FORMATS)}",
        )
    return size


def index_key_bytes(indexer: Indexer, *, quantized: bool) -> int:
    """One cached index key. `quantized`: 8 bits with float32 scales, else two bytes an element."""
    if indexer.kept is not None:
        return 2 * indexer.kept
    if quantized:
        return indexer.head_dim + indexer.head_dim // INDEX_SCALE_GROUP * 4
    return 2 * indexer.head_dim


def attention_token_bytes(
    num_kv_heads: int, head_dim: int, v_head_dim: int, kv_cache_dtype: str, dtype: str
) -> int:
    """K and V of one token on one rank, scales included. Raises BadUsage for unknown formats."""
    if kv_cache_dtype in PER_TOKEN_HEAD:
        packed = 2 if kv_cache_dtype.startswith("int4") else 1
        return num_kv_heads * (head_dim // packed + v_head_dim // packed + 8)
    if kv_cache_dtype in NVFP4:
        return num_kv_heads * sum(d // 2 + d // 16 for d in (head_dim, v_head_dim))
    return num_kv_heads * (head_dim + v_head_dim) * element_bytes(kv_cache_dtype, dtype)


def latent_token_bytes(mixer: LatentAttention, kv_cache_dtype: str, dtype: str) -> int:
    """The latent and rotary key of one token; the same on every tensor-parallel rank."""
    elements = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    if kv_cache_dtype == "fp8_ds_mla":
        return DS_MLA_TOKEN_BYTES
    if kv_cache_dtype == "nvfp4_ds_mla":
        return 352
    if kv_cache_dtype in PER_TOKEN_HEAD:
        return (elements // 2 if kv_cache_dtype.startswith("int4") else elements) + 8
    if kv_cache_dtype in NVFP4:
        raise BadUsage(
            "nvfp4 is refused for latent attention by vLLM 0.32",
            field="--kv-cache-dtype",
            expected="auto, fp8 or fp8_ds_mla",
        )
    return elements * element_bytes(kv_cache_dtype, dtype)

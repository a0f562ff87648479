"""How many tokens vLLM 0.32 puts in a block, on CUDA and CPU, and what its kernels cannot take.

Holds the block size with its growth in hybrids, as a pure function of what was decided before
(`vllm_decisions.py`). The pages that follow are `vllm_pages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage.anatomy.spec import LinearAttention
from ullage.costs.deployment import Deployment
from ullage.costs.kv import kv_heads_per_rank
from ullage.costs.kv_formats import attention_token_bytes, latent_token_bytes
from ullage.planning.vllm_kinds import Decision, Kinds
from ullage.planning.vllm_pages import POOLING, PageRules, state_page_bytes

DEFAULT_BLOCK_TOKENS = 16
"""config/cache.py, DEFAULT_BLOCK_SIZE."""
CPU_BLOCK_TOKENS = 128
"""platforms/cpu.py, check_and_update_config."""
LATENT_HYBRID_STEP = 128
"""Latent hybrids grow by this many tokens (platforms/interface.py, _align_hybrid_block_size)."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The blocks that the attention kernels take: multiples of `tokens`, or exactly that many.

    `fixed`: bigger blocks are cut into kernel blocks of that size. `only`: none other is taken.
    """

    tokens: int
    fixed: bool = False
    only: bool = False


@dataclass(frozen=True, slots=True)
class Blocks:
    """What was decided about blocks, why, and what vLLM refuses or does elsewhere otherwise."""

    rules: PageRules
    notes: tuple[Decision, ...]
    warnings: tuple[str, ...]
    refusals: tuple[str, ...]


def decide_blocks(
    kinds: Kinds,
    flags: Deployment,
    *,
    capability_major: int,
    dtype: str,
    kv_cache_dtype: str,
    max_model_len: int,
    aligned_states: bool,
) -> Blocks:
    """Block sizes of attention and states; `capability_major` of the GPU, 0 unknown or a CPU."""
    cpu = flags.platform == "cpu"
    kernel = attention_kernel(kinds, capability_major, kv_cache_dtype, cpu=cpu)
    if kinds.states and not kinds.hybrid and aligned_states:
        size = _lone_state_block(flags.block_size)
    else:
        size = _block_size(kernel, flags.block_size, cpu=cpu)
    notes = [size]
    block, padded = int(size.value or 0), 0
    if kinds.hybrid:
        grown, padded, state = _grow(kinds, block, kernel, flags, dtype, kv_cache_dtype)
        if grown > block:
            source = f"vLLM: an attention page holds a state of {state:,} bytes"
            notes.append(Decision("block_size", grown, source))
        block = grown
    state_block = 0
    if kinds.states:
        state_block = block if aligned_states else max_model_len
        mode = "align" if aligned_states else "none"
        source = "vLLM: align with prefix caching, none without"
        notes.append(Decision("mamba_cache_mode", mode, source))
    rules = PageRules(
        tensor=flags.parallel.tensor,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block,
        kernel_block=kernel.tokens,
        latent_stride_base=kernel.tokens if kernel.fixed else 0,
        state_block_size=state_block,
        state_padded_bytes=padded,
    )
    refusals = _missing_kernels(kinds, capability_major, cpu=cpu)
    if kernel.only and block != kernel.tokens:
        refusals.append(f"the attention kernel takes blocks of {kernel.tokens} only, not {block}")
    warnings = _cpu_warnings(kinds, kv_cache_dtype) if cpu else _cuda_warnings(kinds)
    if (
        cpu
        and kv_cache_dtype.startswith("fp8")
        and any(size % 32 == 16 for size in kinds.head_dims)
    ):
        refusals.append("vLLM has no 8-bit kernel for head sizes of 16, 48, … on a CPU")
    return Blocks(rules, tuple(notes), tuple(warnings), tuple(refusals))


def attention_kernel(
    kinds: Kinds, capability_major: int, kv_cache_dtype: str, *, cpu: bool
) -> Kernel:
    """The attention kernels' blocks: get_supported_kernel_block_sizes of vLLM's backends.

    In the order in which platforms/cuda.py prefers them: FlashAttention and Triton 16, FlashMLA
    and every sparse latent kernel 64, FlashInfer's latent kernel 32 (128 for odd head sizes),
    block-sparse GQA 128, compressed attention 256; the CPU's 32, its latent kernel 16 only.
    """
    if kinds.compressed is not None:
        return Kernel(256, fixed=True, only=cpu)
    if cpu:
        latent = kinds.latent is not None
        return Kernel(16 if latent else 32, fixed=latent, only=latent)
    if kinds.sparse_gqa:
        return Kernel(128, fixed=True)
    if kinds.sparse:
        return Kernel(64, fixed=True)
    eight_bits = kv_cache_dtype in ("fp8", "fp8_e4m3")
    if kinds.latent is None:
        # FlashAttention 4 reads 8-bit caches of head size 512 in pages of 64 on Hopper.
        wide = capability_major == 9 and eight_bits and max(kinds.head_dims, default=0) == 512
        return Kernel(64, fixed=True) if wide else Kernel(16)
    if capability_major == 10:
        return Kernel(32 if kinds.latent.qk_nope_head_dim in (64, 128, 192) else 128, fixed=True)
    if capability_major == 9 and eight_bits:
        return Kernel(64, fixed=True)
    return Kernel(16)


def _block_size(kernel: Kernel, asked: int | None, *, cpu: bool) -> Decision:
    if kernel.only:
        source = "vLLM: the only size of this platform's kernel, whatever is asked"
        return Decision("block_size", kernel.tokens, source)
    if asked is not None:
        return Decision("block_size", asked, "flag --block-size")
    if cpu:
        return Decision("block_size", CPU_BLOCK_TOKENS, "vLLM's default on a CPU")
    takes_default = DEFAULT_BLOCK_TOKENS % kernel.tokens == 0
    block = DEFAULT_BLOCK_TOKENS if takes_default else kernel.tokens
    return Decision("block_size", block, "vLLM's default, or the least that its kernels take")


def _lone_state_block(asked: int | None) -> Decision:
    """Blocks of cached states in a stack without attention. MambaModelConfig takes the block size
    for them before the platform chooses its own, and only the growth of hybrids revises it."""
    if asked is not None:
        return Decision("block_size", asked, "flag --block-size")
    source = "vLLM: its general default, whatever the platform, for states without attention"
    return Decision("block_size", DEFAULT_BLOCK_TOKENS, source)


def _grow(
    kinds: Kinds, block: int, kernel: Kernel, flags: Deployment, dtype: str, kv_cache_dtype: str
) -> tuple[int, int, int]:
    """(block size, padded bytes of a state page or 0, bytes of a state): a page of attention must
    hold a state, and the state's page is padded to it. Source: _align_hybrid_block_size."""
    tensor = flags.parallel.tensor
    state = max(state_page_bytes(mixer, tensor, dtype) for mixer in kinds.states)
    if kinds.latent is not None:
        token = latent_token_bytes(kinds.latent, kv_cache_dtype, dtype)
        step = max(kernel.tokens, block, LATENT_HYBRID_STEP)
    elif kinds.attention is not None:
        heads = kv_heads_per_rank(kinds.attention.num_kv_heads, tensor)
        sizes = (kinds.attention.head_dim, kinds.attention.v_head_dim)
        token = attention_token_bytes(heads, *sizes, kv_cache_dtype, dtype)
        step = max(kernel.tokens, block)
    else:
        return block, 0, state
    grown = step * -(-state // (step * token))
    grown = max(block, kernel.tokens * -(-grown // kernel.tokens))
    return grown, grown * token if grown * token != state else 0, state


def _missing_kernels(kinds: Kinds, capability_major: int, *, cpu: bool) -> list[str]:
    """Why vLLM has no attention kernel for this model on this platform, if it has none."""
    sparse = kinds.sparse or kinds.compressed is not None
    reasons = []
    if cpu and (kinds.sparse or kinds.sparse_gqa):
        reasons.append("vLLM has no kernel for sparse attention on a CPU")
    if cpu and kinds.compressed is not None:
        reasons.append("vLLM's compressed attention needs a CPU with AMX")
    if unknown := sorted(kinds.ratios - POOLING.keys()):
        reasons.append(f"vLLM 0.32 pools keys 4 or 128 to one, not {unknown[0]}")
    if not cpu and sparse and capability_major in (7, 8):
        reasons.append("vLLM's sparse latent kernels need a Hopper GPU or a newer one")
    return reasons


def _cpu_warnings(kinds: Kinds, kv_cache_dtype: str) -> list[str]:
    """What another CPU than the one this was verified on does otherwise (platforms/cpu.py)."""
    warnings = []
    if kinds.latent is not None:
        warnings.append(
            "on a CPU with AMX vLLM has another latent kernel: blocks of 128, prefix caching"
        )
    if kv_cache_dtype.startswith("fp8") and kinds.attends:
        warnings.append("on a CPU without AVX-512 or AMX vLLM has no kernel for an 8-bit cache")
    if kinds.states:
        warnings.append(
            "on a CPU with AVX512-BF16 vLLM keeps recurrent states in float32 whatever is asked"
        )
    return warnings


def _cuda_warnings(kinds: Kinds) -> list[str]:
    """What a CUDA kernel asks and a spec does not tell (vllm/models/kimi_k3/nvidia/kda.py)."""
    if any(isinstance(m, LinearAttention) and m.kind == "kda" for m in kinds.states):
        return [
            "with a bounded KDA gate vLLM keeps one state block more per request when prefixes "
            "are cached"
        ]
    return []

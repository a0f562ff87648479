"""What the engine can be told, with vLLM's names and defaults that suit a small machine.

Holds the options and the two numbers that follow from them and a spec: the length limit and the
number of KV blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ullage.engine.kv_formats import KV_FORMATS, KVFormat, KVShape
from ullage.engine.paging.layout import kv_layout
from ullage.engine.paging.tables import blocks_of_group
from ullage.engine.scheduling.scheduler import Limits
from ullage.errors import BadUsage

if TYPE_CHECKING:
    from ullage.anatomy.spec import ModelSpec

# 1 GiB: about 23,000 tokens of SmolLM2-135M in float32. Touched, and so paid for, only as used.
DEFAULT_KV_CACHE_MEMORY_BYTES = 1 << 30

# Options that name one of a few ways.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "scheduling": ("continuous", "static"),
    "scheduling_policy": ("fcfs", "priority"),
    "dtype": ("auto", "float32", "bfloat16"),
    "kv_cache_dtype": ("auto", *KV_FORMATS),
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`max_model_len` None: the model's own. `attention` and `quantization` name table rows.

    `max_loras` adapters may be loaded; all of them may run in one batch. `scheduling` is continuous
    or static, `scheduling_policy` fcfs or priority. `long_prefill_token_threshold` None: a quarter
    of the token budget; 0: no prompt is long (see scheduler.Limits). `enforce_eager`: never the
    compiled step (see `compiled`).
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int = DEFAULT_KV_CACHE_MEMORY_BYTES
    quantization: str = "none"
    attention: str = "auto"
    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16
    enable_prefix_caching: bool = True
    scheduling: str = "continuous"
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int | None = None
    max_long_partial_prefills: int = 1
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        """Raises BadUsage for sizes that are not positive or a budget that starves decodes."""
        sizes = (
            *("max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes"),
            *("max_loras", "max_lora_rank", "max_long_partial_prefills"),
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise BadUsage(str(getattr(self, name)), field=_flag(name), expected="at least 1")
        for name, known in CHOICES.items():
            if (found := getattr(self, name)) not in known:
                raise BadUsage(str(found), field=_flag(name), expected=" or ".join(known))
        if self.dtype == "bfloat16" and self.quantization != "none":
            raise BadUsage(
                f"bfloat16 with --quantization {self.quantization}, which computes in float32",
                field="--dtype",
                expected="float32 or auto (--kv-cache-dtype bfloat16 stands for itself)",
            )
        if (self.long_prefill_token_threshold or 0) < 0:
            raise BadUsage(
                str(self.long_prefill_token_threshold),
                field="--long-prefill-token-threshold",
                expected="0 (off) or more",
            )
        if (self.long_prefill_token_threshold or 0) > self.max_num_batched_tokens:
            raise BadUsage(
                f"{self.long_prefill_token_threshold} tokens, more than a step has",
                field="--long-prefill-token-threshold",
                expected=f"up to --max-num-batched-tokens {self.max_num_batched_tokens}, or 0",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise BadUsage(
                f"{self.max_num_batched_tokens} tokens for {self.max_num_seqs} sequences",
                field="--max-num-batched-tokens",
                expected="at least --max-num-seqs, one token for each decode",
            )

    @property
    def kv_format(self) -> KVFormat:
        """How keys and values are stored; auto: in the dtype of the computation."""
        if self.kv_cache_dtype != "auto":
            return KV_FORMATS[self.kv_cache_dtype]
        return KV_FORMATS["bfloat16" if self.dtype == "bfloat16" else "float32"]

    def resolve_max_model_len(self, spec: ModelSpec) -> int:
        """The limit on prompt and answer together.

        Raises BadUsage above the model's own, and where neither the model nor a flag names one.
        """
        asked, own = self.max_model_len, spec.max_positions
        if asked is None:
            if own <= 0:
                raise BadUsage(
                    "the configuration names no longest length",
                    field="--max-model-len",
                    expected="the most tokens of one request",
                )
            return own
        if asked < 1 or 0 < own < asked:
            most = f"1 to {own}, the model's own limit" if own > 0 else "at least 1"
            raise BadUsage(str(asked), field="--max-model-len", expected=most)
        return asked


def kv_blocks(
    shapes: Sequence[KVShape],
    windows: Sequence[int | None],
    options: EngineOptions,
    max_model_len: int,
) -> int:
    """Blocks that the KV memory holds; one holds block_size tokens of one group of layers.

    Raises BadUsage when one request of max_model_len would not fit: it could never finish.
    """
    layout = kv_layout(windows, shapes)
    by_slot = dict(zip(layout.slot_of, shapes, strict=True))
    stored = options.kv_format
    block_bytes = options.block_size * sum(s.bytes_per_token(stored) for s in by_slot.values())
    num_blocks = options.kv_cache_memory_bytes // block_bytes

    def most(num_tokens: int) -> int:
        """Blocks of one request, of windows only what they see and the chunk that runs."""
        return sum(
            blocks_of_group(
                num_tokens, group.window, options.max_num_batched_tokens, options.block_size
            )
            for group in layout.groups
        )

    needed = most(max_model_len)
    if num_blocks < needed:
        fits = bisect_right(range(1, max_model_len + 1), num_blocks, key=most)
        raise BadUsage(
            f"{options.kv_cache_memory_bytes} bytes hold {fits} tokens of KV",
            field="--kv-cache-memory-bytes",
            expected=(
                f"at least {needed * block_bytes} for one request of {max_model_len} tokens"
                + (f", or --max-model-len {fits}" if fits else "")
            ),
        )
    return num_blocks


def scheduler_limits(options: EngineOptions) -> Limits:
    """What the scheduler is told of the options."""
    threshold = options.long_prefill_token_threshold
    if threshold is None:
        threshold = max(options.max_num_batched_tokens // 4, 1)
    return Limits(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        threshold,
        options.max_long_partial_prefills,
        by_priority=options.scheduling_policy == "priority",
        static=options.scheduling == "static",
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

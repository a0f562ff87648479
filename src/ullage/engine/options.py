"""What the engine can be told, with vLLM's names and defaults that suit a small machine.

Holds the options and the two numbers that follow from them and a spec: the length limit and the
number of KV blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ullage.engine.layout import kv_layout
from ullage.errors import BadUsage

if TYPE_CHECKING:
    from ullage.anatomy.spec import ModelSpec

# 1 GiB: about 23,000 tokens of SmolLM2-135M in float32. Touched, and so paid for, only as used.
DEFAULT_KV_CACHE_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`max_model_len` None: the model's own. `attention` and `quantization` name table rows.

    `max_loras` adapters may be loaded; all of them may run in one batch.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int = DEFAULT_KV_CACHE_MEMORY_BYTES
    quantization: str = "none"
    attention: str = "gathered"
    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16

    def __post_init__(self) -> None:
        """Raises BadUsage for sizes that are not positive or a budget that starves decodes."""
        sizes = (
            *("max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes"),
            *("max_loras", "max_lora_rank"),
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise BadUsage(str(getattr(self, name)), field=_flag(name), expected="at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise BadUsage(
                f"{self.max_num_batched_tokens} tokens for {self.max_num_seqs} sequences",
                field="--max-num-batched-tokens",
                expected="at least --max-num-seqs, one token for each decode",
            )

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


class _Priced(Protocol):
    """Anything that knows what one token of it costs; compared by value."""

    @property
    def bytes_per_token(self) -> int: ...

    def __hash__(self) -> int: ...


def kv_blocks(
    shapes: Sequence[_Priced],
    windows: Sequence[int | None],
    options: EngineOptions,
    max_model_len: int,
) -> int:
    """Blocks that the KV memory holds; one holds block_size tokens of one group of layers.

    Raises BadUsage when one request of max_model_len would not fit: it could never finish.
    """
    layout = kv_layout(windows, shapes)
    by_slot = dict(zip(layout.slot_of, shapes, strict=True))
    block_bytes = options.block_size * sum(shape.bytes_per_token for shape in by_slot.values())
    num_blocks = options.kv_cache_memory_bytes // block_bytes
    needed = len(layout.groups) * -(-max_model_len // options.block_size)
    if num_blocks < needed:
        fits = num_blocks // len(layout.groups) * options.block_size
        raise BadUsage(
            f"{options.kv_cache_memory_bytes} bytes hold {fits} tokens of KV",
            field="--kv-cache-memory-bytes",
            expected=(
                f"at least {needed * block_bytes} for one request of {max_model_len} tokens"
                + (f", or --max-model-len {fits}" if fits else "")
            ),
        )
    return num_blocks


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

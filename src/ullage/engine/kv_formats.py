"""In what form keys and values are kept, as numbers: bits, scales, bytes of a token. No torch.

The names are vLLM's for `--kv-cache-dtype`; how numbers are coded is `codecs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ullage.errors import BadUsage

# Heads of four bits are turned on the stack (kernels.storing), which has room for so many numbers.
MOST_INT4_DIM = 512


@dataclass(frozen=True, slots=True)
class KVFormat:
    """`bits` of one number, and `scale_bytes` for each token and head beside its numbers."""

    name: str
    bits: int
    scale_bytes: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether a float32 comes back as it went in."""
        return self.bits == 32

    def width(self, head_dim: int) -> int:
        """Elements of storage for one head's numbers: two to a byte where they have four bits.

        Raises BadUsage for a head that does not fill its last byte, or is larger than any known.
        """
        if self.bits >= 8:
            return head_dim
        if head_dim % 2 or head_dim > MOST_INT4_DIM:
            raise BadUsage(
                f"{self.name} with heads of {head_dim} dimensions",
                field="--kv-cache-dtype",
                expected=f"an even head_dim of at most {MOST_INT4_DIM}",
            )
        return head_dim // 2

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of one key or one value of one head."""
        return self.width(head_dim) * max(self.bits // 8, 1) + self.scale_bytes


# Scales are bfloat16. "auto" is the dtype of the computation (options.kv_format).
KV_FORMATS: Mapping[str, KVFormat] = {
    known.name: known
    for known in (
        KVFormat("float32", 32),
        KVFormat("bfloat16", 16),
        KVFormat("int8_per_token_head", 8, 2),
        KVFormat("int4_per_token_head", 4, 2),
    )
}
FLOAT32 = KV_FORMATS["float32"]


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer stores per token: num_kv_heads × head_dim, once for K and once for V."""

    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, stored: KVFormat) -> int:
        """Scales included."""
        return 2 * self.num_kv_heads * stored.head_bytes(self.head_dim)

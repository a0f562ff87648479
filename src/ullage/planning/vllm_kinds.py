"""What vLLM's decisions ask of a model: its mechanisms, and settings that go by architecture.

Holds `Kinds`, the one look through the stack, and `Decision`, what a setting came to and why. The
decisions are `vllm_decisions.py` and `vllm_blocks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ullage.anatomy.distinct import distinct_mixers
from ullage.anatomy.spec import (
    Attention,
    CompressedAttention,
    LatentAttention,
    LinearAttention,
    Mamba,
    ModelSpec,
    Rope,
    ShortConv,
)

ARCHITECTURES = Path(__file__).with_name("vllm_architectures.txt")
"""What vLLM keys by the name of an architecture: data, so that no rule here names a model."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One setting as the engine resolves it, and why: a flag, the config, or a rule of vLLM's."""

    name: str
    value: str | int | float | bool | None
    source: str


@dataclass(frozen=True, slots=True)
class Kinds:
    """Which mechanisms a stack has, as far as vLLM's decisions ask."""

    attention: Attention | None
    latent: LatentAttention | None
    compressed: CompressedAttention | None
    states: tuple[Mamba | LinearAttention | ShortConv, ...]
    sparse: bool
    sparse_gqa: bool
    encoder: bool
    head_dims: frozenset[int]
    ratios: frozenset[int]

    @property
    def hybrid(self) -> bool:
        return bool(self.states) and self.attends

    @property
    def attends(self) -> bool:
        return bool(self.attention or self.latent or self.compressed)


def architecture_settings(architecture: str) -> dict[str, str] | None:
    """vLLM's settings for this architecture alone, mostly none; None when it is not registered."""
    for line in ARCHITECTURES.read_text(encoding="utf-8").splitlines():
        name, *settings = line.split()
        if name == architecture:
            return dict(setting.split("=") for setting in settings)
    return None


def kinds_of(spec: ModelSpec) -> Kinds:
    """Look through the stack once, each distinct mixer once."""
    mixers = distinct_mixers(spec.layers)
    attentions = [m for m in mixers if isinstance(m, Attention)]
    causal = [m for m in attentions if m.causal]
    latents = [m for m in mixers if isinstance(m, LatentAttention)]
    compressed = [m for m in mixers if isinstance(m, CompressedAttention)]
    return Kinds(
        attention=causal[0] if causal else None,
        latent=latents[0] if latents else None,
        compressed=compressed[0] if compressed else None,
        states=tuple(m for m in mixers if isinstance(m, Mamba | LinearAttention | ShortConv)),
        sparse=any(m.indexer is not None for m in latents),
        sparse_gqa=any(m.sparse_index is not None for m in causal),
        encoder=bool(attentions) and not causal,
        head_dims=frozenset(m.head_dim for m in causal),
        ratios=frozenset(m.ratio for m in compressed if m.ratio > 1),
    )


def ropes_of(spec: ModelSpec) -> tuple[Rope, ...]:
    """The distinct rotary embeddings of the stack, in the order of the layers."""
    ropes: dict[Rope, None] = {}
    for mixer in distinct_mixers(spec.layers):
        rope = getattr(mixer, "rope", None)
        if rope is not None:
            ropes[rope] = None
    return tuple(ropes)

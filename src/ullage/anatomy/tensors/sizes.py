"""The sizes that a family's own tensors are made of: of one layer, by name, and sums of them.

Holds arithmetic only. Which tensors a family has of its own is `naming/rows.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.anatomy.spec import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    LatentAttention,
    LayerSpec,
    LinearAttention,
    Mixer,
)


def size_of(text: str, sizes: Mapping[str, int]) -> int | None:
    """The number that `text` names: a size, or sums of products of sizes and numbers.

    A division (`a*b/c`) rounds down what stands before it. None when a size is not among `sizes`.
    """
    if text in sizes:
        return sizes[text]
    total = 0
    for term in text.split("+"):
        product = 1
        for factor in term.split("*"):
            name, *divisors = factor.split("/")
            parts = [_factor(n, sizes) for n in (name, *divisors)]
            known = [n for n in parts if n is not None]
            if len(known) < len(parts) or 0 in known[1:]:
                return None
            product *= known[0]
            for divisor in known[1:]:
                product //= divisor
        total += product
    return total


def _factor(text: str, sizes: Mapping[str, int]) -> int | None:
    """A number, a size, or the difference of two sizes (at least 0)."""
    if text.isdigit():
        return int(text)
    if text in sizes:
        return sizes[text]
    more, dash, less = text.partition("-")
    if not dash or more not in sizes or less not in sizes:
        return None
    return max(sizes[more] - sizes[less], 0)


def layer_sizes(layer: LayerSpec, *, first: bool) -> dict[str, int]:
    """Sizes of a layer's mixer and feed-forward; `first` is 1 in the first, `later` in others."""
    return {
        "first": 1 if first else 0,
        "later": 0 if first else 1,
        **_mixer_sizes(layer.mixer),
        **_feed_forward_sizes(layer.feed_forward),
    }


def _mixer_sizes(mixer: Mixer) -> dict[str, int]:
    match mixer:
        case Attention():
            windowed = mixer.window is not None
            return {
                "Q": mixer.num_heads * mixer.head_dim,
                "K": mixer.num_kv_heads * mixer.head_dim,
                "O": mixer.num_heads * mixer.v_head_dim,
                "heads": mixer.num_heads,
                "kv_heads": mixer.num_kv_heads,
                "D": mixer.head_dim,
                "half_v": mixer.num_kv_heads * mixer.v_head_dim // 2,
                "softmax": 1,
                "windowed": int(windowed),
                "unbounded": int(not windowed),
                "window": mixer.window or 0,
            }
        case LatentAttention():
            head = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
            return {
                "Q": mixer.num_heads * head,
                "O": mixer.num_heads * mixer.v_head_dim,
                "heads": mixer.num_heads,
                "D": head,
                "q_rank": mixer.q_lora_rank or 0,
                "indexed": int(mixer.indexer is not None and not mixer.indexer.shared),
            }
        case LinearAttention():
            return {
                "K": mixer.num_k_heads * mixer.k_head_dim,
                "O": mixer.num_v_heads * mixer.v_head_dim,
                "heads": mixer.num_v_heads,
                "D": mixer.v_head_dim,
            }
        case _:
            return {}


def _feed_forward_sizes(part: FeedForward) -> dict[str, int]:
    match part:
        case Dense():
            return {"I": part.intermediate}
        case Experts():
            return {
                "E": part.num_experts,
                "I": part.intermediate,
                "S": part.shared_intermediate,
                "latent": part.latent or 0,
            }
        case _:
            return {}

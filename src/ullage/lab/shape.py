"""The attention of a model as sizes: what the experiments on single operations run on.

Holds the reading of a spec only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ullage.anatomy import load
from ullage.anatomy.spec import Attention
from ullage.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention: query heads, KV heads, dimensions of a head and of the model."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def words(self) -> str:
        heads = f"{self.num_heads} query heads over {self.num_kv_heads} KV heads"
        return f"{heads} of {self.head_dim}, hidden size {self.hidden_size}"


def attention_shape(model: Path) -> AttentionShape:
    """The first attention layer's sizes. Raises UnsupportedModel where there is none."""
    spec = load(model).anatomy.spec
    mixer = next((m for layer in spec.layers if isinstance(m := layer.mixer, Attention)), None)
    if mixer is None:
        raise UnsupportedModel("no layer of plain attention", file=model, field="layers")
    return AttentionShape(
        len(spec.layers), spec.hidden_size, mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    )

"""The distinct mixers of a stack: what per-layer rules and costs look at once instead of often.

Holds that one walk; what a mixer is stands in `spec.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ullage.anatomy.spec import LayerSpec, Mixer, Parallel


def mixer_parts(mixer: Mixer) -> tuple[Mixer, ...]:
    """The mixers that work side by side in one layer; one by itself where nothing is parallel."""
    return mixer.parts if isinstance(mixer, Parallel) else (mixer,)


def distinct_mixers(layers: Iterable[LayerSpec]) -> tuple[Mixer, ...]:
    """Each distinct mixer once, parallel parts apart, in the order of the layers."""
    wholes = dict.fromkeys(layer.mixer for layer in layers)
    return tuple(dict.fromkeys(part for whole in wholes for part in mixer_parts(whole)))

"""Which parallel sizes an engine accepts for a model, and which are chosen when none are named.

Pure functions of a ModelSpec. The rules are vLLM 0.32's; what a size costs is `costs/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ullage.anatomy.distinct import distinct_mixers
from ullage.anatomy.spec import (
    Attention,
    CompressedAttention,
    Dense,
    Experts,
    LatentAttention,
    LinearAttention,
    Mamba,
    Mixer,
    ModelSpec,
    ShortConv,
)
from ullage.costs.deployment import Deployment, Parallel

VOCABULARY_PADDING = 64
"""vLLM pads the vocabulary to a multiple (model_executor/layers/vocab_parallel_embedding.py)."""


def refused_sizes(spec: ModelSpec, parallel: Parallel) -> tuple[str, ...]:
    """Why vLLM 0.32 does not start with these sizes: whole sentences' middles, empty when it does.

    Sources: config/model.py (verify_with_parallel_config), model_executor/layers/linear.py
    (divide), vocab_parallel_embedding.py, mamba/mamba_mixer2.py, distributed/utils.py.
    """
    reasons: dict[str, None] = {}
    layers = (*spec.layers, *spec.encoder_layers)
    crossing = (x.cross_attention for x in layers if x.cross_attention is not None)
    for mixer in dict.fromkeys((*distinct_mixers(layers), *crossing)):
        reasons.update(dict.fromkeys(_mixer_reasons(mixer, parallel.tensor)))
    for name, width, ranks in _widths(spec, parallel):
        if width % ranks:
            reasons[f"{width:,} {name} columns do not divide by {ranks}"] = None
    padded = -(-spec.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING
    if padded % parallel.tensor:
        reasons[f"{padded:,} padded vocabulary rows do not divide by {parallel.tensor}"] = None
    num_layers = len(spec.layers)
    if parallel.pipeline > num_layers:
        reasons[f"{num_layers} layers do not fill {parallel.pipeline} pipeline stages"] = None
    if parallel.expert and not any(isinstance(x.feed_forward, Experts) for x in spec.layers):
        reasons["the model has no experts to spread"] = None
    return tuple(reasons)


def accepted_tensor_sizes(spec: ModelSpec, parallel: Parallel, most: int = 64) -> tuple[int, ...]:
    """The tensor-parallel sizes up to `most` that vLLM accepts, the other sizes as they are."""
    return tuple(
        t for t in range(1, most + 1) if not refused_sizes(spec, replace(parallel, tensor=t))
    )


def spread(spec: ModelSpec, deployment: Deployment, num_devices: int) -> tuple[Deployment, str]:
    """The deployment over all of `num_devices`, and the choice in words.

    Every device as one tensor-parallel rank where the model allows it; otherwise the largest
    tensor size that divides the devices, as data-parallel replicas.
    """
    base = deployment.parallel
    for tensor in range(num_devices, 0, -1):
        sizes = replace(base, tensor=tensor, data=num_devices // tensor)
        if num_devices % tensor or refused_sizes(spec, sizes):
            continue
        words = f"{num_devices} devices and no sizes named: tensor_parallel_size {tensor}"
        if sizes.data > 1:
            words += f" (the largest that the model allows), data_parallel_size {sizes.data}"
        return replace(deployment, parallel=sizes), words
    return deployment, "no tensor-parallel size is accepted for this model"


def _mixer_reasons(mixer: Mixer, tensor: int) -> Iterator[str]:
    match mixer:
        case Attention(num_heads=heads, num_kv_heads=kv_heads):
            if heads % tensor:
                yield f"{heads} attention heads do not divide by {tensor}"
            if kv_heads % tensor and tensor % kv_heads:
                yield f"{kv_heads} KV heads neither divide by {tensor} nor divide it"
        case LatentAttention(num_heads=heads) | CompressedAttention(num_heads=heads):
            if heads % tensor:
                yield f"{heads} attention heads do not divide by {tensor}"
        case Mamba(version=2, num_heads=heads, n_groups=groups):
            if heads % tensor:
                yield f"{heads} state-space heads do not divide by {tensor}"
            if groups % tensor and groups != 1:
                yield f"{groups} state-space groups do not divide by {tensor}"
        case Mamba(d_inner=inner):
            if inner % tensor:
                yield f"{inner:,} state-space channels do not divide by {tensor}"
        case LinearAttention(num_k_heads=k_heads, num_v_heads=v_heads):
            for name, heads in (("key", k_heads), ("value", v_heads)):
                if heads % tensor:
                    yield f"{heads} linear-attention {name} heads do not divide by {tensor}"
        case ShortConv(channels=channels):
            if channels % tensor:
                yield f"{channels:,} convolution channels do not divide by {tensor}"
        case _:
            return


def _widths(spec: ModelSpec, parallel: Parallel) -> set[tuple[str, int, int]]:
    """(what, columns, ranks) of the feed-forward widths that are cut, and by how many ranks.

    Experts that stay whole are dealt out; otherwise the ranks of all data-parallel replicas cut
    each of them (model_executor/layers/fused_moe/config.py).
    """
    tensor = parallel.tensor
    widths = set()
    for layer in (*spec.layers, *spec.encoder_layers):
        for part in (layer.feed_forward, layer.parallel_dense):
            if isinstance(part, Dense):
                widths.add(("feed-forward", part.intermediate, tensor))
            elif isinstance(part, Experts):
                widths.add(("shared expert", part.shared_intermediate, tensor))
                if not parallel.expert:
                    widths.add(("expert", part.intermediate, tensor * parallel.data))
    return widths

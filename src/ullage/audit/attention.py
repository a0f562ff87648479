"""Rules about attention: head sizes, grouping, kernels, windows.

Holds rules that need the spec and the platform; sizes per rank are `parallelism.py`.
"""

from __future__ import annotations

from ullage.anatomy.spec import (
    Attention,
    CompressedAttention,
    LatentAttention,
    Mixer,
    Parallel,
)
from ullage.audit import vllm
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Layers, Subject, span
from ullage.findings.finding import Evidence, Severity

NO_ATTENTION = "layers with softmax attention"


def _head_dim(subject: Subject) -> Verdict:
    hidden = subject.spec.hidden_size
    differing: dict[tuple[int, int], Layers] = {}
    facts = []
    for attention, layers in subject.attentions():
        heads, size = attention.num_heads, attention.head_dim
        facts.append(subject.fact("head_dim", size, "head_dim", "global_head_dim"))
        if heads * size != hidden:
            seen = differing.get((heads, size), ())
            differing[heads, size] = tuple(sorted((*seen, *layers)))
    if not differing:
        return Clear(tuple(facts) or (subject.fact(NO_ATTENTION, 0),))
    (heads, size), layers = next(iter(differing.items()))
    quotient = hidden / heads
    return Fired(
        f"Heads are {size} wide in {span(layers)}, while hidden_size / num_attention_heads = "
        f"{hidden} / {heads} = {quotient:g}; a tool that divides is wrong by a factor of "
        f"{size / quotient:.3g} in KV bytes.",
        "Leave the configuration as it is, keep its head_dim key, and size with tools that read "
        "it: engines do.",
        (
            *facts,
            subject.fact("hidden_size", hidden),
            subject.fact("num_attention_heads", heads),
            Evidence("hidden_size / num_attention_heads", quotient, "", "calculated"),
        ),
    )


def _kv_width(mixer: Mixer) -> int:
    """Elements that one token adds to this layer's cache, for as long as the sequence lives."""
    if isinstance(mixer, Parallel):
        return sum(_kv_width(part) for part in mixer.parts)
    if isinstance(mixer, LatentAttention):
        return mixer.kv_lora_rank + mixer.qk_rope_head_dim
    if not isinstance(mixer, Attention) or mixer.window or mixer.chunk:
        return 0
    if mixer.kv_shared_from is not None:
        return 0
    return mixer.num_kv_heads * (mixer.head_dim + mixer.v_head_dim)


def _same_kv(subject: Subject) -> Verdict:
    compressed = [m for m, _ in subject.mixers if isinstance(m, CompressedAttention)]
    widths = [(_kv_width(mixer), layers) for mixer, layers in subject.mixers]
    layers = sum(len(members) for _, members in widths)
    growing = sum(len(members) for width, members in widths if width)
    elements = sum(width * len(members) for width, members in widths)
    facts = (
        subject.fact("layers", layers, "num_hidden_layers", "n_layer"),
        subject.fact("layers whose KV grows", growing, "layer_types", "num_hidden_layers"),
        Evidence("KV elements per token", elements, "", "calculated"),
    )
    largest = max(width for width, _ in widths)
    if largest and len({width for width, _ in widths}) == 1 and not compressed:
        return Clear(facts)
    if not largest:
        return Fired(
            f"None of the {layers} layers keeps a whole key and value per token (windows, states "
            "or pooled keys), so layers × KV heads × head_dim says nothing about this model.",
            "Size it with `ullage size`, which prices each layer by its kind.",
            facts,
        )
    return Fired(
        f"The layers differ in KV: {growing} of {layers} keep something for every token, together "
        f"{elements:,} elements per token, where the widest layer times {layers} would be "
        f"{largest * layers:,}, {largest * layers / elements:.3g} times as much.",
        "Size it with `ullage size`, which prices each layer by its kind; do not multiply one "
        "layer by num_hidden_layers.",
        facts,
    )


def _kernel(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    return _cpu_kernel(subject) if subject.deployment.platform == "cpu" else _cuda_kernel(subject)


def _cpu_kernel(subject: Subject) -> Verdict:
    facts = [subject.platform_fact()]
    source = "vllm 0.32: v1/attention/backends/cpu_attn.py, mla/cpu_mla.py"
    for mixer, layers in subject.mixers:
        if isinstance(mixer, CompressedAttention) or (
            isinstance(mixer, LatentAttention) and mixer.indexer is not None
        ):
            return Fired(
                f"Attention in {span(layers)} picks its keys (sparse), and vLLM 0.32 has no "
                "sparse attention for the CPU.",
                "Serve this model with --platform cuda.",
                (*facts, subject.fact("sparse attention layers", len(layers))),
                Severity.error,
            )
        if isinstance(mixer, LatentAttention):
            size, sizes = mixer.kv_lora_rank + mixer.qk_rope_head_dim, vllm.CPU_LATENT_SIZES
            name = "kv_lora_rank + qk_rope_head_dim"
            facts.append(subject.fact(name, size, "kv_lora_rank"))
            if size not in sizes:
                return _no_cpu_kernel(size, sizes, name, layers, facts, source)
    for attention, layers in subject.attentions():
        facts.append(subject.fact("head_dim", attention.head_dim, "head_dim", "global_head_dim"))
        if attention.head_dim not in vllm.CPU_HEAD_SIZES:
            return _no_cpu_kernel(
                attention.head_dim, vllm.CPU_HEAD_SIZES, "head_dim", layers, facts, source
            )
    return Clear(tuple(facts))


def _no_cpu_kernel(
    size: int,
    sizes: frozenset[int],
    name: str,
    layers: Layers,
    facts: list[Evidence],
    source: str,
) -> Fired:
    listed = ", ".join(str(s) for s in sorted(sizes))
    return Fired(
        f"{name} is {size} in {span(layers)}; vLLM 0.32's CPU attention has kernels for {listed} "
        "only, and the server fails at start or at its first request.",
        "Serve this model with --platform cuda, or choose one whose heads have a listed size.",
        (*facts, Evidence("sizes with a kernel", listed, "", source)),
        Severity.error,
    )


def _cuda_kernel(subject: Subject) -> Verdict:
    facts = [subject.platform_fact()]
    for attention, layers in subject.attentions():
        size = attention.head_dim
        backends = vllm.cuda_backends(size)
        facts.append(subject.fact("head_dim", size, "head_dim", "global_head_dim"))
        if backends[0] in ("FLASH_ATTN", "FLASHINFER"):
            continue
        return Fired(
            f"head_dim is {size} in {span(layers)}: FlashAttention takes multiples of 8 up to 256 "
            f"and FlashInfer 64, 128, 256 and 512, so vLLM 0.32 falls back to {backends[0]}, "
            "which is slower.",
            f"Pass --attention-backend {backends[0]} to say that this is meant, and measure: the "
            "head size cannot be changed without training.",
            (
                *facts,
                Evidence(
                    "backends that take it",
                    ", ".join(backends),
                    "",
                    "vllm 0.32: v1/attention/backends",
                ),
            ),
        )
    if len(facts) == 1:
        facts.append(subject.fact(NO_ATTENTION, 0))
    return Clear(tuple(facts))


def _window_switch(subject: Subject) -> Verdict:
    text = subject.text
    used, window = text.get("use_sliding_window"), text.get("sliding_window")
    kinds = text.get("layer_types")
    sliding = isinstance(kinds, list) and "sliding_attention" in kinds
    facts = (
        subject.fact("use_sliding_window", used if isinstance(used, bool) else None),
        subject.fact("sliding_window", window if isinstance(window, int) else None, unit="tokens"),
    )
    if used is False and isinstance(window, int) and window > 0:
        return Fired(
            f"sliding_window is {window:,} but use_sliding_window is false: every layer attends "
            "to the whole context, and a tool that reads only sliding_window undersizes KV.",
            "Set sliding_window to null in config.json; what the model computes stays the same.",
            facts,
            Severity.info,
        )
    if window is None and (used is True or (sliding and "sliding_window" in text)):
        asked = "use_sliding_window is true" if used is True else "layer_types names sliding layers"
        return Fired(
            f"{asked}, but sliding_window is not a number of tokens: there is no window to apply.",
            "Set sliding_window in config.json to the trained window, or turn the window off.",
            facts,
        )
    return Clear(facts)


def _window_binds(subject: Subject) -> Verdict:
    length = subject.served_length
    bounded = [
        (window, layers)
        for attention, layers in subject.attentions()
        if (window := attention.window or attention.chunk)
    ]
    bounded += [
        (mixer.window, layers)
        for mixer, layers in subject.mixers
        if isinstance(mixer, CompressedAttention)
    ]
    if not bounded:
        return Clear((subject.fact("layers with a window", 0, "sliding_window"),))
    if length is None:
        return NotEvaluable(("max_position_embeddings or --max-model-len",))
    facts = (
        *(subject.fact("sliding_window", window, unit="tokens") for window, _ in bounded),
        Evidence("served length", length, "tokens", subject.length_source()),
    )
    for window, layers in bounded:
        if window >= length:
            return Fired(
                f"The window of {window:,} tokens in {span(layers)} is not smaller than the "
                f"served length of {length:,}: these layers save no KV and act as full attention.",
                "Size these layers as full attention, or raise --max-model-len if longer requests "
                "are meant.",
                facts,
            )
    return Clear(facts)


RULES = (
    Rule(
        id="A001",
        title="head_dim against hidden_size / num_attention_heads",
        severity=Severity.info,
        category="attention",
        why="Many models choose head_dim on its own (51 of 371 configuration classes). Engines "
        "read the key; scripts that divide get KV bytes and kernels wrong.",
        fix="Read head_dim from config.json. It need not be hidden_size / num_attention_heads, "
        "nor a multiple of 64.",
        source="transformers 5.24 configuration classes, counted; vllm 0.32 get_head_size",
        example="hidden_size 1024, num_attention_heads 16, head_dim 128 (Qwen3-0.6B): 128, not 64",
        check=_head_dim,
    ),
    Rule(
        id="A002",
        title="KV of one layer against the others",
        severity=Severity.info,
        category="attention",
        why="In hybrid models only some layers keep KV for every token; the others keep a window, "
        "a state or nothing. The usual formula, one layer times num_hidden_layers, is wrong for "
        "them: planners print 63 GB for a model that needs 5.4.",
        fix="Price each layer by its kind.",
        source="vllm 0.32: v1/core/kv_cache_utils.py groups layers by kind; published planners "
        "compared",
        example="layer_types with 36 linear_attention and 12 full_attention layers",
        check=_same_kv,
    ),
    Rule(
        id="A003",
        title="Attention kernel for the head size",
        severity=Severity.warning,
        category="attention",
        why="Attention kernels exist for some head sizes. On the CPU a size without one stops the "
        "server; on CUDA it drops to a slower backend.",
        fix="Choose a platform or backend that takes the head size; it cannot be changed without "
        "training.",
        source="vllm 0.32: v1/attention/backends/{cpu_attn,flash_attn,flashinfer,triton_attn}.py",
        example="head_dim 45 on CUDA, or 72 on the CPU",
        check=_kernel,
    ),
    Rule(
        id="A004",
        title="Sliding-window settings",
        severity=Severity.warning,
        category="attention",
        why="The window is spread over several keys. When they contradict each other, tools that "
        "read one of them size KV for another model than the engine runs.",
        fix="State the window once: sliding_window for the size, layer_types for the layers.",
        source="transformers 5.24: Qwen2Config (use_sliding_window, sliding_window, layer_types)",
        example="use_sliding_window false with sliding_window 32768",
        check=_window_switch,
    ),
    Rule(
        id="A005",
        title="Window against the served length",
        severity=Severity.info,
        category="attention",
        why="A window bounds a layer's KV only when requests are longer than it.",
        fix="Treat such layers as full attention when sizing.",
        source="vllm 0.32: v1/kv_cache_interface.py, SlidingWindowSpec",
        example="sliding_window 131072 with max_position_embeddings 131072",
        check=_window_binds,
    ),
)

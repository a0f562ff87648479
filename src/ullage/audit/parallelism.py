"""Rules about parallel sizes: what they must divide, and what they buy.

Holds divisibility and replication as vLLM 0.32 decides them; whether quantised blocks survive the
cut is `quantization.py`, whether a rank's share fits is `fit.py`.
"""

from __future__ import annotations

from ullage.anatomy.spec import (
    Attention,
    CompressedAttention,
    LatentAttention,
    LinearAttention,
    Mamba,
    Mixer,
    Parallel,
    ShortConv,
)
from ullage.audit import vllm
from ullage.audit.feed_forward import width_fact, widths
from ullage.audit.rule import Clear, Fired, NotEvaluable, Verdict
from ullage.audit.subject import Layers, Subject, span
from ullage.findings.finding import Evidence, Severity

KV_KEYS = ("num_key_value_heads", "num_kv_heads", "multi_query")
LAYERS_SOURCE = "vllm 0.32: model_executor/layers/linear.py"


def _largest_divisor(number: int, at_most: int) -> int:
    return next(size for size in range(at_most, 0, -1) if number % size == 0)


def _attentions(subject: Subject) -> list[tuple[Attention, Layers]]:
    """Softmax attentions of all stacks: an encoder's and cross-attention are cut as well."""
    found = dict(subject.attentions())
    for layer in (*subject.spec.encoder_layers, *subject.spec.layers):
        for mixer in (layer.mixer, layer.cross_attention):
            if isinstance(mixer, Attention):
                found.setdefault(mixer, (layer.index,))
    return list(found.items())


def _query_heads(subject: Subject) -> list[tuple[int, Layers]]:
    found = [(attention.num_heads, layers) for attention, layers in _attentions(subject)]
    found += [
        (mixer.num_heads, layers)
        for mixer, layers in subject.mixers
        if isinstance(mixer, LatentAttention | CompressedAttention)
    ]
    return found


def heads_divide(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    ranks = subject.tensor_parallel
    facts = [subject.parallel_fact()]
    for heads, layers in _query_heads(subject):
        facts.append(subject.fact("num_attention_heads", heads, "num_attention_heads", "n_head"))
        if heads % ranks:
            return Fired(
                f"{heads} attention heads of {span(layers)} cannot be cut into {ranks} equal "
                "shares; vLLM 0.32 refuses to start.",
                f"Pass --tensor-parallel-size {_largest_divisor(heads, ranks)}, or use the other "
                "GPUs with --pipeline-parallel-size or --data-parallel-size.",
                tuple(facts),
            )
    if len(facts) == 1:
        facts.append(subject.fact("layers with attention heads", 0))
    return Clear(tuple(facts))


def kv_heads_divide(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    ranks = subject.tensor_parallel
    facts = [subject.parallel_fact()]
    for attention, layers in _attentions(subject):
        kv_heads = attention.num_kv_heads
        facts.append(subject.fact("num_key_value_heads", kv_heads, *KV_KEYS))
        if not kv_heads or (ranks % kv_heads == 0 if ranks >= kv_heads else kv_heads % ranks == 0):
            continue
        return Fired(
            f"{kv_heads} KV heads of {span(layers)} can be neither cut into nor copied onto "
            f"{ranks} ranks evenly; vLLM 0.32 stops while building the layers.",
            f"Pass a --tensor-parallel-size that divides {kv_heads} or is a multiple of it.",
            tuple(facts),
        )
    if len(facts) == 1:
        facts.append(subject.fact("layers with KV heads", 0))
    return Clear(tuple(facts))


def kv_is_not_copied(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    ranks = subject.tensor_parallel
    facts = [subject.parallel_fact()]
    latent = [m for m, _ in subject.mixers if isinstance(m, LatentAttention | CompressedAttention)]
    if latent:
        facts.append(subject.fact("KV heads of latent attention", 1, "kv_lora_rank", "head_dim"))
        if ranks > 1:
            return Fired(
                f"This model caches one latent per token, and each of the {ranks} tensor-parallel "
                f"ranks keeps all of it: {ranks} ranks hold the same tokens {ranks} times.",
                "For more KV room use --data-parallel-size with --enable-expert-parallel, or "
                f"--decode-context-parallel-size {ranks}, which deals the cache out by position.",
                tuple(facts),
            )
    for attention, layers in subject.attentions():
        kv_heads = attention.num_kv_heads
        facts.append(subject.fact("num_key_value_heads", kv_heads, *KV_KEYS))
        if kv_heads and ranks > kv_heads:
            return Fired(
                f"{ranks} ranks share {kv_heads} KV heads in {span(layers)}, so each head is kept "
                f"{ranks / kv_heads:g} times: beyond --tensor-parallel-size {kv_heads} a token "
                "takes as much KV on each rank as before.",
                f"For more KV room pass --tensor-parallel-size {kv_heads} with "
                f"--data-parallel-size {max(2, ranks // kv_heads)}, or "
                f"--decode-context-parallel-size {ranks // kv_heads}, which deals the copies out "
                "by position.",
                tuple(facts),
            )
    if len(facts) == 1:
        facts.append(subject.fact("layers with KV heads", 0))
    return Clear(tuple(facts))


def gate_and_up_divide(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    parallel = subject.deployment.parallel
    facts = [subject.parallel_fact()]
    for name, width, in_experts, layers in widths(subject):
        facts.append(width_fact(subject, name, width))
        if (in_experts and parallel.expert) or width % parallel.tensor == 0:
            continue
        return Fired(
            f"{name} {width} of {span(layers)} cannot be cut into {parallel.tensor} equal shares, "
            "so gate and up would not lie on the same rank column by column; vLLM 0.32 stops while "
            "building the layers.",
            f"Pass --tensor-parallel-size {_largest_divisor(width, parallel.tensor)}"
            + (", or --enable-expert-parallel to keep experts whole." if in_experts else "."),
            (*facts, Evidence("columns left over", width % parallel.tensor, "", LAYERS_SOURCE)),
        )
    if len(facts) == 1:
        facts.append(subject.fact("layers with a feed-forward", 0))
    return Clear(tuple(facts))


def experts_divide(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    parallel = subject.deployment.parallel
    ranks = parallel.tensor * parallel.data
    numbers = [experts.num_experts for experts, _ in subject.experts()]
    facts = [
        subject.flag("--enable-expert-parallel", parallel.expert),
        subject.fact("experts", max(numbers, default=0), "num_experts", "n_routed_experts",
                     "num_local_experts"),
        Evidence("expert-parallel ranks", ranks, "", "tensor × data parallel sizes"),
    ]  # fmt: skip
    if not parallel.expert:
        return Clear(tuple(facts))
    if not numbers:
        return Fired(
            "--enable-expert-parallel was given, but the model has no experts; vLLM 0.32 refuses "
            "to start.",
            "Drop --enable-expert-parallel.",
            tuple(facts),
            Severity.error,
        )
    uneven = next((number for number in numbers if number % ranks), None)
    if uneven is None:
        return Clear(tuple(facts))
    few, left = divmod(uneven, ranks)
    return Fired(
        f"{uneven} experts over {ranks} ranks give {left} of them {few + 1} and the others {few}: "
        "every step waits for the fuller ranks.",
        f"Choose tensor × data parallel sizes that divide {uneven}, for example "
        f"{_largest_divisor(uneven, ranks)}.",
        tuple(facts),
    )


def vocabulary_divides(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    ranks, rows = subject.tensor_parallel, subject.spec.vocab_size
    padded = -(-rows // vllm.VOCABULARY_PADDING) * vllm.VOCABULARY_PADDING
    facts = (
        subject.parallel_fact(),
        subject.fact("vocab_size", rows, unit="rows"),
        Evidence("padded vocabulary", padded, "rows", "vllm 0.32: vocab_parallel_embedding.py"),
    )
    if padded % ranks:
        return Fired(
            f"vLLM 0.32 pads {rows:,} vocabulary rows to {padded:,}, which cannot be cut into "
            f"{ranks} equal shares: it stops while building the embedding.",
            f"Pass --tensor-parallel-size {_largest_divisor(padded, ranks)}.",
            facts,
        )
    return Clear(facts)


def vocabulary_needs_no_padding(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    rows, multiple = subject.spec.vocab_size, vllm.VOCABULARY_PADDING
    added = -rows % multiple
    facts = (
        subject.fact("vocab_size", rows, unit="rows"),
        Evidence("rows added", added, "rows", "vllm 0.32: vocab_parallel_embedding.py"),
    )
    if added:
        return Fired(
            f"{rows:,} vocabulary rows are not a multiple of {multiple}: vLLM 0.32 adds {added} "
            f"empty rows of {subject.spec.hidden_size} to the embedding.",
            "Nothing needs to change; count the added rows when comparing memory or adapter "
            "shapes.",
            facts,
        )
    return Clear(facts)


def stages_are_even(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    stages, layers = subject.deployment.parallel.pipeline, subject.spec.num_layers
    facts = (
        subject.flag("--pipeline-parallel-size", stages, "stages"),
        subject.fact("num_hidden_layers", layers, "num_hidden_layers", "n_layer"),
    )
    if stages > layers:
        return Fired(
            f"{stages} pipeline stages are more than the model's {layers} layers.",
            f"Pass --pipeline-parallel-size {layers} or less.",
            facts,
            Severity.error,
        )
    if layers % stages:
        shares = vllm.stage_layers(layers, stages)
        return Fired(
            f"{layers} layers over {stages} stages become {', '.join(map(str, shares))}: the "
            f"stages of {max(shares)} set the pace and the memory.",
            f"Pass --pipeline-parallel-size {_largest_divisor(layers, stages)}, or weigh the "
            "stages by hand with VLLM_PP_LAYER_PARTITION.",
            (*facts, Evidence("largest stage", max(shares), "layers",
                              "vllm 0.32: distributed/utils.py")),
        )  # fmt: skip
    return Clear(facts)


def _recurrent_parts(subject: Subject) -> list[tuple[str, int, bool, Layers]]:
    """Heads (and groups) of recurrent mixers: name, number, whether a single one may be copied."""
    found: list[tuple[str, int, bool, Layers]] = []
    for mixer, layers in subject.mixers:
        parts: tuple[Mixer, ...] = mixer.parts if isinstance(mixer, Parallel) else (mixer,)
        for part in parts:
            if isinstance(part, Mamba) and part.version == 2:
                found.append(("Mamba heads", part.num_heads, False, layers))
                found.append(("Mamba groups", part.n_groups, True, layers))
            elif isinstance(part, Mamba):
                found.append(("Mamba channels", part.d_inner, False, layers))
            elif isinstance(part, LinearAttention):
                found.append(("linear-attention key heads", part.num_k_heads, False, layers))
                found.append(("linear-attention value heads", part.num_v_heads, False, layers))
            elif isinstance(part, ShortConv):
                found.append(("convolution channels", part.channels, False, layers))
    return found


def state_divides(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    ranks = subject.tensor_parallel
    facts = [subject.parallel_fact()]
    for name, number, may_copy, layers in _recurrent_parts(subject):
        facts.append(
            subject.fact(name, number, "mamba_num_heads", "linear_num_value_heads", "n_groups")
        )
        if number % ranks and not (may_copy and number == 1):
            return Fired(
                f"{number} {name} of {span(layers)} cannot be cut into {ranks} equal shares; vLLM "
                "0.32 stops while building the layers.",
                f"Pass --tensor-parallel-size {_largest_divisor(number, ranks)}.",
                tuple(facts),
            )
    if len(facts) == 1:
        facts.append(subject.fact("layers with recurrent state", 0))
    return Clear(tuple(facts))


def devices_suffice(subject: Subject) -> Verdict:
    gpus, parallel = subject.gpus, subject.deployment.parallel
    if gpus is None:
        return NotEvaluable(("--gpu NAME:N",))
    needed = parallel.tensor * parallel.pipeline * parallel.data * parallel.context
    if needed > 1 and not gpus.counted:
        return NotEvaluable(("the number of devices: --gpu NAME:N",))
    facts = (
        Evidence("devices", gpus.count, "", f"flag: --gpu {gpus.hardware.name}"),
        Evidence("ranks", needed, "", "tensor × pipeline × data parallel sizes"),
    )
    if needed > gpus.count:
        return Fired(
            f"Tensor {parallel.tensor} × pipeline {parallel.pipeline} × data {parallel.data} ranks "
            f"need {needed} devices, and --gpu names {gpus.count}.",
            f"Name {gpus.hardware.name}:{needed}, or lower the parallel sizes to a product of "
            f"{gpus.count}.",
            facts,
        )
    if needed < gpus.count:
        return Fired(
            f"The parallel sizes use {needed} of {gpus.count} devices; the others stay idle.",
            f"Raise --data-parallel-size or --tensor-parallel-size to a product of {gpus.count}.",
            facts,
            Severity.warning,
        )
    return Clear(facts)

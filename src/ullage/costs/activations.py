"""What a running rank needs besides weights and KV: activations, workspaces, graphs, the context.

Every figure is a range. Activations follow from shapes; their margins, and the engine's own
memory, come from start-up logs of real servers, named beside each constant.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage.anatomy.distinct import distinct_mixers
from ullage.anatomy.spec import (
    Attention,
    CompressedAttention,
    Dense,
    Experts,
    FeedForward,
    LatentAttention,
    LinearAttention,
    Mamba,
    Mixer,
    ModelSpec,
    ShortConv,
)
from ullage.costs.deployment import Parallel
from ullage.costs.hardware import HardwareSpec

MIB = 2**20
GIB = 2**30

HIDDEN_BUFFERS = 4.25
"""Copies of the hidden states alive at a layer's widest point: input, residual, output and what
the norm makes. Two dense models served by vLLM 0.19 on an H100 at 8,192 tokens (CodeLlama-7b 0.77
GiB, granite-3.1-8b 0.85 GiB) both leave 4.25 × [tokens, hidden] beside 3 × [tokens, intermediate].
"""

SAMPLER_BYTES = (2, 6)
"""Bytes per logit while sampling, by reading vLLM 0.32's model runner V2, which every plain
deployment gets (v1/worker/gpu/sample/sampler.py): the logits in 16 bits, and up to two more copies
where ranks gather them or a soft cap is applied. Model runner V1 took 15 (vLLM 0.19, eleven models
with vocabularies of 49,155 to 256,000, within 3%); tests/costs/test_activations.py holds that."""

ACTIVATION_MARGIN = (0.8, 1.1)
"""Held against twenty-one such measurements (tests/costs/test_activations.py): all lie inside."""

LATENT_WORKSPACE_TOKENS = 64 * 1024
"""vLLM 0.32 expands at most this much cached context at once in an MLA prefill
(model_executor/layers/attention/mla_attention.py)."""

CONTEXT_BYTES = {
    "one": (int(0.2 * GIB), int(0.8 * GIB)),
    "several": (int(0.5 * GIB), int(1.5 * GIB)),
    "several, fast links": (int(0.8 * GIB), int(2.6 * GIB)),
}
"""CUDA context and, with several ranks, NCCL: what is gone before vLLM takes its first reading.
Logs say 0.23 to 0.53 GiB for one rank and nvidia-smi 0.7 in an idle server; 0.91 to 1.18 for
several over PCIe, 2.47 over NVLink ("Free memory on device (181.84/184.31 GiB)")."""

PROCESS_BYTES = (int(0.3 * GIB), int(1.5 * GIB))
"""A serving process on a CPU before it loads anything: the interpreter, torch and its libraries.
Bounds set by reasoning, not by measurement."""

RUNTIME_BYTES = {
    "one": (int(0.05 * GIB), int(0.5 * GIB)),
    "several": (int(0.2 * GIB), int(1.2 * GIB)),
    "several, fast links": (int(0.9 * GIB), int(2.3 * GIB)),
}
"""Non-torch memory that appears while loading and profiling: kernels, cuBLAS, all-reduce buffers.
One rank: 0.24 to 0.46 GiB (vLLM 0.19, H100), 0.26 (0.31, A100). Several: 0.2 over PCIe (0.8,
RTX 3090); 2.06 to 2.17 (0.19, H100, two and four ranks), 0.95 (four ranks of 184 GiB)."""

GRAPH_BYTES_LEAST = MIB
"""vLLM 0.32 itself counts at least this per captured graph (v1/worker/gpu_model_runner.py)."""

GRAPH_BYTES_PER_LAYER = {
    "dense": int(0.45 * MIB),
    "experts": int(0.5 * MIB),
    "expert parallel": int(0.8 * MIB),
}
"""Most memory of one captured graph per layer. Pools seen: 0.51 to 1.85 GiB for 102 graphs of 28
to 62 layers, 0.71 GiB for 86 of 36, 4.99 set aside and 4.13 used for 102 with expert parallelism.
vLLM 0.31 set aside about 1.2 GiB for 86 graphs of 32 layers and then used 0.23."""


@dataclass(frozen=True, slots=True)
class Term:
    """One contribution in bytes, from `low` to `high`, with what it is and where that is from."""

    name: str
    low: int
    high: int
    source: str


@dataclass(frozen=True, slots=True)
class Workspace:
    """What one rank needs beside weights and KV, in bytes.

    `activations` is the peak of a forward pass over the largest batch. `engine` lies inside the
    budget that gpu_memory_utilization grants (runtime, graphs); `context` outside of it. On a CPU
    there is no such budget: `engine` is empty and `context` is the process.
    """

    activations: Term
    engine: tuple[Term, ...]
    context: Term

    @property
    def low(self) -> int:
        """Least bytes inside the budget."""
        return self.activations.low + sum(term.low for term in self.engine)

    @property
    def high(self) -> int:
        """Most bytes inside the budget."""
        return self.activations.high + sum(term.high for term in self.engine)


def workspace(
    spec: ModelSpec,
    parallel: Parallel,
    hardware: HardwareSpec | None = None,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    element_bytes: int = 2,
    on_cpu: bool = False,
) -> Workspace:
    """The range of everything on a device that is neither weights nor KV, of the heaviest rank."""
    activations = peak_activations(
        spec,
        parallel,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        element_bytes=element_bytes,
    )
    if on_cpu:
        process = Term("process", *PROCESS_BYTES, "modelled: an interpreter with torch loaded")
        return Workspace(activations, (), process)
    several = parallel.tensor * parallel.pipeline * parallel.context > 1
    fast = hardware is None or bool({"nvlink", "xgmi"} & dict(hardware.links).keys())
    ranks = ("several, fast links" if fast else "several") if several else "one"
    return Workspace(
        activations=activations,
        engine=(
            Term("runtime", *RUNTIME_BYTES[ranks], "logs of vLLM 0.19 and 0.31 servers"),
            _graphs(spec, parallel, hardware, max_num_batched_tokens, max_num_seqs),
        ),
        context=Term("context", *CONTEXT_BYTES[ranks], "free memory at start in vLLM's logs"),
    )


def _graphs(
    spec: ModelSpec,
    parallel: Parallel,
    hardware: HardwareSpec | None,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> Term:
    """CUDA graphs: one per capture size, for decode (full) and for mixed batches (piecewise)."""
    capability = None if hardware is None else hardware.compute_capability
    largest = 1024 if capability is not None and capability[0] == 10 else 512
    sizes = capture_sizes(max_num_seqs, max_num_batched_tokens, largest)
    # Decode steps replay full graphs, so those stop at max_num_seqs; mixed batches piecewise ones.
    graphs = len(sizes) + sum(size <= max_num_seqs for size in sizes)
    layers = -(-len(spec.layers) // parallel.pipeline)
    kind = "dense"
    if any(isinstance(layer.feed_forward, Experts) for layer in spec.layers):
        kind = "expert parallel" if parallel.expert else "experts"
    most = max(GRAPH_BYTES_LEAST, layers * GRAPH_BYTES_PER_LAYER[kind])
    return Term(
        "graphs",
        graphs * GRAPH_BYTES_LEAST,
        graphs * most,
        f"{graphs} graphs, full and piecewise, over {layers} layers",
    )


def capture_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, largest: int = 512
) -> tuple[int, ...]:
    """Batch sizes for which vLLM 0.32 captures CUDA graphs by default (config/vllm.py)."""
    limit = min(2 * max_num_seqs, largest, max_num_batched_tokens)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16))
    return tuple(size for size in sizes if size <= limit)


def peak_activations(
    spec: ModelSpec,
    parallel: Parallel,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    element_bytes: int = 2,
    sampler_bytes: tuple[int, int] = SAMPLER_BYTES,
) -> Term:
    """The most that torch holds in one pass besides weights and KV, as a range.

    A pass is widest either inside a layer (hidden states and the layer's widest intermediate),
    or in the sampler, or in a vision tower before it; experts add their own workspace to either.
    """
    n, size = max_num_batched_tokens, element_bytes
    forward = n * size * (HIDDEN_BUFFERS * spec.hidden_size + _widest_layer(spec, parallel.tensor))
    experts = n * size * max((_expert_width(x, spec, parallel) for x in _experts(spec)), default=0)
    logits = max_num_seqs * spec.vocab_size if spec.lm_head else 0
    hidden = n * size * spec.hidden_size
    low = max(ACTIVATION_MARGIN[0] * forward, sampler_bytes[0] * logits)
    cached = LATENT_WORKSPACE_TOKENS
    if spec.max_positions > 0:  # else nothing bounds it
        cached = min(cached, 8 * spec.max_positions)
    expanded = max(
        (_latent_width(m, parallel.tensor) for m in distinct_mixers(spec.layers)), default=0.0
    )
    latents = cached * size * expanded
    towers = _tower_bytes(spec, n)
    peak = max(forward, sampler_bytes[1] * logits + hidden, latents + hidden, towers)
    high = ACTIVATION_MARGIN[1] * (peak + experts + (hidden if towers else 0))
    return Term(
        "activations",
        int(low),
        int(high),
        f"peak of {n:,} tokens through the widest layer, or of {max_num_seqs:,} rows of logits",
    )


def _experts(spec: ModelSpec) -> set[Experts]:
    feed_forwards = {layer.feed_forward for layer in spec.layers}
    return {f for f in feed_forwards if isinstance(f, Experts)}


def _widest_layer(spec: ModelSpec, ranks: int) -> float:
    """Elements per token of a layer's intermediates at the widest point, on one rank."""
    feed_forwards = {layer.feed_forward for layer in spec.layers}
    feed_forwards |= {layer.parallel_dense for layer in spec.layers if layer.parallel_dense}
    return max(
        max((_feed_forward_width(f, ranks) for f in feed_forwards), default=0.0),
        max((_mixer_width(m, ranks) for m in distinct_mixers(spec.layers)), default=0.0),
    )


def _feed_forward_width(feed_forward: FeedForward, ranks: int) -> float:
    """A gated MLP holds gate, up and their product; a plain one its input and the activation."""
    match feed_forward:
        case Dense():
            return (3 if feed_forward.gated else 2) * feed_forward.intermediate / ranks
        case Experts():
            shared = (3 if feed_forward.gated else 2) * feed_forward.shared_intermediate
            return shared / ranks
        case _:
            return 0.0


def _mixer_width(mixer: Mixer, ranks: int) -> float:
    match mixer:
        case Attention(num_heads=heads, num_kv_heads=kv, head_dim=d, v_head_dim=v):
            gate = heads * d if mixer.output_gate == "element" else 0
            return (2 * heads * d + gate + max(kv, ranks) * (d + v) + heads * v) / ranks
        case LatentAttention(num_heads=heads):
            qk = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
            return heads * (3 * qk + 3 * mixer.v_head_dim) / ranks + (mixer.q_lora_rank or 0)
        case CompressedAttention(num_heads=heads, head_dim=d):
            return 3 * heads * d / ranks + mixer.q_lora_rank + mixer.o_groups * mixer.o_lora_rank
        case Mamba():
            # Input projection, convolution output, scan output; chunk states in float32.
            inner = mixer.d_inner + 2 * mixer.n_groups * mixer.d_state
            states = mixer.d_inner * mixer.d_state / mixer.chunk_size * 2
            return (2 * mixer.d_inner + 2 * inner + states) / ranks
        case LinearAttention():
            keys = mixer.num_k_heads * mixer.k_head_dim
            values = mixer.num_v_heads * mixer.v_head_dim
            # Chunks of 64 tokens each keep a state (fla kernels, as vLLM 0.32 carries them).
            states = values * mixer.k_head_dim / 64
            return (4 * keys + 5 * values + states) / ranks
        case ShortConv():
            return 4 * mixer.channels / ranks
        case _:
            return 0.0


def _expert_width(experts: Experts, spec: ModelSpec, parallel: Parallel) -> float:
    """Elements per token of the fused experts' two workspaces (vLLM 0.32, layers/fused_moe):
    one for gate-up and for the output, one for the activation, each top_k times.
    """
    inner = experts.latent or spec.hidden_size
    cut = 1 if parallel.expert else parallel.tensor * parallel.data
    width = experts.intermediate / cut
    first = max((2 if experts.gated else 1) * width, inner)
    return parallel.data * experts.top_k * (first + max(width, inner))


def _latent_width(mixer: Mixer, ranks: int) -> float:
    """Elements per cached token that an MLA prefill expands to keys and values."""
    if not isinstance(mixer, LatentAttention) or mixer.indexer is not None:
        return 0.0
    return mixer.num_heads / ranks * (mixer.qk_nope_head_dim + mixer.v_head_dim)


def _tower_bytes(spec: ModelSpec, tokens: int) -> float:
    """A vision tower sees four patches per token of the language model (2 × 2), in 16 bits."""
    return max(
        (
            2.0 * 4 * tokens * (3 * tower.intermediate + HIDDEN_BUFFERS * tower.hidden_size)
            for tower in spec.towers
        ),
        default=0.0,
    )

"""FLOPs and bytes of one forward step, operator by operator, over a whole model.

Holds the assembly and the feed-forwards; mixers are `mixer_operators.py`, counting conventions
`step.py`, times `roofline.py`. What a step must read and compute, not what a kernel happens to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ullage.anatomy.spec import (
    Dense,
    Experts,
    FeedForward,
    LayerSpec,
    LinearFeedForward,
    ModelSpec,
    NoFeedForward,
    NoMixer,
)
from ullage.costs.deployment import Parallel
from ullage.costs.mixer_operators import cross_attention_operators, mixer_operators
from ullage.costs.step import Operator, Step, matmul
from ullage.errors import BadUsage

ONE_RANK = Parallel()


def step_operators(
    spec: ModelSpec, step: Step, parallel: Parallel = ONE_RANK
) -> tuple[Operator, ...]:
    """Every operator of one step on one tensor-parallel rank, over all layers of the main stack.

    Layers that are the same are counted, not repeated. Pipeline stages are not told apart: the
    figures are of a whole replica divided over its tensor ranks. Raises BadUsage for a step of
    nothing.
    """
    if step.num_seqs < 1 or step.new_tokens < 1 or step.context < 0:
        raise BadUsage("a step needs at least one sequence with at least one new token")
    kinds: dict[LayerSpec, int] = {}
    for layer in spec.layers:
        key = replace(layer, index=0)
        kinds[key] = kinds.get(key, 0) + 1
    operators: list[Operator] = []
    for layer, count in kinds.items():
        operators += [replace(o, count=count) for o in layer_operators(layer, spec, step, parallel)]
    if step.encoder_tokens and spec.encoder_layers:
        operators += encoder_operators(spec, step, parallel)
    if spec.lm_head and spec.kind != "encoder":
        # Only the last token of each sequence is turned into logits.
        vocab = -(-spec.vocab_size // parallel.tensor)
        width = spec.embedding_size or spec.hidden_size
        operators.append(matmul("lm_head", step.num_seqs, width, vocab, "lm_head"))
    return tuple(operators)


def encoder_operators(spec: ModelSpec, step: Step, parallel: Parallel) -> list[Operator]:
    """The encoder of an encoder-decoder over `step.encoder_tokens` tokens of each sequence."""
    encode = Step(step.num_seqs, step.encoder_tokens)
    spec = replace(spec, hidden_size=spec.encoder_hidden_size or spec.hidden_size)
    return [
        replace(operator, name=f"encoder.{operator.name}")
        for layer in spec.encoder_layers
        for operator in layer_operators(layer, spec, encode, parallel)
    ]


def layer_operators(
    layer: LayerSpec, spec: ModelSpec, step: Step, parallel: Parallel
) -> list[Operator]:
    """The operators of one layer on one rank."""
    hidden = spec.hidden_size
    operators = list(mixer_operators(layer.mixer, hidden, step, parallel.tensor))
    if layer.cross_attention is not None:
        encoded = spec.encoder_hidden_size or hidden
        operators += cross_attention_operators(
            layer.cross_attention, hidden, encoded, step, parallel.tensor
        )
    if layer.parallel_dense is not None:
        operators += _dense("parallel_mlp", layer.parallel_dense, hidden, step, parallel.tensor)
    operators += _feed_forward(layer.feed_forward, hidden, step, parallel)
    if parallel.tensor > 1:
        operators += _all_reduces(layer, hidden, step)
    return operators


def _feed_forward(
    feed_forward: FeedForward, hidden: int, step: Step, parallel: Parallel
) -> Iterator[Operator]:
    match feed_forward:
        case Dense():
            yield from _dense("mlp", feed_forward, hidden, step, parallel.tensor)
        case Experts():
            yield from _experts(feed_forward, hidden, step, parallel)
        case LinearFeedForward():
            width = -(-hidden // parallel.tensor)
            yield matmul("linear_mlp", step.num_tokens, hidden, width, "feed_forward")
        case NoFeedForward():
            return


def _dense(name: str, d: Dense, hidden: int, step: Step, ranks: int) -> Iterator[Operator]:
    n, width = step.num_tokens, -(-d.intermediate // ranks)
    yield matmul(f"{name}.up", n, hidden, width * (2 if d.gated else 1), "feed_forward")
    yield matmul(f"{name}.down", n, width, hidden, "feed_forward")


def expected_experts(num_experts: int, top_k: int, num_tokens: float) -> float:
    """How many distinct experts `num_tokens` tokens touch: E·(1 − (1 − k/E)^n).

    With even and independent routing, where each token leaves a given expert out with
    probability 1 − k/E. Real routers are uneven and touch fewer.
    """
    left_out: float = (1.0 - min(1.0, top_k / num_experts)) ** num_tokens
    return num_experts * (1.0 - left_out)


def _experts(e: Experts, hidden: int, step: Step, parallel: Parallel) -> Iterator[Operator]:
    """Mixture of experts on one rank: every expert cut, or whole experts spread, over all ranks.

    The ranks of all data-parallel replicas share the experts either way (vLLM 0.32,
    fused_moe/config.py), so a rank serves its share of what all replicas route.
    """
    n = step.num_tokens
    # A hash router looks its experts up by token, but still weighs them by these scores.
    yield matmul("router", n, hidden, e.num_experts, "projection")
    inner = e.latent or hidden
    if e.latent:
        yield matmul("latent.down", n, hidden, e.latent, "feed_forward")
        yield matmul("latent.up", n, e.latent, hidden, "feed_forward")
    ranks = parallel.tensor * parallel.data
    touched = expected_experts(e.num_experts, e.top_k, n * parallel.data)
    routed = float(n * parallel.data * e.top_k)
    width = e.intermediate
    if parallel.expert:
        touched, routed = touched / ranks, routed / ranks
    else:
        width = -(-e.intermediate // ranks)
    shapes = {
        "experts.up": (inner, width * (2 if e.gated else 1)),
        "experts.down": (width, inner),
    }
    for name, (rows, columns) in shapes.items():
        yield Operator(
            name,
            "experts",
            flops=2.0 * routed * rows * columns,
            weight_elements=touched * rows * columns,
            activation_elements=routed * (rows + columns),
        )
    if e.shared_intermediate:
        shared = Dense(e.shared_intermediate, e.activation, e.gated)
        yield from _dense("shared_expert", shared, hidden, step, parallel.tensor)
    if e.shared_gate:
        yield matmul("shared_expert.gate", n, hidden, 1, "projection")


def _all_reduces(layer: LayerSpec, hidden: int, step: Step) -> Iterator[Operator]:
    """Tensor parallelism sums the output of the mixer and of the feed-forward over the ranks.

    `link_elements` is the payload; a ring sends 2·(t − 1)/t of it (Shoeybi et al. 2019, section 3).
    """
    if not isinstance(layer.mixer, NoMixer):
        yield Operator("all_reduce.mixer", "link", 0.0, link_elements=step.num_tokens * hidden)
    if not isinstance(layer.feed_forward, NoFeedForward):
        yield Operator("all_reduce.mlp", "link", 0.0, link_elements=step.num_tokens * hidden)


def total_flops(operators: Iterable[Operator]) -> float:
    """Operations of a whole step."""
    return sum(o.flops * o.count for o in operators)


def total_weight_elements(operators: Iterable[Operator]) -> float:
    """Weight elements that a whole step reads."""
    return sum(o.weight_elements * o.count for o in operators)

"""The experiments by name: what each asks, what it needs, and the module that runs it.

Pure data, so that the command line lists them without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Experiment:
    """`module` (in `experiments/`) has `run(setting) -> Result`.

    `needs_weights`: random weights would answer nothing, so MODEL must be given. `over_http`: it
    measures a server, the embedded one or the one at --url. `varies`: the flag for whose values
    it starts that server again, which for others' takes a --serve-command.
    """

    title: str
    question: str
    module: str
    needs_weights: bool = False
    over_http: bool = False
    varies: str = ""


EXPERIMENTS: Mapping[str, Experiment] = {
    "kv-growth": Experiment(
        "How the KV cache grows",
        "How many bytes do requests hold as they get longer and more, and which blocks are theirs?",
        "kv_growth",
    ),
    "attention": Experiment(
        "Three ways to compute attention",
        "What does it cost to write the matrix of scores out, and what does paging cost?",
        "attention",
    ),
    "layout": Experiment(
        "Fused or separate, viewed or copied",
        "What is gained by one matrix for Q, K and V, and lost by permuting what comes out of it?",
        "layout",
    ),
    "gqa": Experiment(
        "Fewer KV heads",
        "What do shared KV heads save, in bytes and in time?",
        "gqa",
    ),
    "batching": Experiment(
        "Batching",
        "What do batches buy in throughput, and what do they cost each request?",
        "batching",
        over_http=True,
    ),
    "block-size": Experiment(
        "The block size",
        "How much memory do half-filled blocks waste, and what do small blocks cost?",
        "block_size",
        over_http=True,
        varies="block_size",
    ),
    "prefix": Experiment(
        "Prefix caching",
        "How much sooner does the first token come when a prompt's beginning is known already?",
        "prefix",
        over_http=True,
    ),
    "chunked-prefill": Experiment(
        "Chunked prefill",
        "How long do those who are decoding wait while somebody's long prompt arrives?",
        "chunked_prefill",
        over_http=True,
        varies="max_num_batched_tokens",
    ),
    "kv-quant": Experiment(
        "Quantised KV",
        "What do fewer bits in the KV cache save, and what do they change in the answers?",
        "kv_quant",
        needs_weights=True,
    ),
    "weight-quant": Experiment(
        "Quantised weights",
        "What do fewer bits in the weights save, and what do they change in the answers?",
        "weight_quant",
        needs_weights=True,
    ),
    "encoder-decoder": Experiment(
        "Why an encoder needs no KV cache",
        "What does the cache save a decoder, and why has an encoder nothing to put there?",
        "encoder_decoder",
    ),
}

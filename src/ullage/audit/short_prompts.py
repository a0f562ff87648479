"""The rule about pools whose blocks a recurrent state has made large: what short prompts take.

Holds the verdict; how vLLM grows the blocks is `planning/vllm_blocks.py`'s.
"""

from __future__ import annotations

from ullage.anatomy.spec import LinearAttention, Mamba, Mixer, Parallel
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject
from ullage.findings.finding import Evidence, Severity

SHORT_PROMPT_TOKENS = 12
"""The prompt of vllm#54458; any prompt within one block takes the same."""

LEAST_DEFAULT_SEQS = 256
"""The smallest --max-num-seqs that vLLM 0.32 chooses on a GPU (engine/arg_utils.py)."""


def _recurrent(mixer: Mixer) -> bool:
    if isinstance(mixer, Parallel):
        return any(_recurrent(part) for part in mixer.parts)
    return isinstance(mixer, LinearAttention | Mamba)


def _short_prompts(subject: Subject) -> Verdict:
    recurrent = sum(len(layers) for mixer, layers in subject.mixers if _recurrent(mixer))
    layers = Evidence("layers with a recurrent state", recurrent, "", "spec")
    if not recurrent or recurrent == subject.spec.num_layers:
        return Clear((layers, Evidence("layers", subject.spec.num_layers, "", "spec")))
    ledger = subject.ledger
    if ledger is None:
        return NotEvaluable((subject.no_ledger or "--gpu NAME[:N]",))
    heavy, light = ledger.heavy.allocation, ledger.light.allocation
    if heavy is None or light is None:
        return NotEvaluable(tuple(dict(ledger.not_evaluable).values()) or ("--gpu NAME[:N]",))
    if heavy.num_blocks < 2:
        return NotEvaluable(("a KV cache that holds a request",))
    attention = [group for group in heavy.groups if "state" not in group.kinds]
    if not attention or len(attention) == len(heavy.groups):
        return Clear((layers, Evidence("block tables", len(heavy.groups), "", heavy.basis)))
    # Each table gives a prompt at least one block of its own; one block of all is never given out.
    taken, wanted = len(heavy.groups), heavy.max_num_seqs
    fitting, most = ((each.num_blocks - 1) // taken for each in (heavy, light))
    block = max(group.block_size for group in attention)
    given = subject.deployment.max_num_seqs is not None
    share = min(1.0, taken / (heavy.num_blocks - 1))
    facts = (
        layers,
        Evidence("tokens of one block", block, "tokens", heavy.basis),
        Evidence("blocks of the KV cache", heavy.num_blocks, "blocks", heavy.basis),
        Evidence(f"blocks of a prompt of {SHORT_PROMPT_TOKENS} tokens", taken, "blocks",
                 "vllm 0.32: one in each block table"),
        Evidence("bytes of these", taken * heavy.bytes_per_block, "bytes", heavy.basis),
        Evidence("share of the KV cache", round(share, 4), "", heavy.basis),
        Evidence("requests that fit, however short", fitting, "requests", heavy.basis),
        Evidence("max_num_seqs", wanted, "requests",
                 "flag: --max-num-seqs" if given else "vllm 0.32: default"),
    )  # fmt: skip
    if fitting >= wanted:
        return Clear(facts)
    if most >= wanted:
        return NotEvaluable((f"memory that only a measurement knows: {fitting:,} to {most:,} "
                             "short requests fit",))  # fmt: skip
    return Fired(
        f"vLLM grew the attention block to {block:,} tokens, to hold a recurrent state, and every "
        f"request takes {taken} blocks of {heavy.num_blocks - 1:,}: a prompt of "
        f"{SHORT_PROMPT_TOKENS} tokens takes {100 * share:.3g}% of the KV cache, and {fitting:,} "
        f"requests fit however short they are, where max_num_seqs admits {wanted:,}.",
        f"Pass --max-num-seqs {max(1, fitting)}, so that requests wait instead of being preempted, "
        "or cut the state over more ranks (--tensor-parallel-size); an 8-bit KV cache makes the "
        "block longer still.",
        facts,
        None if given or fitting < LEAST_DEFAULT_SEQS else Severity.info,
    )


RULES = (
    Rule(
        id="A144",
        title="Blocks of a hybrid model against short prompts",
        severity=Severity.warning,
        category="fit",
        why="vLLM gives attention and recurrent states blocks of equal bytes: the attention block "
        "grows to hundreds or thousands of tokens, and a prompt of a dozen takes whole blocks. "
        "Then the number of requests, not of tokens, fills the KV cache.",
        fix="Set --max-num-seqs to what fits, or cut the state over more ranks.",
        source="vllm 0.32: platforms/interface.py, _align_hybrid_block_size; vllm#54458",
        example="a Mamba hybrid with --max-num-seqs 256 whose pool has 90 blocks",
        check=_short_prompts,
    ),
)

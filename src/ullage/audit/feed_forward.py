"""Rules about the feed-forward and about number formats: widths, routing, norm eps, dtype.

Holds rules on one rank's arithmetic; whether sizes can be cut over ranks is `parallelism.py`. No
ratio of intermediate_size to hidden_size is wrong: 177 of 360 configuration classes depart from 4.
"""

from __future__ import annotations

from ullage.anatomy.spec import Dense, Experts
from ullage.audit import vllm
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Layers, Subject, at_rank, span
from ullage.findings.finding import Evidence, Severity

ALIGNMENT_BYTES = 16
BYTES_BY_DTYPE = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
FLOAT32_LEAST_NORMAL = 2.0**-126
LARGEST_USUAL_EPS = 1e-3
FLOAT16_LARGEST = 65504.0
HALF_NAMES = ("float16", "half")


def widths(subject: Subject) -> list[tuple[str, int, bool, Layers]]:
    """Each distinct feed-forward width: its name, size, whether experts hold it, its layers."""
    found: dict[tuple[str, int, bool], Layers] = {}
    for part, layers in subject.feed_forwards:
        if isinstance(part, Dense):
            found.setdefault(("intermediate_size", part.intermediate, False), layers)
        elif isinstance(part, Experts):
            found.setdefault(("moe_intermediate_size", part.intermediate, True), layers)
            if part.shared_intermediate:
                name = "shared expert intermediate size"
                found.setdefault((name, part.shared_intermediate, False), layers)
    return [(*key, layers) for key, layers in found.items()]


def width_fact(subject: Subject, name: str, width: int) -> Evidence:
    keys = (name, "intermediate_size", "ffn_dim", "n_inner")
    return subject.fact(name, width, *keys)


def _aligned(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    parallel = subject.deployment.parallel
    dtype = subject.deployment.dtype or subject.spec.dtype
    size = BYTES_BY_DTYPE.get(dtype)
    if size is None:
        return NotEvaluable((f"the size of dtype {dtype}",))
    multiple = ALIGNMENT_BYTES // size
    facts = [subject.parallel_fact()]
    for name, width, in_experts, layers in widths(subject):
        whole = in_experts and parallel.expert
        local = width if whole else at_rank(width, parallel.tensor)
        facts.append(width_fact(subject, name, width))
        if local is None or local % multiple == 0:
            continue  # a width that cannot be cut at all is another rule's finding
        return Fired(
            f"{name} {width} gives each rank {local} columns in {span(layers)}; {local} × {size} "
            f"bytes is not a multiple of {ALIGNMENT_BYTES}, so rows are not aligned for the "
            "matrix units and the product falls to a slower kernel.",
            f"Choose --tensor-parallel-size so that {name} / size is a multiple of {multiple}, or "
            f"pad the weights with zeros to a multiple of {multiple}.",
            (*facts, Evidence("columns per rank", local, "", "calculated")),
        )
    if len(facts) == 1:
        facts.append(subject.fact("layers with a feed-forward", 0))
    return Clear(tuple(facts))


def _routing(subject: Subject) -> Verdict:
    facts: list[Evidence] = []
    for experts, layers in subject.experts():
        number, top_k, groups = experts.num_experts, experts.top_k, experts.num_groups
        facts += [
            subject.fact("experts", number, "num_experts", "n_routed_experts", "num_local_experts"),
            subject.fact("experts per token", top_k, "num_experts_per_tok", "moe_topk"),
            subject.fact("expert groups", groups, "n_group"),
        ]
        if groups <= 1:
            continue
        chosen = subject.text.get("topk_group")
        reach = number // groups * chosen if isinstance(chosen, int) else number
        problem = ""
        if number % groups:
            problem = (
                f"{number} experts of {span(layers)} cannot be dealt into {groups} equal groups."
            )
        elif reach < top_k:
            facts.append(subject.fact("topk_group", chosen if isinstance(chosen, int) else None))
            problem = (
                f"{chosen} of {groups} groups hold {reach} experts of {span(layers)}, fewer than "
                f"the {top_k} that each token is to use."
            )
        if problem:
            return Fired(
                problem,
                "Correct n_group, topk_group or the number of experts in config.json: the router's "
                "weight has one row per expert.",
                tuple(facts),
            )
    return Clear(tuple(facts) or (subject.fact("layers with experts", 0),))


def _eps(subject: Subject) -> Verdict:
    eps = subject.spec.norm.eps
    fact = subject.fact(
        "norm eps",
        eps,
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_eps",
        "norm_epsilon",
        "layernorm_epsilon",
    )
    facts = (
        fact,
        Evidence("least normal float32", FLOAT32_LEAST_NORMAL, "", "IEEE 754 binary32"),
        Evidence("dtype of the sum", "float32", "", "PyTorch 2.13 and vllm 0.32 norm kernels"),
    )
    if eps < FLOAT32_LEAST_NORMAL:
        return Fired(
            f"The norms add {eps:g} before the square root, which in float32 is nothing: a row of "
            "zeros (padding, a dead channel) then gives 0 × infinity = NaN.",
            "Restore the trained eps in config.json (1e-5 or 1e-6 in most models); a small one "
            "such as 1e-12 is fine, because kernels sum in float32 whatever the model's dtype.",
            facts,
        )
    if eps > LARGEST_USUAL_EPS:
        return Fired(
            f"The norms add {eps:g} to the mean square, which is no longer small beside "
            "activations and shrinks quiet tokens.",
            "Compare the eps in config.json with the model's original: 1e-5 and 1e-6 are usual.",
            facts,
        )
    return Clear(facts)


def _half_of_bfloat(subject: Subject) -> Verdict:
    stored, served = subject.spec.dtype, subject.deployment.dtype
    facts = (subject.fact("dtype", stored, "dtype", "torch_dtype"), subject.flag("--dtype", served))
    if stored != "bfloat16" or served not in HALF_NAMES:
        return Clear(facts)
    refused = subject.spec.model_type in vllm.FLOAT16_REFUSED
    engine = (
        " vLLM 0.32 refuses float16 for this model type."
        if refused and not subject.missing_engine_rules()
        else ""
    )
    return Fired(
        f"Weights were trained in bfloat16, which reaches 3.4e38, and --dtype {served} ends at "
        f"{FLOAT16_LARGEST:g}: activations beyond that become infinite and then NaN.{engine}",
        "Drop --dtype, or pass --dtype bfloat16; on a GPU without bfloat16 pass --dtype float32 "
        "and watch for NaN before trusting float16.",
        (*facts, Evidence("largest float16", FLOAT16_LARGEST, "", "IEEE 754 binary16")),
        Severity.error if engine else None,
    )


RULES = (
    Rule(
        id="A041",
        title="Alignment of the feed-forward per rank",
        severity=Severity.warning,
        category="feed-forward",
        why="Matrix units read 16 bytes at a time. The width may be anything (11008, 14336, 2880 "
        "and 24576 all serve well), but one rank's share should fill whole reads.",
        fix="Choose a tensor-parallel size that leaves an aligned share.",
        source="CUTLASS operand alignment (16 bytes); vllm 0.32 column-parallel layers",
        example="intermediate_size 14332 at --tensor-parallel-size 4: 3583 columns",
        check=_aligned,
    ),
    Rule(
        id="A042",
        title="Groups of experts",
        severity=Severity.error,
        category="feed-forward",
        why="A grouped router first picks groups, then experts within them. Groups of unequal "
        "size, or chosen groups that hold fewer experts than a token needs, cannot be computed.",
        fix="Correct the counts in config.json from the router's weight.",
        source="vllm 0.32: model_executor/layers/fused_moe/router/grouped_topk_router.py",
        example="n_routed_experts 256 with n_group 3",
        check=_routing,
    ),
    Rule(
        id="A051",
        title="Norm eps in float32",
        severity=Severity.warning,
        category="norms",
        why="Kernels compute the mean square in float32 whatever the model's dtype, so eps is "
        "judged there. Folklore has it backwards: half(1e-5) = 1.0014e-5 survives and half(1e-12) "
        "= 0, yet both are fine because neither is ever used in half.",
        fix="Restore the eps that the model was trained with.",
        source="PyTorch 2.13 layer_norm kernels; vllm 0.32 csrc/layernorm_kernels",
        example="rms_norm_eps 0",
        check=_eps,
    ),
    Rule(
        id="A052",
        title="float16 for a bfloat16 model",
        severity=Severity.warning,
        category="norms",
        why="bfloat16 has float32's range, float16 ends at 65504. Residual streams of bfloat16 "
        "models pass that.",
        fix="Serve in the dtype of training.",
        source="IEEE 754; vllm 0.32: config/model.py, _FLOAT16_NOT_SUPPORTED_MODELS",
        example="dtype bfloat16 in config.json, --dtype float16 on the command line",
        check=_half_of_bfloat,
    ),
)

"""Rules about weights beside the stack that generates: towers, and what speculation adds.

Holds the verdicts on whether the memory that is shown counts them; sizes are `costs/weights.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ullage.audit.launch_flags import flag_fact
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject, unit_count
from ullage.findings.finding import Evidence, Severity
from ullage.launch.launch import Launch

GIB = 2**30
WITHOUT_TOWER, WITHOUT_LANGUAGE = "--language-model-only", "--mm-encoder-only"
NO_WEIGHTS = ("ngram", "[ngram]", "ngram_gpu", "suffix")
"""Methods of --speculative-config that guess from the text (vllm/config/speculative.py)."""


def _towers(subject: Subject) -> Verdict:
    towers = subject.spec.towers
    if not towers:
        return Clear((Evidence("towers", 0, "", "spec"),))
    unknown = [tower.modality for tower in towers if tower.parameters is None]
    if unknown:
        return NotEvaluable((f"the size of the {unknown[0]} tower",))
    from ullage.costs.weights import stored_bytes  # only models with towers pay for it

    weights = stored_bytes(subject.spec)
    facts: tuple[Evidence, ...] = (
        *(Evidence(f"parameters of the {tower.modality} tower", tower.parameters, "",
                   f"modelled from {tower.model_type or 'its configuration'}") for tower in towers),
        Evidence("weights of the towers", weights.towers, "bytes", "modelled from the spec"),
        Evidence("weights without them", weights.total - weights.towers, "bytes",
                 "modelled from the spec"),
    )  # fmt: skip
    launch = subject.launch
    if launch is None or launch.engine != "vllm":
        return Clear(facts)
    for name in (WITHOUT_TOWER, WITHOUT_LANGUAGE):
        given = launch.given(name)
        if given is None and launch.absent_unknown:
            return NotEvaluable((f"{name} (perhaps in {launch.absent_unknown[0]})",))
        if given is None or given.values == ("false",):
            continue
        left = weights.towers if name == WITHOUT_TOWER else weights.total - weights.towers
        what = "towers" if name == WITHOUT_TOWER else "language model"
        return Fired(
            f"{name} leaves the {what} unused, {left / GIB:.2f} GiB of "
            f"{weights.total / GIB:.2f} GiB of weights: `ullage size` counts them, and the same "
            "checkpoint without the flag needs them.",
            f"Take {left / GIB:.2f} GiB off the weights that `ullage size` shows for this command, "
            "cut by the tensor-parallel ranks; keep them in the budget where images or sounds are "
            "to be served.",
            (*facts, flag_fact(launch, given, name)),
        )
    return Clear(facts)


def _speculation(launch: Launch) -> tuple[Mapping[str, object], Evidence | None, str]:
    """(what the flags say of speculation, the flag, what keeps it unknown)."""
    said: dict[str, object] = {}
    fact = None
    for flag in launch.flags:
        if flag.name == "--speculative-config.":
            return {}, None, f"the settings that {flag.spelling} leads to"
    for name, key in (("--spec-method", "method"), ("--spec-model", "model")):
        given = launch.given(name)
        if given is not None:
            if given.open or not given.values:
                return {}, None, f"the value of {given.spelling}"
            said[key], fact = given.values[0], flag_fact(launch, given, name)
    given = launch.given("--speculative-config")
    if given is not None:
        try:
            settings = json.loads(given.values[0]) if given.values else None
        except (ValueError, RecursionError):
            settings = None
        if given.open or not isinstance(settings, dict):
            return {}, None, f"what {given.spelling} says"
        said.update(settings)
        method = said.get("method") or said.get("model")
        fact = flag_fact(launch, given, "--speculative-config", str(method)[:80])
    return said, fact, ""


def _drafts(subject: Subject) -> Verdict:
    layers = len(subject.spec.mtp_layers)
    facts: tuple[Evidence, ...] = (
        Evidence("multi-token-prediction layers", layers, "", "config" if layers else "spec"),
    )
    num_bytes = 0
    if layers:
        from ullage.costs.weights import stored_bytes  # only models with such layers pay for it

        num_bytes = stored_bytes(subject.spec).mtp
        facts = (*facts, Evidence("weights of these, off unless asked for", num_bytes, "bytes",
                                  "modelled from the spec"))  # fmt: skip
    launch = subject.launch
    if launch is None or launch.engine != "vllm":
        return Clear(facts)
    if missing := subject.missing_engine_rules():
        return NotEvaluable(missing)
    said, fact, problem = _speculation(launch)
    if problem:
        return NotEvaluable((problem,))
    if fact is None:
        if launch.absent_unknown:
            return NotEvaluable((f"--speculative-config (perhaps in {launch.absent_unknown[0]})",))
        return Clear(facts)
    facts = (*facts, fact)
    method, model = said.get("method"), said.get("model")
    if method in NO_WEIGHTS or (method is None and model in NO_WEIGHTS):
        return Clear(facts)
    if isinstance(model, str):
        return Fired(
            f"Speculation loads a second model, {model[:80]!r}, with weights and a KV cache of its "
            "own: the rules about memory do not count it, and were not evaluated.",
            "Size the draft model with `ullage size` for the same devices, and take both its "
            "weights and its KV per token off what this model is given.",
            facts,
        )
    if not (isinstance(method, str) and (method == "mtp" or method.endswith("_mtp"))):
        return NotEvaluable((f"what speculation by {str(method)[:40]} loads",))
    if not layers:
        return Fired(
            "Speculation by multi-token prediction is asked for, and the configuration names no "
            "such layer: vLLM finds no draft in this checkpoint.",
            "Drop the speculation, or name a draft model under `model` of --speculative-config.",
            facts,
            Severity.warning,
        )
    return Fired(
        f"Speculation turns on {unit_count(layers, 'multi-token-prediction layer')}: "
        f"{num_bytes / GIB:.2f} GiB of weights, cut by the tensor-parallel ranks, which "
        "`ullage size` leaves out, and a KV cache for what attends in them.",
        f"Keep {num_bytes / GIB:.2f} GiB ÷ --tensor-parallel-size free on each rank beside what "
        "`ullage size` shows.",
        facts,
    )


RULES = (
    Rule(
        id="A145",
        title="Vision and audio towers in the budget",
        severity=Severity.info,
        category="fit",
        why="A multi-modal checkpoint holds a tower beside the language model. A budget made for "
        "the language model alone misses its weights; one made for both is too high when the "
        "server runs without it.",
        fix="Count the tower exactly when the server loads it.",
        source="vllm 0.32: config/multimodal.py, language_model_only and mm_encoder_only",
        example="--language-model-only for a model with a vision_config",
        check=_towers,
    ),
    Rule(
        id="A146",
        title="Weights that speculation adds",
        severity=Severity.info,
        category="fit",
        why="A draft model or multi-token-prediction layers need memory for weights and KV. They "
        "are off unless asked for, so that memory which is shown leaves them out.",
        fix="Add their weights and their KV to the budget.",
        source="vllm 0.32: config/speculative.py",
        example='--speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\'',
        check=_drafts,
    ),
)

"""Rules about what the engine makes of an adapter: names, scales, limits, what it leaves out.

Holds the checks and their words. They read the engine's answer; how it is found is the engine's
module.
"""

from __future__ import annotations

from collections.abc import Sequence

from ullage.adapters.rules.rule import MERGE, Rule, Seen, clear, some, told
from ullage.adapters.verdict import State
from ullage.findings.answer import Answer, Clear, Fired, NotEvaluable
from ullage.findings.finding import Severity

REFUSED = NotEvaluable(("an adapter that the engine loads",))


def _engine(seen: Seen) -> str:
    return f"{seen.options.engine} {seen.answer.version}"


def _unmapped(seen: Seen) -> Answer:
    lost = seen.of(State.UNMAPPED)
    total = len(seen.answer.modules)
    if seen.answer.message is not None:
        return REFUSED
    if not lost:
        return clear("modules with a place in the served model", total, "engine")
    return Fired(
        cause=f"{_engine(seen)} drops {len(lost):,} of {total:,} modules without a word: their "
        f"names lead to no module that it serves ({some([m.key for m in lost], 2)}).",
        remedy=seen.rewrite("Rewrite the names"),
        evidence=(
            told("unmapped modules", len(lost), "engine"),
            told("modules", total, "header"),
        ),
    )


def _no_effect(seen: Seen) -> Answer:
    if seen.answer.message is not None:
        return REFUSED
    if seen.verdict != "no_effect":
        return clear("modules applied", sum(m.scale_applied is not None for m in
                     seen.answer.modules), "engine")  # fmt: skip
    unmapped = any(m.state is State.UNMAPPED for m in seen.answer.modules)
    idle = all(m.scale_expected == 0 for m in seen.answer.modules)
    why = "the engine leaves every module of it out"
    if unmapped:
        why = "no name of it leads to a served module"
    elif idle:
        why = "its scale is 0"
    total = len(seen.answer.modules)
    return Fired(
        cause=f"Requests with this adapter are answered by the base model alone: {why}. "
        f"{_engine(seen)} loads it and says nothing.",
        remedy="Do not deploy it. "
        + (seen.rewrite("If only its names are wrong") if unmapped else "Look at what it lacks."),
        evidence=(told("modules applied", 0, "engine"), told("modules", total, "header")),
    )


def _scale(seen: Seen) -> Answer:
    if seen.answer.message is not None:
        return REFUSED
    wrong = seen.of(State.WRONG_SCALE)
    if not wrong:
        scales = {m.scale_applied for m in seen.answer.modules if m.scale_applied is not None}
        return clear("scales applied", ", ".join(f"{s:g}" for s in sorted(scales)) or "none",
                     "engine")  # fmt: skip
    first = wrong[0]
    meant, applied = first.scale_expected or 0.0, first.scale_applied or 0.0
    return Fired(
        cause=f"{_engine(seen)} adds {len(wrong):,} modules at another scale than training meant: "
        f"{first.module} at {applied:g} instead of {meant:g}.",
        remedy=f"Fold the scale into the weights: {seen.fix}.",
        evidence=(
            told("scale meant", meant, "config"),
            told("scale applied", applied, "engine"),
            told("modules at a wrong scale", len(wrong), "engine"),
        ),
    )


def _doubled(seen: Seen) -> Answer:
    if seen.answer.message is not None:
        return REFUSED
    twice = seen.of(State.DOUBLED)
    if not twice:
        return clear("modules loaded over one another", 0, "engine")
    return Fired(
        cause=f"{len(twice):,} modules are loaded and then overwritten by another module of the "
        f"same adapter ({some([m.key for m in twice], 2)}).",
        remedy="Two adapters or two names of one module were saved into one file: save again with "
        "one of them.",
        evidence=(told("modules overwritten", len(twice), "engine"),),
    )


def _left_out(seen: Seen) -> Answer:
    if seen.answer.message is not None:
        return REFUSED
    out = [m for m in seen.of(State.IGNORED) if not m.detail.startswith("it adds nothing")]
    if not out:
        return clear("modules that the engine leaves out", 0, "engine")
    details = list(dict.fromkeys(m.detail for m in out))
    return Fired(
        cause=f"{_engine(seen)} leaves {len(out):,} of {len(seen.answer.modules):,} modules out in "
        f"silence: {'; '.join(details[:2])}.",
        remedy=_admitted(details),
        evidence=(told("modules left out", len(out), "engine"),),
    )


def _admitted(details: Sequence[str]) -> str:
    """What makes the engine take what it leaves out, where something does."""
    merge = "train without them, or merge the adapter with PEFT (merge_and_unload) and serve that."
    flags = ("--enable-tower-connector-lora", "--lora-target-modules")
    needed = [flag for flag in flags if any(flag in detail for detail in details)]
    if needed:
        return f"Start the engine so that it takes them ({' and '.join(needed)}), or {merge}"
    if any("target_modules of adapter_config.json" in detail for detail in details):
        return f"Name them in target_modules of adapter_config.json, or {merge}"
    return merge[0].upper() + merge[1:]


def _padded(seen: Seen) -> Answer:
    if seen.answer.message is not None:
        return REFUSED
    cut = seen.of(State.SHAPE_MISMATCH)
    if not cut:
        return clear("modules cut or padded", 0, "engine")
    return Fired(
        cause=f"{len(cut):,} modules do not have the served module's sizes, and {_engine(seen)} "
        f"fills what is missing with zeros instead of refusing: {cut[0].module}: {cut[0].detail}.",
        remedy="Use the base model that the adapter was trained on.",
        evidence=(told("modules cut or padded", len(cut), "engine"),),
    )


_HALVES = (
    "Give the engine swap_gate_up_proj_lora_b_weight false, or merge the adapter into the base "
    "with PEFT (merge_and_unload) and serve the merged model."
)


def _altered(seen: Seen) -> Answer:
    if seen.answer.message is not None:
        return REFUSED
    altered = seen.of(State.ALTERED)
    if not altered:
        return clear("modules added without a part of the sum", 0, "engine")
    details = list(dict.fromkeys(m.detail for m in altered))
    return Fired(
        cause=f"{_engine(seen)} adds {len(altered):,} of {len(seen.answer.modules):,} modules "
        f"otherwise than training did: {some(details, 2)} ({some([m.key for m in altered], 2)}).",
        remedy=_HALVES if any("halves of B" in detail for detail in details) else MERGE,
        evidence=(told("modules added otherwise", len(altered), "engine"),),
    )


def _rank_limit(seen: Seen) -> Answer:
    limits = dict(seen.answer.limits)
    limit = next((v for k, v in limits.items() if "rank" in k and isinstance(v, int)), None)
    ranks = [r for r in (seen.adapter.config.rank, *dict(seen.adapter.config.rank_pattern).values(),
                         *(m.rank for m in seen.adapter.modules)) if r is not None]  # fmt: skip
    if limit is None:
        return clear("limit on ranks", "none", "engine")
    if not ranks:
        return NotEvaluable(("a rank",))
    highest = max(ranks)
    evidence = (told("highest rank", highest, "header"), told("limit", limit, "engine"))
    if highest <= limit:
        return Clear(evidence)
    return Fired(
        cause=f"The adapter has rank {highest:,}, above the {limit:,} that {_engine(seen)} "
        "allocates for.",
        remedy=f"Start it with --max-lora-rank {_next_limit(seen, highest):,}.",
        evidence=evidence,
    )


def _next_limit(seen: Seen, rank: int) -> int:
    """The least limit that holds the rank; vLLM takes certain ones only (config/lora.py)."""
    if seen.options.engine != "vllm":
        return rank
    from ullage.adapters.engines.vllm import MAX_RANKS

    return next((limit for limit in MAX_RANKS if limit >= rank), rank)


def _wasted_rank(seen: Seen) -> Answer:
    limits = dict(seen.answer.limits)
    limit = next((v for k, v in limits.items() if "rank" in k and isinstance(v, int)), None)
    ranks = [m.rank for m in seen.adapter.modules if m.rank is not None]
    slot = seen.answer.slot_bytes
    if slot is None or limit is None or not ranks:
        return NotEvaluable(("bytes of an adapter slot",))
    highest = max(ranks)
    evidence = (
        told("slot", slot, "modelled", "bytes"),
        told("highest rank", highest, "header"),
        told("limit", limit, "engine"),
    )
    if limit < 4 * highest or limit <= 16:
        return Clear(evidence)
    return Fired(
        cause=f"Every slot is allocated for rank {limit:,} and takes {slot:,} bytes on each rank "
        f"of tensor parallelism; this adapter has rank {highest:,}.",
        remedy=f"If no other adapter needs it, start the engine with --max-lora-rank "
        f"{_next_limit(seen, highest):,}: a slot then takes a {limit // highest}th of that.",
        evidence=evidence,
    )


def _refusal(seen: Seen) -> Answer:
    message = seen.answer.message
    if message is None:
        return clear("refused", False, "engine")
    shown = message if len(message) <= 300 else message[:299] + "…"
    advice = next((advice for part, advice in _ADVICE if part in message), "")
    return Fired(
        cause=f"{_engine(seen)} refuses the adapter: {shown.rstrip('.')}.",
        remedy=advice.replace("{fix}", seen.fix) or seen.rewrite(_IF_IT_CAN),
        evidence=(told("refused", True, "engine"),),
    )


_IF_IT_CAN = "Rewrite it to what the engine reads, which is refused where it cannot be done"
# A part of what engines print → what to do about it.
_ADVICE = (
    ("does not support LoRA", MERGE),
    ("DoRA", MERGE),
    ("not run by the embedded engine", "Serve it with an engine that runs this base, or see what "
     "`ullage adapter check --engine vllm` says."),
    ("does not support LoRA bias", MERGE),
    ("bias is not supported", MERGE),
    ("Missing required configuration fields", MERGE),
    ("modules_to_save", "Serve a base that holds the saved modules, or train them with LoRA."),
    ("init_lora_weights", "Convert it with PEFT's path_initial_model_for_weight_conversion."),
    ("max_lora_rank", "Start the engine with a higher --max-lora-rank."),
    ("fused 3D MoE", "Start vLLM with --enable-mixed-moe-lora-format and load the adapter with "
     "is_3d_lora_weight true, or rewrite it expert by expert: {fix}."),
    ("vocabulary size", "Serve a base whose embeddings were resized as in training."),
    ("must match the size of tensor", "Use the base model that the adapter was trained on."),
)  # fmt: skip


RULES = (
    Rule("L001", "Adapter modules and the served module tree", Severity.error, "adapter: engine",
         why="Engines look at the last part of a name when they load an adapter, and at all of it "
         "when they apply it; a module whose whole name leads nowhere is dropped without a word.",
         fix="Rewrite the keys to the names that the engine serves, with `ullage adapter fix`.",
         source="vllm 0.32: lora/lora_model.py (check_unexpected_modules), lora/model_manager.py "
         "(activate_adapter); vllm#34186, vllm#48019",
         example="base_model.model.model.layers.0.self_attn.q_proj on a model served as "
         "language_model.model.layers…", check=_unmapped),
    Rule("L002", "Effect of the adapter", Severity.error, "adapter: engine",
         why="An adapter that changes nothing loads without an error, and its requests are "
         "answered by the base model.",
         fix="Correct the names, or train the adapter, and check again.",
         source="vllm 0.32: lora/model_manager.py, activate_adapter (a debug line at most)",
         example="an adapter saved under torch.compile: base_model.model._orig_mod.…",
         check=_no_effect),
    Rule("L003", "Scale of every module", Severity.error, "adapter: engine",
         why="The product B·A is added times alpha/r, with rsLoRA times alpha/√r, and patterns "
         "give modules their own; an engine that reads less of the configuration adds too little "
         "or too much.",
         fix="Fold the difference into B with `ullage adapter fix`, or use an engine version that "
         "reads the field.",
         source="PEFT 0.21: tuners/lora/layer.py; vllm 0.32: lora/peft_helper.py; vllm#10798, "
         "sglang#40835", example="use_rslora true on an engine that ignores it: √r too weak",
         check=_scale),
    Rule("L004", "One module, one pair of matrices", Severity.error, "adapter: engine",
         why="Two pairs that lead to one served module overwrite each other, and half of what was "
         "trained is lost.",
         fix="Save one adapter, under one name for every module.",
         source="vllm 0.32: lora/lora_model.py, from_lora_tensors",
         example="model.layers.0… and model.language_model.layers.0… in one file",
         check=_doubled),
    Rule("L005", "Modules that the engine takes", Severity.error, "adapter: engine",
         why="Towers, embeddings and modules outside --lora-target-modules pass the check of names "
         "and are then left out.",
         fix="Start the engine so that it takes them, or train without them.",
         source="vllm 0.32: lora/model_manager.py, _create_lora_modules",
         example="model.visual.blocks.0.attn.qkv without --enable-tower-connector-lora",
         check=_left_out),
    Rule("L006", "Matrices that fill their slot", Severity.error, "adapter: engine",
         why="A matrix that is too large is an error of torch's; one that is too small is copied "
         "into a corner of its slot, and the rest counts as zero.",
         fix="Use the base model that the adapter was trained on.",
         source="vllm 0.32: lora/layers/base_linear.py, set_lora",
         example="an adapter of a 1,024 wide model on a 2,048 wide one", check=_padded),
    Rule("L007", "Rank against the engine's limit", Severity.error, "adapter: engine",
         why="Slots are allocated for one greatest rank when the engine starts, by default 16 in "
         "vLLM; an adapter above it is refused.",
         fix="Raise --max-lora-rank to the next value that the engine takes.",
         source="vllm 0.32: lora/peft_helper.py, validate_legal; config/lora.py; ms-swift#4221, "
         "vllm#2847", example="r 64 with the default --max-lora-rank 16", check=_rank_limit),
    Rule("L008", "Slots and the rank that fills them", Severity.info, "adapter: engine",
         why="A slot costs memory for the greatest rank in every module, whatever the adapter "
         "holds; the memory is missing from the KV cache.",
         fix="Lower --max-lora-rank to what the adapters have.",
         source="vllm 0.32: lora/layers/*, create_lora_weights",
         example="--max-lora-rank 256 for adapters of rank 8", check=_wasted_rank),
    Rule("L009", "Loading of the adapter", Severity.error, "adapter: engine",
         why="An engine that refuses an adapter says so at the first load, which may be the first "
         "request of a customer.",
         fix="Do what the finding says for the message at hand; most names can be rewritten with "
         "`ullage adapter fix`.",
         source="vllm 0.32: lora/peft_helper.py, lora/lora_model.py, lora/model_manager.py",
         example="…q_proj.lora_A.default.weight is unsupported LoRA weight", check=_refusal),
    Rule("L010", "Modules added as training added them", Severity.error, "adapter: engine",
         why="An engine that reads A, B and alpha and passes over the rest (a bias of B, DoRA's "
         "magnitude, a base that training changed, invocation tokens) adds something that nobody "
         "trained, and says nothing.",
         fix="Merge the adapter into the base with PEFT, or convert it to plain LoRA.",
         source="sglang 0.5: srt/lora/lora.py; tensorrt-llm 1.2: lora_manager.py",
         example="init_lora_weights pissa on SGLang", check=_altered),
)  # fmt: skip

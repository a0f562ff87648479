"""Rules about an adapter and its base: sizes, layers, vocabulary, names, what is tied or shared.

Holds the checks and their words. They compare the adapter's headers with the base's spec, whatever
the engine.
"""

from __future__ import annotations

from ullage.adapters.rules.rule import Rule, Seen, clear, of_matrix, some, told
from ullage.adapters.verdict import MATCHED
from ullage.anatomy.adapters.adapter import Matrix
from ullage.findings.answer import Answer, Clear, Fired, NotEvaluable
from ullage.findings.finding import Severity


def _foreign(seen: Seen) -> Answer:
    known = [module for module, match in seen.matches if match is not None]
    strange = [m.module for m, match in seen.matches if match is None and (m.a or m.b)]
    elsewhere = {*_beyond(seen), *_of_sharing_layers(seen)}
    # An engine that keeps fused modules apart takes their parts by names that the base lacks.
    elsewhere |= {m.module for m in seen.answer.modules if m.state in MATCHED}
    strange = [name for name in strange if name not in elsewhere]
    if seen.whole:  # what is applied belongs to the base, by whatever name
        strange = []
    if seen.tree.spec.towers and strange:
        return NotEvaluable(("the modules of the base's towers",))
    if not strange:
        return clear("modules that the base has", len(known), "header")
    return Fired(
        cause=f"{len(strange):,} modules of the adapter are none of the base's: {some(strange)}.",
        remedy=seen.rewrite(
            "Use the base model that the adapter was trained on, or remove what its framework put "
            "before the names"
        ),
        evidence=(
            told("modules that the base lacks", len(strange), "header"),
            told("modules that the base has", len(known), "header"),
        ),
    )


def _beyond(seen: Seen) -> list[str]:
    """Modules of layers that the base does not have."""
    found = []
    for module, match in seen.matches:
        if match is not None:
            continue
        numbers = [part for part in module.module.split(".") if part.isdecimal()]
        if numbers and len(numbers[0]) < 8 and int(numbers[0]) >= seen.tree.num_layers:
            parts = module.module.split(".")
            parts[parts.index(numbers[0])] = "0"
            if seen.tree.find(".".join(parts)) is not None:
                found.append(module.module)
    return found


def _layers(seen: Seen) -> Answer:
    beyond = _beyond(seen)
    if not beyond:
        return clear("layers of the base", seen.tree.num_layers, "config")
    return Fired(
        cause=f"{len(beyond):,} modules belong to layers that the base lacks: it has "
        f"{seen.tree.num_layers:,}, the adapter names {some(beyond, 2)}.",
        remedy="Use the base model that the adapter was trained on; it is a larger one.",
        evidence=(
            told("modules beyond the last layer", len(beyond), "header"),
            told("layers of the base", seen.tree.num_layers, "config"),
        ),
    )


def _shapes(seen: Seen) -> Answer:
    wrong, right = [], 0
    for module, match in seen.matches:
        if match is None or module.in_features is None or module.out_features is None:
            continue
        base = match.module
        if base.kind in ("embedding", "head", "convolution"):
            continue
        meant = (base.in_features, base.out_features)
        given = (module.in_features, module.out_features)
        if given == meant:
            right += 1
        else:
            wrong.append((module.module, given, meant))
    if not wrong and not right:
        return NotEvaluable(("modules of the base with both matrices",))
    if not wrong:
        return clear("modules of the base's sizes", right, "header")
    name, given, meant = wrong[0]
    return Fired(
        cause=f"{len(wrong):,} modules have other sizes than the base's: {name} maps {given[0]:,} "
        f"to {given[1]:,} where the base maps {meant[0]:,} to {meant[1]:,}.",
        remedy="Use the base model that the adapter was trained on.",
        evidence=(
            told(f"{name}: inputs of the adapter", given[0], "header"),
            told(f"{name}: inputs of the base", meant[0], "config"),
            told("modules of other sizes", len(wrong), "header"),
        ),
    )


def _vocabulary(seen: Seen) -> Answer:
    rows = seen.tree.spec.vocab_size
    wrong = []
    looked = 0
    for module, match in seen.matches:
        if match is None or match.module.kind not in ("embedding", "head"):
            continue
        whole = (t for t in module.saved if t.key.matrix is Matrix.SAVED)
        sizes = {t.shape[0] for t in whole if len(t.shape) == 2}
        if module.in_features is not None and module.out_features is not None:
            head = match.module.kind == "head"
            sizes.add(module.out_features if head else module.in_features)
        looked += bool(sizes)
        wrong += [(module.module, size) for size in sizes if size != rows]
    if not wrong:
        return Clear((told("vocabulary of the base", rows, "config"),
                      told("adapted embeddings and heads", looked, "header")))  # fmt: skip
    name, size = wrong[0]
    return Fired(
        cause=f"{name} was trained for a vocabulary of {size:,}, the base has {rows:,}: tokens "
        "were added or removed before training.",
        remedy="Serve the base with the same vocabulary (resize its embeddings as training did and "
        "save it), with the tokenizer that lies beside the adapter.",
        evidence=(told("rows of the adapter", size, "header"),
                  told("vocabulary of the base", rows, "config")),
    )  # fmt: skip


def _named_base(seen: Seen) -> Answer:
    named, given = seen.adapter.config.base_model, seen.base.name
    if not named:
        return NotEvaluable(("base_model_name_or_path",))
    if not given:
        return NotEvaluable(("the base's name",))
    evidence = (told("base_model_name_or_path", named, "config"), told("base", given, "config"))
    if _leaf(named) == _leaf(given) or _is_file(given) or _is_path(named):
        return Clear(evidence)
    return Fired(
        cause=f"The adapter was trained on {named}, and the base is {given}: weights of the same "
        "shape are not the same weights.",
        remedy=f"Check with --base {named}, or make sure that both are the same model.",
        evidence=evidence,
    )


def _leaf(name: str) -> str:
    """The last part of a path or id, without a revision, in one case and spelling."""
    leaf = name.rstrip("/").rpartition("/")[2].partition("@")[0].lower()
    return leaf.removesuffix("_config.json").removesuffix(".json").rpartition("--")[2]


def _is_file(name: str) -> bool:
    return name.endswith((".json", ".gguf", ".safetensors")) or name.startswith((".", "/", "~"))


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _revision(seen: Seen) -> Answer:
    named = seen.adapter.config.revision
    given = seen.base.revision
    if not named:
        return clear("revision", "none named", "config")
    if given is None:
        return NotEvaluable(("the base's revision",))
    evidence = (told("revision of training", named, "config"),
                told("revision of the base", given, "config"))  # fmt: skip
    if given == named or given.startswith(named) or named.startswith(given):
        return Clear(evidence)
    return Fired(
        cause=f"The adapter was trained on revision {named}, the base is {given}.",
        remedy=f"Serve the base with --revision {named}.",
        evidence=evidence,
    )


def _tied(seen: Seen) -> Answer:
    if not seen.tree.spec.tie_embeddings:
        return clear("embeddings tied", False, "config")
    kinds = {match.module.kind for _, match in seen.matches if match is not None}
    one = kinds & {"embedding", "head"}
    tied = told("embeddings tied", True, "config")
    if len(one) != 1:
        return Clear((tied, told("adapted of embedding and head", len(one), "header")))
    which = one.pop()
    return Fired(
        cause=f"The base's embedding and head are one matrix, and the adapter changes only the "
        f"{which}: after a merge, or on an engine that holds it once, both or neither change.",
        remedy="Do not merge this adapter into the tied weight, and check the output of the engine "
        "against PEFT's; to train both, use ensure_weight_tying.",
        evidence=(tied, told("adapted", which, "header")),
    )


def _shared_keys(seen: Seen) -> Answer:
    shared = seen.tree.shared_kv
    if not shared:
        return clear("layers that share keys and values", 0, "config")
    found = _of_sharing_layers(seen)
    evidence = (told("layers that share keys and values", len(shared), "config"),
                told("of their k and v adapted", len(found), "header"))  # fmt: skip
    if not found:
        return Clear(evidence)
    return Fired(
        cause=f"{len(found):,} modules adapt keys or values of layers that use another layer's and "
        f"compute none of their own: {some(found)}.",
        remedy="They never ran in training either; leave them out of target_modules.",
        evidence=evidence,
    )


def _of_sharing_layers(seen: Seen) -> list[str]:
    """Modules of keys and values in layers that have none of their own."""
    found = []
    for module, match in seen.matches:
        parts = module.module.split(".")
        numbers = [n for n, part in enumerate(parts) if part.isdecimal() and len(part) < 8]
        if not numbers or int(parts[numbers[0]]) not in seen.tree.shared_kv:
            continue
        if match is None:
            parts[numbers[0]] = str(seen.tree.shared_kv[int(parts[numbers[0]])])
            match = seen.tree.find(".".join(parts))
        if match is not None and match.module.role in ("k", "v"):
            found.append(module.module)
    return found


def _copies(seen: Seen) -> Answer:
    kept = of_matrix(seen.adapter, Matrix.BASE)
    if not kept:
        return clear("copies of the base's weights", 0, "header")
    return Fired(
        cause=f"The adapter carries {len(kept):,} of the base's own weights ({some(kept, 2)}); "
        "engines skip them, so that the base they serve must hold the same.",
        remedy="If tokens were added in training, serve the base with the resized embeddings.",
        evidence=(told("copies of the base's weights", len(kept), "header"),),
    )


RULES = (
    Rule("L021", "Modules of the adapter and of the base", Severity.error, "adapter: base",
         why="An adapter only means something on the model it was trained on; modules that the "
         "base does not have are from another model or under another name.",
         fix="Use the right base, or correct the names.",
         source="transformers 5: named modules of the base; PEFT 0.21: utils/save_and_load.py",
         example="a GPT-2 adapter (transformer.h.0.attn.c_attn) on Llama", check=_foreign),
    Rule("L022", "Layers of the adapter and of the base", Severity.error, "adapter: base",
         why="Modules of layers beyond the base's last are dropped, and the rest was trained with "
         "them.", fix="Use the base that the adapter was trained on.",
         source="the base's num_hidden_layers", example="model.layers.40… on a model of 32 layers",
         check=_layers),
    Rule("L023", "Sizes of the adapter and of the base", Severity.error, "adapter: base",
         why="A pair of matrices fits weights of one size; on another it is refused, or worse, cut "
         "or padded.", fix="Use the base that the adapter was trained on.",
         source="headers of the adapter, spec of the base",
         example="an adapter of Llama-3.1-8B on Llama-3.2-3B", check=_shapes),
    Rule("L024", "Vocabulary of the adapter and of the base", Severity.error, "adapter: base",
         why="Training that adds tokens resizes embedding and head; on the original base the rows "
         "do not fit, or belong to other tokens.",
         fix="Serve a base that was resized in the same way.",
         source="vllm 0.32: lora/lora_model.py, from_lora_tensors; PEFT 0.21: "
         "save_embedding_layers",
         example="lora_embedding_A [8, 32064] on a vocabulary of 32000", check=_vocabulary),
    Rule("L025", "The base that the adapter names", Severity.warning, "adapter: base",
         why="Weights of the same shapes load without complaint, and the adapter then corrects "
         "errors that this model does not make.",
         fix="Serve the adapter on the base that base_model_name_or_path names.",
         source="PEFT 0.21: config.py, base_model_name_or_path",
         example="trained on Qwen/Qwen3-8B-Base, served on Qwen/Qwen3-8B", check=_named_base),
    Rule("L026", "The revision that the adapter names", Severity.warning, "adapter: base",
         why="A repository's weights can change between revisions under one name.",
         fix="Pin the base to the revision of training.",
         source="PEFT 0.21: config.py, revision", example="revision 0a1b2c3 in adapter_config.json",
         check=_revision),
    Rule("L027", "Tied embeddings adapted on both sides", Severity.info, "adapter: base",
         why="Where embedding and head are one matrix, an adapter of one of them means something "
         "else on engines that hold it once, and cannot be merged without changing the other.",
         fix="Adapt both or none (ensure_weight_tying), or serve it unmerged.",
         source="PEFT 0.21: tuners/lora/model.py, ensure_weight_tying",
         example="target_modules lm_head on a model with tie_word_embeddings", check=_tied),
    Rule("L028", "Keys and values that layers share", Severity.warning, "adapter: base",
         why="Layers that read an earlier layer's keys and values compute none of their own; "
         "adapters of theirs do nothing.",
         fix="Leave them out of target_modules.",
         source="transformers 5: Gemma-3n and Gemma-4, num_kv_shared_layers",
         example="k_proj of layer 20 of a Gemma-3n with 10 shared layers", check=_shared_keys),
    Rule("L029", "Copies of the base's weights in the adapter", Severity.info, "adapter: base",
         why="Some writers store the embedding and head that training saw beside the adapter; "
         "engines skip them and use the base's.",
         fix="Make sure that the served base holds the same rows.",
         source="PEFT 0.21: save_embedding_layers; vllm 0.32: lora/utils.py, "
         "is_base_embedding_weights", example="base_model.model.lm_head.base_layer.weight",
         check=_copies),
)  # fmt: skip

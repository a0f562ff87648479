"""Rules about an adapter's own files: variants, wrappers, halves, ranks, pickles, unread keys.

Holds the checks and their words. They look at the adapter alone.
"""

from __future__ import annotations

from ullage.adapters.rules.rule import Rule, Seen, clear, of_matrix, some, told
from ullage.anatomy.adapters.adapter import Matrix
from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Severity

# PEFT's own words before and inside a path; all others are a framework's.
_PEFT_WORDS = frozenset(("base_model", "model", "base_layer", "modules_to_save", "original_module",
                         "token_adapter", "adapter"))  # fmt: skip
# PEFT 0.21, tuners/lora/config.py: inits after which the base's own weights differ.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")


def _method(seen: Seen) -> Answer:
    kind = seen.adapter.config.peft_type
    if kind == "LORA":
        return clear("peft_type", kind, "config")
    return Fired(
        cause=f"The adapter is {kind}, not LoRA: "
        + _elsewhere(seen, "serving engines have no code for its formula, and some read it as "
                     "LoRA as far as its keys go."),
        remedy="Merge it into the base with PEFT (merge_and_unload) and serve the merged model.",
        evidence=(told("peft_type", kind, "config"),),
        severity=seen.at_most_a_hint,
    )  # fmt: skip


def _dora(seen: Seen) -> Answer:
    vectors = len(of_matrix(seen.adapter, Matrix.MAGNITUDE))
    declared = seen.adapter.config.use_dora
    evidence = (told("magnitude vectors", vectors, "header"), told("use_dora", declared, "config"))
    if not vectors and not declared:
        return Clear(evidence)
    if seen.options.engine in ("peft", "ullage"):
        return Clear(evidence)
    return Fired(
        cause=f"The adapter is DoRA ({vectors:,} magnitude vectors): the base's columns are "
        f"rescaled as well, which {seen.options.engine} does not do.",
        remedy="Merge it into the base with PEFT (merge_and_unload) and serve the merged model.",
        evidence=evidence,
    )


def _saved(seen: Seen) -> Answer:
    whole = [
        t.key.text
        for m in seen.adapter.modules
        for t in m.saved
        if t.key.matrix in (Matrix.SAVED, Matrix.TOKENS) and not t.key.text.endswith(".bias")
    ]
    evidence = (told("full weights", len(whole), "header"),
                told("modules_to_save", ", ".join(seen.adapter.config.modules_to_save) or "none",
                     "config"))  # fmt: skip
    taken = all(".score." in f".{k}" or ".classifier." in f".{k}" for k in whole)
    if not whole or seen.whole or seen.options.engine in ("peft", "ullage") or taken:
        return Clear(evidence)
    return Fired(
        cause=f"Besides LoRA the adapter holds {len(whole):,} full weights ({some(whole, 2)}), "
        f"which {seen.options.engine} does not swap per request.",
        remedy="Put them into a copy of the base and serve that, or train again with LoRA on the "
        "module instead of modules_to_save.",
        evidence=evidence,
    )


def _biases(seen: Seen) -> Answer:
    config = seen.adapter.config
    stored = len(of_matrix(seen.adapter, Matrix.BIAS_B)) + sum(
        t.key.text.endswith(".bias") and t.key.matrix is Matrix.SAVED for t in seen.adapter.tensors
    )
    evidence = (told("biases stored", stored, "header"), told("bias", config.bias, "config"),
                told("lora_bias", config.lora_bias, "config"))  # fmt: skip
    trained = stored or config.bias != "none" or config.lora_bias
    if not trained or seen.whole or seen.options.engine in ("peft", "ullage"):
        return Clear(evidence)
    return Fired(
        cause=f"Biases were trained (bias {config.bias}, lora_bias {config.lora_bias}, {stored:,} "
        f"stored), and {seen.options.engine} adds none.",
        remedy="Train with bias none and lora_bias false, or merge and serve the merged model.",
        evidence=evidence,
    )


def _variants(seen: Seen) -> Answer:
    config = seen.adapter.config
    init = config.init_lora_weights
    named = [v for v in config.variants if v not in ("dora", "rslora")]
    if isinstance(init, str) and init.lower().startswith(_CHANGED_BASE):
        named.append(f"init_lora_weights {init}")
    if config.layer_replication:
        named.append("layer_replication")
    named = list(dict.fromkeys(named))
    if not named or seen.options.engine == "peft":
        return clear("variants of LoRA", ", ".join(named) or "none", "config")
    return Fired(
        cause=f"The configuration asks for {some(named)}: the adapter is not base + scale·B·A on "
        "the original base.",
        remedy="Convert it to plain LoRA in PEFT (path_initial_model_for_weight_conversion), or "
        "serve the base that training used.",
        evidence=(told("variants of LoRA", ", ".join(named), "config"),),
    )


def _elsewhere(seen: Seen, what: str) -> str:
    """What engines do with it, and that this one does not where it does not."""
    if not seen.whole:
        return what
    return f"{what} {seen.options.engine} {seen.answer.version} applies all of it."


def _wrappers(seen: Seen) -> Answer:
    words: dict[str, int] = {}
    for tensor in seen.adapter.tensors:
        wrappers = [w for w in tensor.key.wrappers if w not in _PEFT_WORDS]
        for word in wrappers:
            words[word] = words.get(word, 0) + 1
    if not words:
        return clear("words of frameworks in the keys", 0, "header")
    found = ", ".join(f"{word} in {number:,} keys" for word, number in words.items())
    return Fired(
        cause=f"The keys still hold what a framework wrapped round the model: {found}. "
        + _elsewhere(seen, "Engines that match whole names drop such modules in silence."),
        remedy=f"Unwrap the model before save_pretrained, or rewrite the file: {seen.fix}.",
        evidence=tuple(told(word, number, "header", "keys") for word, number in words.items()),
        severity=seen.at_most_a_hint,
    )


def _adapter_name(seen: Seen) -> Answer:
    names = sorted({t.key.adapter_name for t in seen.adapter.tensors if t.key.adapter_name})
    if not names:
        return clear("adapter names in the keys", 0, "header")
    return Fired(
        cause=f"The keys carry the adapter's name ({some(names)}), as a model's own state dict "
        "does: PEFT leaves it out when it saves. "
        + _elsewhere(seen, "Serving engines read no such keys."),
        remedy=f"Save with save_pretrained, or rewrite the file: {seen.fix}.",
        evidence=(told("adapter names in the keys", ", ".join(names), "header"),),
        severity=seen.at_most_a_hint,
    )


def _halves(seen: Seen) -> Answer:
    broken = [m for m in seen.adapter.modules if m.fault is not None]
    if not broken:
        pairs = sum(m.a is not None and m.b is not None for m in seen.adapter.modules)
        return clear("whole pairs", pairs, "header")
    first = broken[0]
    return Fired(
        cause=f"{len(broken):,} modules are no pair of matrices: {first.module} {first.fault}.",
        remedy="Save the adapter again; under ZeRO-3 or FSDP gather the parameters first.",
        evidence=(told("broken modules", len(broken), "header"),),
    )


def _ranks(seen: Seen) -> Answer:
    wrong = [
        m for m in seen.adapter.modules
        if m.rank is not None and m.rank_declared is not None and m.rank != m.rank_declared
    ]  # fmt: skip
    if not wrong:
        ranks = sorted({m.rank for m in seen.adapter.modules if m.rank is not None})
        return clear("ranks", ", ".join(map(str, ranks)) or "none", "header")
    first = wrong[0]
    return Fired(
        cause=f"{len(wrong):,} modules have another rank than the configuration says: "
        f"{first.module} has {first.rank:,}, r and rank_pattern say {first.rank_declared:,}. "
        + _elsewhere(
            seen, "Engines that believe the configuration scale by alpha over the wrong rank."
        ),
        remedy="Put the rank of training into adapter_config.json (r, rank_pattern).",
        evidence=(told("rank of the matrices", first.rank, "header"),
                  told("rank declared", first.rank_declared, "config")),
        severity=seen.at_most_a_hint,
    )  # fmt: skip


def _null(seen: Seen) -> Answer:
    pairs = sum(m.b is not None for m in seen.adapter.modules)
    if not seen.null:
        return clear("modules that add something", pairs, "header")
    names = [seen.adapter.modules[number].module for number in sorted(seen.null)]
    whole = len(seen.null) == pairs
    return Fired(
        cause=f"{len(seen.null):,} of {pairs:,} modules add nothing: their B is all zeros, as "
        f"before training, or their scale is 0 ({some(names)}).",
        remedy="Train it, or look for the checkpoint that was trained."
        if whole
        else "If these modules were meant to learn, look at their learning rate and at what froze.",
        evidence=(told("modules that add nothing", len(seen.null), "header"),),
    )


def _pickle(seen: Seen) -> Answer:
    if not seen.adapter.from_pickle:
        return clear("pickled", False, "header")
    return Fired(
        cause="The weights lie in a pickle, which can run code when it is loaded; here only its "
        "opcodes were listed.",
        remedy=f"Convert it to safetensors: {seen.fix}.",
        evidence=(told("pickled", True, "header"),),
    )


def _unread(seen: Seen) -> Answer:
    unread = seen.adapter.config.unread
    if not unread:
        return clear("unknown keys", 0, "config")
    return Fired(
        cause=f"adapter_config.json has {len(unread):,} keys that are not known: {some(unread, 6)}."
        " Engines skip them, whatever they mean.",
        remedy="Look up what wrote them; if they change the formula, convert the adapter there.",
        evidence=(told("unknown keys", ", ".join(unread[:20]), "config"),),
    )


def _files(seen: Seen) -> Answer:
    missing, unused = seen.adapter.missing_files, seen.adapter.unused_files
    if not missing and not unused:
        return clear("files of weights", len(seen.adapter.files), "header")
    what = []
    if missing:
        what.append(f"{len(missing):,} files that the index names are missing ({some(missing)})")
    if unused:
        what.append(f"other files hold weights too and were not looked at ({some(unused)})")
    return Fired(
        cause=f"{'; '.join(what)[0].upper()}{'; '.join(what)[1:]}.",
        remedy="Copy the whole directory, and keep one set of weights in it.",
        evidence=(told("missing files", len(missing), "header"),
                  told("unused files", len(unused), "header")),
        severity=Severity.error if missing else None,
    )  # fmt: skip


RULES = (
    Rule("L041", "Method of the adapter", Severity.error, "adapter: files",
         why="Engines serve LoRA; IA3, VeRA, LoHa and others need their own formula.",
         fix="Merge the adapter into its base and serve the merged model.",
         source="PEFT 0.21: utils/peft_types.py", example="peft_type IA3", check=_method),
    Rule("L042", "Weight decomposition (DoRA)", Severity.error, "adapter: files",
         why="DoRA rescales the base's columns by a trained vector; without it the adapter is "
         "another one.", fix="Merge it, or train without use_dora.",
         source="vllm 0.32: lora/peft_helper.py, _validate_features; vllm#6983",
         example="…mlp.down_proj.lora_magnitude_vector", check=_dora),
    Rule("L043", "Full weights beside LoRA", Severity.error, "adapter: files",
         why="modules_to_save are whole matrices; engines that batch adapters add low-rank "
         "products and swap nothing else.",
         fix="Serve a base that holds them, or train the module with LoRA.",
         source="vllm 0.32: lora/peft_helper.py; vllm#9280",
         example="base_model.model.lm_head.weight", check=_saved),
    Rule("L044", "Trained biases", Severity.error, "adapter: files",
         why="Biases of the base (bias all, lora_only) and of B (lora_bias) are added by PEFT and "
         "by no serving engine.", fix="Train without, or merge.",
         source="vllm 0.32: lora/peft_helper.py, validate_legal", example="bias lora_only",
         check=_biases),
    Rule("L045", "Variants that change the formula or the base", Severity.error, "adapter: files",
         why="PiSSA, OLoRA, CorDA and LoftQ train against a changed base; activated, quantised and "
         "block-diagonal LoRA compute something else than base + scale·B·A.",
         fix="Convert to plain LoRA with PEFT.",
         source="vllm 0.32: lora/peft_helper.py, _init_is_supported; PEFT 0.21: "
         "tuners/lora/config.py", example="init_lora_weights pissa", check=_variants),
    Rule("L046", "Keys free of what wrapped the model", Severity.warning, "adapter: files",
         why="torch.compile, FSDP, activation checkpointing and DDP each put a word into every "
         "name; some engines skip it, others drop the module.",
         fix="Unwrap before saving.", source="torch 2.13: _orig_mod, _fsdp_wrapped_module, "
         "_checkpoint_wrapped_module, module", example="base_model.model._orig_mod.model.layers…",
         check=_wrappers),
    Rule("L047", "Keys free of the adapter's name", Severity.warning, "adapter: files",
         why="A PEFT model's state dict names the adapter in every key; a saved adapter does not, "
         "and engines refuse it.", fix="Save with save_pretrained.",
         source="PEFT 0.21: utils/save_and_load.py; vllm 0.32: lora/utils.py, "
         "parse_fine_tuned_lora_name", example="…q_proj.lora_A.default.weight",
         check=_adapter_name),
    Rule("L048", "Both matrices of every module", Severity.error, "adapter: files",
         why="A without B, matrices without elements and pairs of two ranks are what an "
         "interrupted or sharded save leaves.", fix="Gather the parameters and save again.",
         source="headers", example="lora_A without lora_B", check=_halves),
    Rule("L049", "Ranks of matrices and configuration", Severity.error, "adapter: files",
         why="Engines take alpha/r from the configuration; where its r is not the matrices' rank, "
         "the scale is wrong or the load fails.",
         fix="Write the rank of training into adapter_config.json.",
         source="PEFT 0.21: tuners/lora/layer.py, update_layer",
         example="r 4 with lora_A of 8 rows", check=_ranks),
    Rule("L050", "Modules that add something", Severity.warning, "adapter: files",
         why="B starts as zeros; where it still is, nothing was learned.",
         fix="Use the trained checkpoint.", source="PEFT 0.21: tuners/lora/layer.py, "
         "reset_lora_parameters", example="an adapter saved before the first step", check=_null),
    Rule("L051", "Weights in safetensors", Severity.warning, "adapter: files",
         why="A pickle can run code on every machine that loads it.",
         fix="Convert to safetensors.", source="Python: pickle; safetensors",
         example="adapter_model.bin", check=_pickle),
    Rule("L052", "Configuration that is understood", Severity.info, "adapter: files",
         why="A key that nobody reads may have meant something in training.",
         fix="Find out what wrote it.", source="PEFT 0.21: tuners/lora/config.py",
         example="a key of a newer PEFT", check=_unread),
    Rule("L053", "One whole set of weight files", Severity.warning, "adapter: files",
         why="Engines look for one file by name; shards and left-over files are not read, or read "
         "by one engine and not by another.", fix="Keep adapter_model.safetensors alone.",
         source="vllm 0.32: lora/lora_model.py, from_local_checkpoint",
         example="adapter_model.bin beside adapter_model.safetensors", check=_files),
)  # fmt: skip

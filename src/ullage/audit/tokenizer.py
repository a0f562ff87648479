"""Rules about the tokenizer and generation settings against the model's vocabulary.

Holds rules that read config.json and its side files; the vocabulary itself (tokenizer.json, often
many megabytes) is not opened, added tokens are read from tokenizer_config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject
from ullage.findings.finding import Evidence, Severity

CHAT_WORDS = ("instruct", "chat", "-it", "assistant", "-thinking")
ENDS = "eos_token_id"
TEXT_TOKENS = tuple(f"{word}_token_id" for word in ("bos", "eos", "pad", "decoder_start", "unk"))
"""Tokens that are looked up in the embedding; others mark places for images or sounds."""


def _ids(value: object) -> tuple[int, ...]:
    """Token ids of one setting: a number or a list of them; anything else holds none."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def _special_ids(subject: Subject) -> Iterator[tuple[str, int]]:
    """Every setting that names a token, with its ids: (where, id)."""
    places: list[tuple[str, Mapping[str, object]]] = [("config: ", subject.config)]
    if subject.prefix:
        places.append((f"config: {subject.prefix}", subject.text))
    if subject.model.files.generation_config is not None:
        places.append(("generation_config.json: ", subject.model.files.generation_config))
    for place, settings in places:
        for key, value in settings.items():
            if key.endswith(("token_id", "token_index")) and not key.startswith("_"):
                yield from ((place + key, token) for token in _ids(value))


def _key(where: str) -> str:
    return where.rsplit(": ", 1)[-1].rsplit(".", 1)[-1]


def _rows(subject: Subject) -> int:
    """Rows of the largest embedding: speech models have one for text and one for sounds."""
    sizes = [subject.spec.vocab_size]
    for place in (subject.config, subject.text):
        for key, value in place.items():
            if key.endswith("vocab_size") and isinstance(value, int):
                sizes.append(value)
    return max(sizes)


def _ids_exist(subject: Subject) -> Verdict:
    rows = _rows(subject)
    facts = [subject.fact("vocab_size", rows, unit="rows")]
    beyond = []
    for where, token in _special_ids(subject):
        facts.append(Evidence(_key(where), token, "token id", where))
        # Negative ids are markers outside the vocabulary (-1, -200 for an image), never looked up.
        if token >= rows:
            beyond.append((_key(where) not in TEXT_TOKENS, where, token))
    if beyond:
        is_marker, where, token = min(beyond)
        return Fired(
            f"{where} is {token}, but the embedding has {rows:,} rows (ids 0 to {rows - 1}): "
            + (
                "engines must replace it before the lookup, and those that do not read past the "
                "table."
                if is_marker
                else "looking it up reads past the table."
            ),
            "Correct the id in that file, or resize the embedding and vocab_size together.",
            tuple(facts),
            Severity.warning if is_marker else None,
        )
    if len(facts) == 1:
        return NotEvaluable(("special token ids in config.json or generation_config.json",))
    return Clear(tuple(facts))


def _added_tokens(subject: Subject) -> dict[str, int]:
    """Text → id of the tokens that tokenizer_config.json adds."""
    added = (subject.model.files.tokenizer_config or {}).get("added_tokens_decoder")
    if not isinstance(added, Mapping):
        return {}
    found = {}
    for key, token in added.items():
        text = token.get("content") if isinstance(token, Mapping) else None
        if isinstance(text, str) and key.isascii() and key.isdecimal() and len(key) < 12:
            found[text] = int(key)
    return found


def _token_text(subject: Subject, key: str) -> str | None:
    token = (subject.model.files.tokenizer_config or {}).get(key)
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _ends_agree(subject: Subject) -> Verdict:
    generation = subject.model.files.generation_config
    configured = _ids(subject.config.get(ENDS)) or _ids(subject.text.get(ENDS))
    generated = _ids((generation or {}).get(ENDS))
    text = _token_text(subject, "eos_token")
    spoken = _added_tokens(subject).get(text) if text is not None else None
    known = [
        ("config.json", configured),
        ("generation_config.json", generated),
        ("tokenizer_config.json", () if spoken is None else (spoken,)),
    ]
    given = [(file, ids) for file, ids in known if ids]
    if len(given) < 2:
        lacking = [f"{ENDS} in {file}" for file, ids in known if not ids]
        return NotEvaluable(tuple(lacking))
    facts = tuple(Evidence(ENDS, ", ".join(map(str, ids)), "token id", file) for file, ids in given)
    stops = set(generated or configured)
    for file, ids in given:
        strays = [token for token in ids if token not in stops]
        if strays:
            reference = "generation_config.json" if generated else "config.json"
            return Fired(
                f"{file} ends a text with token {strays[0]}, which is not among the stop tokens of "
                f"{reference} ({', '.join(map(str, sorted(stops)))}): a server that stops on one "
                "list runs past the end that the other means.",
                f"List every end token under {ENDS} in generation_config.json, for example "
                f"{sorted(stops | set(strays))}.",
                facts,
            )
    return Clear(facts)


def _ends_somewhere(subject: Subject) -> Verdict:
    if subject.spec.kind == "encoder":
        return Clear((Evidence("kind", "encoder", "", "spec"),))
    found = [(where, token) for where, token in _special_ids(subject) if where.endswith(ENDS)]
    if found:
        return Clear(tuple(Evidence(ENDS, token, "token id", where) for where, token in found))
    files = subject.model.files
    if files.generation_config is None:
        return NotEvaluable(("eos_token_id in config.json", "generation_config.json"))
    text = _token_text(subject, "eos_token")
    if text is not None:
        return Clear((Evidence("eos_token", text, "", "tokenizer_config.json"),))
    return Fired(
        "Neither config.json nor generation_config.json nor tokenizer_config.json names a token "
        "that ends a text: every request runs to its max_tokens.",
        "Set eos_token_id in generation_config.json to the token that the model was trained to "
        "end with.",
        (Evidence(ENDS, None, "", "config.json, generation_config.json"),),
    )


def _pad_is_end(subject: Subject) -> Verdict:
    config, text = subject.config, subject.text
    pads = _ids(config.get("pad_token_id")) or _ids(text.get("pad_token_id"))
    ends = _ids(config.get(ENDS)) or _ids(text.get(ENDS))
    if not ends:
        return NotEvaluable((f"{ENDS} in config.json",))
    facts = (
        subject.fact("pad_token_id", pads[0] if pads else None),
        subject.fact(ENDS, ", ".join(map(str, ends))),
    )
    if pads and pads[0] in ends:
        return Fired(
            f"pad_token_id {pads[0]} is also an end token: training code that masks padding out of "
            "the loss then never teaches the model to stop.",
            "Serving needs no change. Before training, give padding a token of its own or mask by "
            "attention_mask instead of by id.",
            facts,
        )
    return Clear(facts)


def _chat_template(subject: Subject) -> Verdict:
    files, kind = subject.model.files, subject.spec.kind
    if kind != "decoder":
        return Clear((Evidence("kind", f"{kind}: takes no chats", "", "spec"),))
    if files.kind == "gguf" and subject.model.checkpoint is not None:
        template = dict(subject.model.checkpoint.metadata).get("tokenizer.chat_template")
        if template:
            return Clear((Evidence("chat template", len(template), "characters", "header"),))
    elif files.tokenizer_config is None and files.chat_template is None:
        return NotEvaluable(("tokenizer_config.json or chat_template.jinja",))
    if files.chat_template is not None:
        source = files.chat_template_file or "tokenizer_config.json"
        return Clear((Evidence("chat template", len(files.chat_template), "characters", source),))
    word = next((w for w in CHAT_WORDS if w in files.path.name.lower()), None)
    named = f" although {word!r} in its name promises a chat model" if word else ""
    return Fired(
        f"There is no chat template{named}: /v1/chat/completions answers 400, and clients that "
        "build prompts themselves may not match the training format.",
        "Put the model's own chat_template.jinja beside config.json, or pass --chat-template; for "
        "a base model use /v1/completions.",
        (Evidence("chat template", None, "", "tokenizer_config.json, chat_template.jinja"),),
        Severity.warning if word else None,
    )


def _added_tokens_fit(subject: Subject) -> Verdict:
    added, rows = _added_tokens(subject), subject.spec.vocab_size
    if not added:
        return NotEvaluable(("added_tokens_decoder in tokenizer_config.json",))
    text, largest = max(added.items(), key=lambda item: item[1])
    facts = (
        Evidence("largest added token", largest, "token id", "tokenizer_config.json"),
        subject.fact("vocab_size", rows, unit="rows"),
    )
    if largest >= rows:
        return Fired(
            f"The tokenizer can produce token {largest} ({text[:40]!r}), but the embedding has "
            f"{rows:,} rows: such a prompt reads past the table.",
            f"Use the tokenizer that belongs to this checkpoint, or resize the embedding to at "
            f"least {largest + 1} rows and set vocab_size.",
            facts,
        )
    return Clear(facts)


RULES = (
    Rule(
        id="A101",
        title="Special token ids against the vocabulary",
        severity=Severity.error,
        category="tokenizer",
        why="A token id is a row of the embedding. One beyond the last row reads foreign memory or "
        "stops the server at the first prompt that contains it.",
        fix="Correct the id, or resize the embedding and vocab_size together.",
        source="transformers 5.24 generation settings; torch.nn.Embedding",
        example="eos_token_id 151936 with vocab_size 151936",
        check=_ids_exist,
    ),
    Rule(
        id="A102",
        title="End tokens across files",
        severity=Severity.warning,
        category="tokenizer",
        why="vLLM stops on the ids of generation_config.json and of the tokenizer, other servers "
        "on config.json. Where they differ, a chat runs on after its end in some of them.",
        fix="List every end token in generation_config.json.",
        source="vllm 0.32: --generation-config auto; transformers 5.24 GenerationConfig",
        example="eos_token_id 2 in config.json, 32000 in generation_config.json",
        check=_ends_agree,
    ),
    Rule(
        id="A103",
        title="A token that ends a text",
        severity=Severity.warning,
        category="tokenizer",
        why="Without an end token each request runs to its limit, which costs tokens and KV.",
        fix="Set eos_token_id in generation_config.json.",
        source="transformers 5.24 GenerationConfig; vllm 0.32 SamplingParams",
        example="a directory whose three files name no end token",
        check=_ends_somewhere,
    ),
    Rule(
        id="A104",
        title="Padding token",
        severity=Severity.info,
        category="tokenizer",
        why="Serving ignores padding, but training code that drops the pad id from the loss also "
        "drops the end token when they are the same.",
        fix="Give padding its own token before training.",
        source="transformers 5.24 data collators, which set pad ids to -100",
        example="pad_token_id 2 with eos_token_id 2",
        check=_pad_is_end,
    ),
    Rule(
        id="A105",
        title="Chat template",
        severity=Severity.info,
        category="tokenizer",
        why="Chat requests are turned into text by the template. Without one the server refuses "
        "them; a guessed one does not match training.",
        fix="Ship chat_template.jinja with the checkpoint.",
        source="transformers 5.24 apply_chat_template, which has no default template any more",
        example="tokenizer_config.json without chat_template in a directory named *-Instruct",
        check=_chat_template,
    ),
    Rule(
        id="A106",
        title="Added tokens against the vocabulary",
        severity=Severity.error,
        category="tokenizer",
        why="Tokens that were added to the tokenizer need rows in the embedding.",
        fix="Use the tokenizer of this checkpoint, or resize the embedding.",
        source="transformers 5.24 tokenizer_config.json, added_tokens_decoder",
        example="an added token with id 32000 on a model of 32000 rows",
        check=_added_tokens_fit,
    ),
)

"""Rules about what a checkpoint's files make of an answer: the tokens it may have, their ids.

Holds generation_config.json's limits and the vocabulary of tokenizer.json, which is scanned and not
parsed (`vocabulary.py`). Special tokens are `tokenizer.py`'s.
"""

from __future__ import annotations

import json

from ullage.audit.launch_flags import flag_fact
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject
from ullage.findings.finding import Evidence, Severity
from ullage.launch.launch import Launch

FILE = "generation_config.json"


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _answer_limit(subject: Subject) -> Verdict:
    if subject.spec.kind == "encoder":
        return Clear((Evidence("kind", "encoder", "", "spec"),))
    files, launch = subject.model.files, subject.launch
    facts: tuple[Evidence, ...] = ()
    if launch is not None and launch.engine == "vllm":
        source, why, problem = _replaced(launch)
        if problem:
            return NotEvaluable((problem,))
        if why is not None:
            facts = (why,)
        if source is not None:
            return _judge_limit(subject, source, facts, ceiling=True)
        if why is not None:
            return Clear(facts)
    if files.generation_config is None:
        return NotEvaluable((FILE,))
    limit = _whole(files.generation_config.get("max_new_tokens"))
    if limit is not None:
        if missing := subject.missing_engine_rules():
            return NotEvaluable(missing)
        fact = Evidence("max_new_tokens", limit, "tokens", FILE)
        return _judge_limit(subject, limit, (fact,), ceiling=False)
    whole = _whole(files.generation_config.get("max_length"))
    facts = (
        Evidence("max_new_tokens", None, "tokens", FILE),
        Evidence("max_length", whole, "tokens", FILE),
    )
    length = subject.served_length
    if whole is None or length is None or whole >= length:
        return Clear(facts)
    return Fired(
        f"{FILE} sets max_length {whole:,}: generate() of transformers stops there, the prompt "
        f"counted, though {length:,} tokens are served. vLLM does not read the key.",
        "Take max_length out of the file, or set max_new_tokens to what an answer may need.",
        (*facts, Evidence("longest request", length, "tokens", subject.length_source())),
        Severity.info,
    )


def _replaced(launch: Launch) -> tuple[int | None, Evidence | None, str]:
    """(a limit that flags set, the flag that replaces the file, what keeps it unknown)."""
    for flag in launch.flags:
        if flag.name == "--override-generation-config.":
            return None, None, f"the settings that {flag.spelling} leads to"
    if launch.absent_unknown:
        return None, None, f"the flags in {launch.absent_unknown[0]}"
    override = launch.given("--override-generation-config")
    if override is not None:
        try:
            settings = json.loads(override.values[0]) if override.values else None
        except (ValueError, RecursionError):
            settings = None
        if override.open or not isinstance(settings, dict):
            return None, None, f"what {override.spelling} says"
        limit = _whole(settings.get("max_new_tokens"))
        if limit is not None:
            fact = Evidence("max_new_tokens", limit, "tokens", f"flag: {override.spelling}")
            return limit, fact, ""
    given = launch.given("--generation-config")
    if given is not None and (given.open or given.values not in (("auto",), ("vllm",))):
        return None, None, f"the generation settings that {given.spelling} names"
    if given is not None and given.values == ("vllm",):
        return None, flag_fact(launch, given, "--generation-config"), ""
    return None, None, ""


def _judge_limit(
    subject: Subject, limit: int, facts: tuple[Evidence, ...], *, ceiling: bool
) -> Verdict:
    """A limit of vLLM's against the length: a `ceiling` holds whatever a request asks for."""
    length = subject.served_length
    if length is None or subject.deployment.max_model_len == -1:
        return NotEvaluable(("the length that is served (--max-model-len)",))
    facts = (*facts, Evidence("longest request", length, "tokens", subject.length_source()))
    if limit >= length:
        return Clear(facts)
    if ceiling:
        return Fired(
            f"--override-generation-config caps every answer at {limit:,} tokens, whatever "
            f"max_tokens a request asks for, and requests of {length:,} tokens are served: longer "
            'answers end with finish_reason "length".',
            "Take max_new_tokens out of --override-generation-config, or raise it to the longest "
            "answer that is wanted.",
            facts,
        )
    return Fired(
        f"{FILE} sets max_new_tokens {limit:,}: vLLM 0.32 makes it the max_tokens of every request "
        f'that names none, and cuts such answers off with finish_reason "length", though '
        f"{length:,} tokens are served.",
        "Send max_tokens with each request, or start with --generation-config vllm, or take "
        f"max_new_tokens out of {FILE}.",
        facts,
    )


def _vocabulary(subject: Subject) -> Verdict:
    files, rows = subject.model.files, subject.spec.vocab_size
    if files.kind != "directory" or files.tokenizer_json_bytes is None:
        return NotEvaluable(("tokenizer.json",))
    from ullage.audit.vocabulary import read_vocabulary  # few audits have the file

    found = read_vocabulary(files.path / "tokenizer.json")
    if isinstance(found, str):
        return NotEvaluable((found,))
    base, added = found.largest_base, found.largest_added
    facts = (
        Evidence("largest base token", base, "token id", "tokenizer.json"),
        Evidence("largest added token", added, "token id", "tokenizer.json"),
        subject.fact("vocab_size", rows, unit="rows"),
    )
    largest = max(base if base is not None else -1, added if added is not None else -1)
    if largest < rows:
        return Clear(facts)
    kind = "an added token" if largest == added else "a token of the base vocabulary"
    return Fired(
        f"tokenizer.json holds {kind} with id {largest:,}, but the embedding has {rows:,} rows "
        f"(ids 0 to {rows - 1:,}): a text that contains it reads past the table.",
        f"Use the tokenizer that belongs to this checkpoint, or resize the embedding to at least "
        f"{largest + 1:,} rows and set vocab_size.",
        facts,
    )


RULES = (
    Rule(
        id="A107",
        title="Vocabulary of tokenizer.json against the embedding",
        severity=Severity.error,
        category="tokenizer",
        why="Every id that the tokenizer can give is a row of the embedding, those of the base "
        "vocabulary too. One beyond the last row reads foreign memory or stops the server.",
        fix="Use the tokenizer of this checkpoint, or resize the embedding and vocab_size.",
        source="tokenizers' tokenizer.json: model.vocab and added_tokens; torch.nn.Embedding",
        example="a tokenizer.json whose largest id is 32000 on a model of 32000 rows",
        check=_vocabulary,
    ),
    Rule(
        id="A108",
        title="Tokens that an answer may have",
        severity=Severity.warning,
        category="tokenizer",
        why="vLLM takes max_new_tokens of generation_config.json as the max_tokens of requests "
        "that name none; given by --override-generation-config it caps all of them. Answers then "
        "stop in the middle without an error.",
        fix="Send max_tokens, or start with --generation-config vllm.",
        source="vllm 0.32: config/model.py, get_diff_sampling_param; "
        "entrypoints/serve/utils/api_utils.py, get_max_tokens",
        example="max_new_tokens 2048 in generation_config.json of a model of 131072 positions",
        check=_answer_limit,
    ),
)

"""The flags that an engine's server knows, and the words of a command read by them.

Holds the recorded tables (`*_flags.tsv`) and argparse's way of matching: `--a b`, `--a=b`,
underscores, unique beginnings, dotted JSON keys. What a flag means is `settings.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from ullage.launch.launch import EngineName, Given, Trouble, Word

Arity = Literal["none", "one", "optional", "many", "any"]
VERSIONS = {"vllm": "0.32", "sglang": "0.5.23"}
"""The version of each recorded table: vLLM's from its parser, SGLang's from its sources. SGLang
renames flags between its last numbers, so there all three count."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag that the server's parser knows. `choices` is empty where any value goes.

    `kind` ends in `?` where the parser takes an empty text or `None` for "not set".
    """

    name: str
    names: tuple[str, ...]
    arity: Arity
    kind: str
    choices: tuple[str, ...]


@cache
def known_flags(engine: EngineName) -> Mapping[str, Flag]:
    """Every spelling → its flag, of the version in VERSIONS."""
    found: dict[str, Flag] = {}
    text = Path(__file__).with_name(f"{engine}_flags.tsv").read_text("utf-8")
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        names_text, arity, kind, choices = line.split("\t")
        names = tuple(names_text.split())
        long = next((n for n in names if n.startswith("--")), names[0])
        assert arity in ("none", "one", "optional", "many", "any"), line
        flag = Flag(long, names, arity, kind, tuple(choices.split()))  # type: ignore[arg-type]
        found.update(dict.fromkeys(names, flag))
    return found


def read_flags(engine: EngineName, words: Sequence[Word]) -> tuple[list[Given], list[Word]]:
    """The flags that the words give, and the words that belong to none, in order."""
    given: list[Given] = []
    strays: list[Word] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not _is_flag(word):
            strays.append(word)
            continue
        spelling, equals, attached = word.text.partition("=")
        if word.open and not equals:
            strays.append(word)  # the variable is in the flag's own name
            continue
        name, flag, trouble, negated = _match(engine, spelling)
        if not equals and spelling[:2] in known_flags(engine) and trouble == "unknown":
            # argparse reads -n4 as -n 4
            name, flag, trouble, negated = _match(engine, spelling[:2])
            equals, attached = "=", spelling[2:]
        values: list[Word] = [Word(attached, word.line, word.open)] if equals else []
        if flag is None:
            if not equals and position < len(words) and not _is_flag(words[position]):
                values.append(words[position])  # most flags take one value
                position += 1
        elif not equals:
            while position < len(words) and _takes(flag, len(values), words[position]):
                values.append(words[position])
                position += 1
        if flag is not None:
            trouble = trouble or _count_trouble(flag, len(values), bool(equals))
        opened = next((value.open for value in values if value.open), "")
        texts = tuple(value.text for value in values)
        if flag is not None and flag.arity == "none" and not equals:
            texts = ("false",) if negated else ("true",)
        given.append(Given(name, spelling, texts, word.line, opened, trouble))
    return given, strays


def _is_flag(word: Word) -> bool:
    text = word.text
    return len(text) > 1 and text[0] == "-" and not _is_number(text)


def _is_number(text: str) -> bool:
    return text[1:].replace(".", "", 1).isdecimal()


def _takes(flag: Flag, already: int, word: Word) -> bool:
    if _is_flag(word) or flag.arity == "none":
        return False
    return already == 0 or flag.arity in ("many", "any")


def _count_trouble(flag: Flag, values: int, attached: bool) -> Trouble:
    if flag.arity == "none":
        return "takes no value" if attached else ""
    return "no value" if values == 0 and flag.arity in ("one", "many") else ""


@lru_cache(4096)
def _match(engine: EngineName, spelling: str) -> tuple[str, Flag | None, Trouble, bool]:
    """(the flag's own name, the flag, what is wrong, whether `--no-` negates it)."""
    table = known_flags(engine)
    if engine == "vllm" and spelling.startswith("-O") and not spelling.startswith("--"):
        return "--optimization-level", None, "", False
    text, dot, _ = spelling.partition(".")
    if text.startswith("--") and (engine == "vllm" or text in table):
        text = text.replace("_", "-") if engine == "vllm" else text
    flag = table.get(text)
    if flag is None and len(text.strip("-")) > 0:
        starts = {name for name in table if name.startswith(text)}
        matched = {table[name] for name in starts}
        if len(starts) > 1:
            return "", None, "ambiguous", False
        if len(matched) == 1:
            text = starts.pop()
            flag = matched.pop()
    if flag is None:
        return "", None, "unknown", False
    if dot:  # --compilation-config.mode 3: a key of the flag's JSON value
        return f"{flag.name}.", Flag(flag.name, flag.names, "one", "text", ()), "", False
    return flag.name, flag, "", text.startswith("--no-") and flag.name != text


def nearest(engine: EngineName, spelling: str) -> str:
    """The known long flag whose spelling is nearest, "" when none is near."""
    from difflib import get_close_matches  # only a finding needs it

    names = [name for name in known_flags(engine) if name.startswith("--")]
    return next(iter(get_close_matches(spelling.replace("_", "-"), names, 1, 0.75)), "")

"""Text to tokens and back: a `tokenizers` tokenizer, its special tokens and its chat template.

From tokenizer.json and its side files, or built out of GGUF metadata (byte-level BPE). Templates
run in jinja2's sandbox; nothing else of a checkpoint is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from ullage.errors import BadInput, MalformedCheckpoint, UnsupportedModel

if TYPE_CHECKING:
    from ullage.engine.weights import GgufStore

Message = Mapping[str, Any]


class TemplateError(BadInput):
    """The chat template refused the messages, or there is no template."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """`eos_ids` end a generation; `bos_id` is put in front by `encode` when `adds_bos`.

    `add_special` in `encode` applies what tokenizer.json's post-processor adds.
    """

    fast: FastTokenizer
    eos_ids: frozenset[int]
    bos_token: str | None = None
    eos_token: str | None = None
    adds_bos_id: int | None = None
    chat_template: str | None = None

    @property
    def vocab_size(self) -> int:
        return self.fast.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in the text are recognised."""
        ids: list[int] = self.fast.encode(text, add_special_tokens=add_special).ids
        if add_special and self.adds_bos_id is not None:
            return [self.adds_bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text: str = self.fast.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_text(self, token_id: int) -> str:
        """One token on its own, special ones by name."""
        return self.decode([token_id], skip_special=False)

    def stream(self, stop: Sequence[str]) -> TextStream:
        return TextStream(self, tuple(stop))

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """The prompt text of a conversation. Raises TemplateError with the template's own words."""
        if self.chat_template is None:
            raise TemplateError("this model has no chat template", field="messages")
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise TemplateError(str(message), field="messages")

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        environment.globals["raise_exception"] = raise_exception
        try:
            return environment.from_string(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token or "",
                eos_token=self.eos_token or "",
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateError(
                f"the chat template fails: {type(error).__name__}: {error}", field="messages"
            ) from error


@dataclass(slots=True)
class TextStream:
    """One answer's text as its tokens come: whole characters only, and never past a stop string.

    Text that may still turn out to be the start of a stop string is held back.
    """

    tokenizer: Tokenizer
    stop: tuple[str, ...]
    stopped: bool = False
    _ids: list[int] = field(default_factory=list)
    _stream: DecodeStream = field(default_factory=lambda: DecodeStream(skip_special_tokens=True))
    _text: str = ""
    _sent: int = 0

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that is now certain. Sets `stopped` at a stop string."""
        self._ids.append(token_id)
        self._add(self._stream.step(self.tokenizer.fast, token_id) or "")
        return self._take(len(self._text) - self._held_back())

    def close(self) -> str:
        """The rest: text held back, and bytes that never became a whole character."""
        if not self.stopped:
            whole = self.tokenizer.decode(self._ids)
            if whole.startswith(self._text):
                self._add(whole[len(self._text) :])
        return self._take(len(self._text))

    def _add(self, piece: str) -> None:
        if self.stopped or not piece:
            return
        # A stop string may have begun in text that was held back, not before.
        self._text += piece
        found = [at for stop in self.stop if (at := self._text.find(stop, self._sent)) >= 0]
        if found:
            self.stopped = True
            self._text = self._text[: min(found)]

    def _held_back(self) -> int:
        """Length of the longest tail of the text that begins a stop string."""
        if self.stopped:
            return 0
        unsent = len(self._text) - self._sent
        longest = 0
        for stop in self.stop:
            for size in range(min(len(stop) - 1, unsent), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _take(self, end: int) -> str:
        piece = self._text[self._sent : end]
        self._sent = max(end, self._sent)
        return piece


# --- from a directory ----------------------------------------------------------------------------


def load_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """From tokenizer.json, tokenizer_config.json, generation_config.json and config.json.

    Raises MalformedCheckpoint when tokenizer.json is absent or unreadable, or knows ids that the
    model has no row for.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise MalformedCheckpoint(
            "missing",
            file=path,
            expected="the model's tokenizer (sentencepiece models alone are not read)",
        )
    try:
        fast = FastTokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise MalformedCheckpoint(f"not a tokenizer: {error}", file=path) from error
    fast.no_truncation()
    fast.no_padding()
    settings = _json(directory / "tokenizer_config.json")
    eos_token = _token_text(settings.get("eos_token"))
    eos_ids = _eos_ids(directory)
    if not eos_ids and eos_token is not None and (found := fast.token_to_id(eos_token)) is not None:
        eos_ids = frozenset({found})
    if (out_of_range := [i for i in eos_ids if i >= vocab_size]) != []:
        raise MalformedCheckpoint(
            f"{out_of_range[0]}",
            file=directory,
            field="eos_token_id",
            expected=f"an id below vocab_size {vocab_size}",
        )
    return Tokenizer(
        fast,
        eos_ids,
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=eos_token,
        chat_template=_chat_template(directory, settings),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValueError) as error:
        raise MalformedCheckpoint(f"not JSON: {error}", file=path) from error
    if not isinstance(value, dict):
        raise MalformedCheckpoint(type(value).__name__, file=path, expected="a JSON object")
    return value


def _token_text(value: object) -> str | None:
    """A special token as tokenizer_config.json writes it: a string, or an object with content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(directory: Path) -> frozenset[int]:
    """generation_config.json decides before config.json, as in transformers."""
    for name in ("generation_config.json", "config.json"):
        config = _json(directory / name)
        value = config.get("eos_token_id")
        if value is None and isinstance(config.get("text_config"), dict):
            value = config["text_config"].get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ids = frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool))
        if ids:
            return ids
    return frozenset()


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


# --- from GGUF metadata --------------------------------------------------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AROUND_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = _CONTRACTIONS + _AROUND_WORDS + digits + _AFTER_DIGITS
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# tokenizer.ggml.pre → how text is cut before merging (llama.cpp's llama-vocab.cpp names them), and
# whether a piece that is a token already is taken without merging.
_PRE_TOKENIZERS: Mapping[str, tuple[Any, bool]] = {
    "default": (_gpt2, False),
    "gpt-2": (_gpt2, False),
    "smollm": (_smollm, False),
    "llama-bpe": (lambda: _split(r"\p{N}{1,3}"), True),
    "qwen2": (lambda: _split(r"\p{N}"), False),
}
_TOKEN_CONTROL, _TOKEN_USER_DEFINED = 3, 4


def gguf_tokenizer(store: GgufStore) -> Tokenizer:
    """A byte-level BPE tokenizer out of a GGUF file's metadata.

    Raises UnsupportedModel for other tokenizer models, MalformedCheckpoint for missing lists.
    """
    model = store.metadata("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModel(
            f"{model!r} is not run by the embedded engine",
            file=store.place,
            field="tokenizer.ggml.model",
            expected="'gpt2' (byte-level BPE); or serve the directory with its tokenizer.json",
        )
    pre = store.metadata("tokenizer.ggml.pre") or "default"
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{pre!r} is not known to the embedded engine",
            file=store.place,
            field="tokenizer.ggml.pre",
            expected="one of " + ", ".join(sorted(_PRE_TOKENIZERS)),
        )
    tokens = _required(store, "tokenizer.ggml.tokens")
    merges = _required(store, "tokenizer.ggml.merges")
    pre_tokenizer, ignore_merges = _PRE_TOKENIZERS[pre]
    fast = FastTokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[_pair(store, merge) for merge in merges],
            ignore_merges=ignore_merges,
        )
    )
    if pre == "qwen2":
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizer()
    fast.decoder = decoders.ByteLevel()
    kinds = store.metadata("tokenizer.ggml.token_type") or []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_TOKEN_CONTROL, _TOKEN_USER_DEFINED):
            added = AddedToken(token, normalized=False, special=kind == _TOKEN_CONTROL)
            fast.add_special_tokens([added]) if added.special else fast.add_tokens([added])
    return _with_specials(store, fast, tokens)


def _with_specials(store: GgufStore, fast: FastTokenizer, tokens: Sequence[str]) -> Tokenizer:
    def token_id(name: str) -> int | None:
        value = store.metadata(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if not 0 <= value < len(tokens):
            raise MalformedCheckpoint(
                str(value),
                file=store.place,
                field=f"tokenizer.ggml.{name}_token_id",
                expected=f"an id below {len(tokens)}",
            )
        return int(value)

    bos, eos, eot = token_id("bos"), token_id("eos"), token_id("eot")
    return Tokenizer(
        fast,
        frozenset(i for i in (eos, eot) if i is not None),
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
        adds_bos_id=bos if store.metadata("tokenizer.ggml.add_bos_token") else None,
        chat_template=store.metadata("tokenizer.chat_template"),
    )


def _required(store: GgufStore, key: str) -> list[str]:
    value = store.metadata(key)
    if not isinstance(value, list) or not value:
        raise MalformedCheckpoint(
            "missing", file=store.place, field=key, expected="a list of strings"
        )
    return value


def _pair(store: GgufStore, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise MalformedCheckpoint(
            repr(merge)[:80],
            file=store.place,
            field="tokenizer.ggml.merges",
            expected="two pieces with a space between",
        )
    return left, right

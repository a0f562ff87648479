"""Text to tokens and back: a `tokenizers` tokenizer, its special tokens and its chat template.

Templates run in jinja2's sandbox; nothing else of a checkpoint is executed. Where a tokenizer comes
from is `loading`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from ullage.errors import BadInput

Message = Mapping[str, Any]
# A part of a text decides whether the whole is too long: so many characters for each token that
# may be, and tokens enough that what the cut does to the last word cannot matter (WordPiece, the
# worst, makes one token of a word of more than 100 characters and up to 100 of its beginning).
_CHARS_PER_TOKEN = 16
_CUT_TOKENS = 256


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
        # As a batch of one: unlike `encode` it lets other threads run meanwhile, which matters for
        # megabytes of text (tokenizers 0.23).
        ids: list[int] = self.fast.encode_batch([text], add_special_tokens=add_special)[0].ids
        if add_special and self.adds_bos_id is not None:
            return [self.adds_bos_id, *ids]
        return ids

    def far_more(self, text: str, limit: int, *, keep_end: bool = False) -> Encoding | None:
        """A part of `text`, from its beginning or to its end, of more than 2 × `limit` tokens.

        None where there is none, or where the whole text is little more work. Megabytes take
        seconds and gigabytes to tokenize, and this need not: parts grow from the limit's size on.
        """
        size = _CHARS_PER_TOKEN * (limit + _CUT_TOKENS)
        while 2 * size < len(text):
            # Spaces at the cut may belong to a special token beyond it (lstrip, rstrip).
            part = text[-size:].lstrip() if keep_end else text[:size].rstrip()
            encoding = self.fast.encode_batch([part], add_special_tokens=False)[0]
            if len(encoding) > 2 * limit + _CUT_TOKENS:
                return encoding
            size *= 4
        return None

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text: str = self.fast.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_text(self, token_id: int) -> str:
        """One token on its own, special ones by name."""
        return self.decode([token_id], skip_special=False)

    def stream(
        self, stop: Sequence[str], min_tokens: int = 0, include_stop: bool = False
    ) -> TextStream:
        return TextStream(self, tuple(stop), min_tokens, include_stop)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """The prompt text of a conversation. Raises TemplateError with the template's own words."""
        if self.chat_template is None:
            raise TemplateError("this model has no chat template", field="messages")
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
        except TemplateError:
            raise
        except Exception as error:  # a template is a program: it may fail in any way
            raise TemplateError(
                f"the chat template fails: {type(error).__name__}: {error}", field="messages"
            ) from error


@dataclass(slots=True)
class TextStream:
    """One answer's text as its tokens come: whole characters only, and never past a stop string.

    Text that may still turn out to be the start of a stop string is held back. A stop string that
    is complete within the first `min_tokens` tokens ends nothing (as in vLLM 0.32,
    v1/engine/detokenizer.py). With `include_stop` the stop string is part of the text.
    """

    tokenizer: Tokenizer
    stop: tuple[str, ...]
    min_tokens: int = 0
    include_stop: bool = False
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
        before = len(self._text)
        self._text += piece
        if len(self._ids) <= self.min_tokens:
            return
        # A stop string ends in what is new; it may have begun in text that was held back.
        found = [
            (at, at + len(stop))
            for stop in self.stop
            if (at := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            self.stopped = True
            start, end = min(found)
            self._text = self._text[: end if self.include_stop else start]

    def _held_back(self) -> int:
        """Length of the longest tail of the text that begins a stop string."""
        if self.stopped or self.include_stop:
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

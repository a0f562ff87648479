"""Where a tokenizer comes from: tokenizer.json with its side files, or a GGUF file's metadata.

Builds byte-level BPE out of GGUF lists. What a tokenizer does is `tokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from ullage.anatomy.gguf.header import GgufArray, GgufHeader, read_gguf, read_gguf_array
from ullage.engine.text.tokenizer import Tokenizer
from ullage.errors import MalformedCheckpoint, UnsupportedModel

if TYPE_CHECKING:
    from ullage.anatomy import Model


def load_tokenizer(model: Model) -> Tokenizer:
    """The tokenizer that lies with the weights.

    Raises MalformedCheckpoint when tokenizer.json is absent or unreadable or an end-of-sequence id
    has no row in the model, UnsupportedModel for a GGUF tokenizer of another kind.
    """
    index = model.checkpoint
    if index is not None and index.format == "gguf" and not _tokenizer_path(model).is_file():
        return gguf_tokenizer(read_gguf(Path(index.files[0])))
    path = _tokenizer_path(model)
    if not path.is_file():
        raise MalformedCheckpoint("missing", file=path, expected="the model's tokenizer")
    try:
        fast = FastTokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise MalformedCheckpoint(f"not a tokenizer: {error}", file=path) from error
    fast.no_truncation()
    fast.no_padding()
    files = model.files
    settings = files.tokenizer_config or {}
    eos_token = _token_text(settings.get("eos_token"))
    eos_ids = _eos_ids(files.generation_config, files.config)
    if not eos_ids and eos_token is not None and (found := fast.token_to_id(eos_token)) is not None:
        eos_ids = frozenset({found})
    vocab_size = model.anatomy.spec.vocab_size
    if beyond := [token for token in sorted(eos_ids) if not 0 <= token < vocab_size]:
        raise MalformedCheckpoint(
            str(beyond[0]),
            file=files.path,
            field="eos_token_id",
            expected=f"an id below vocab_size {vocab_size}",
        )
    return Tokenizer(
        fast,
        eos_ids,
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=eos_token,
        chat_template=files.chat_template,
    )


def _tokenizer_path(model: Model) -> Path:
    place = model.files.path
    return (place if place.is_dir() else place.parent) / "tokenizer.json"


def _token_text(value: object) -> str | None:
    """A special token as tokenizer_config.json writes it: a string, or an object with content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(*configs: Mapping[str, object] | None) -> frozenset[int]:
    """From the first configuration that says any: generation_config.json, then config.json."""
    for config in configs:
        if config is None:
            continue
        value = config.get("eos_token_id")
        nested = config.get("text_config")
        if value is None and isinstance(nested, Mapping):
            value = nested.get("eos_token_id")
        values = value if isinstance(value, list | tuple) else [value]
        ids = frozenset(v for v in values if type(v) is int)
        if ids:
            return ids
    return frozenset()


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


def gguf_tokenizer(header: GgufHeader) -> Tokenizer:
    """A byte-level BPE tokenizer out of a GGUF file's metadata.

    Raises UnsupportedModel for other tokenizer models, MalformedCheckpoint for missing lists.
    """
    model = _value(header, "tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModel(
            f"{model!r} is not run by the embedded engine",
            file=header.file,
            field="tokenizer.ggml.model",
            expected="'gpt2' (byte-level BPE); or serve the directory with its tokenizer.json",
        )
    pre = _value(header, "tokenizer.ggml.pre") or "default"
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{pre!r} is not known to the embedded engine",
            file=header.file,
            field="tokenizer.ggml.pre",
            expected="one of " + ", ".join(sorted(_PRE_TOKENIZERS)),
        )
    tokens = _strings(header, "tokenizer.ggml.tokens")
    merges = _strings(header, "tokenizer.ggml.merges")
    pre_tokenizer, ignore_merges = _PRE_TOKENIZERS[pre]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        pairs = [_pair(header, merge) for merge in merges]
        fast = FastTokenizer(models.BPE(vocab, pairs, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises bare Exception
        if isinstance(error, MalformedCheckpoint):
            raise
        raise MalformedCheckpoint(
            f"no tokenizer: {error}", file=header.file, field="tokenizer.ggml.merges"
        ) from error
    if pre == "qwen2":
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizer()
    fast.decoder = decoders.ByteLevel()
    kinds = _value(header, "tokenizer.ggml.token_type") or ()
    for wanted, add in (
        (_TOKEN_CONTROL, fast.add_special_tokens),
        (_TOKEN_USER_DEFINED, fast.add_tokens),
    ):
        add(
            [
                AddedToken(token, normalized=False, special=wanted == _TOKEN_CONTROL)
                for token, kind in zip(tokens, kinds, strict=False)
                if kind == wanted
            ]
        )
    return _with_specials(header, fast, tokens)


def _with_specials(header: GgufHeader, fast: FastTokenizer, tokens: Sequence[str]) -> Tokenizer:
    def token_id(name: str) -> int | None:
        value = _value(header, f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(tokens):
            raise MalformedCheckpoint(
                str(value)[:80],
                file=header.file,
                field=f"tokenizer.ggml.{name}_token_id",
                expected=f"an id below {len(tokens)}",
            )
        return value

    template = _value(header, "tokenizer.chat_template")
    bos, eos, eot = token_id("bos"), token_id("eos"), token_id("eot")
    return Tokenizer(
        fast,
        frozenset(i for i in (eos, eot) if i is not None),
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
        adds_bos_id=bos if _value(header, "tokenizer.ggml.add_bos_token") is True else None,
        chat_template=template if isinstance(template, str) else None,
    )


def _value(header: GgufHeader, key: str) -> Any:
    """One metadata value, arrays as tuples, or None."""
    value = header.metadata.get(key)
    return read_gguf_array(header, key) if isinstance(value, GgufArray | tuple) else value


def _strings(header: GgufHeader, key: str) -> tuple[str, ...]:
    value = _value(header, key)
    if not isinstance(value, tuple) or not value or not isinstance(value[0], str):
        raise MalformedCheckpoint(
            "missing" if value is None else str(value)[:80],
            file=header.file,
            field=key,
            expected="a list of strings",
        )
    return value


def _pair(header: GgufHeader, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise MalformedCheckpoint(
            repr(merge)[:80],
            file=header.file,
            field="tokenizer.ggml.merges",
            expected="two pieces with a space between",
        )
    return left, right

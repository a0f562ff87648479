"""An embedding engine: text → token ids → encoder → pooling, a batch of whole texts at a time.

Holds no queue: whoever calls `embed` says which texts go together, within `options`. HTTP, threads
and metrics are `serving`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F

from ullage.anatomy import Model, load
from ullage.anatomy.spec import ModelSpec
from ullage.engine.encoder.encoder import Encoder, max_tokens
from ullage.engine.encoder.pooling import Pooling, read_pooling
from ullage.engine.encoder.support import require_encoder
from ullage.engine.encoder.weights import EncoderWeights
from ullage.engine.linear import LINEARS
from ullage.engine.options import EngineOptions
from ullage.engine.text.loading import load_tokenizer
from ullage.engine.text.tokenizer import Tokenizer
from ullage.errors import BadInput, BadUsage, UnsupportedModel

# The options that an encoder obeys. The others speak of caches, adapters and decoding.
_OBEYED = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "quantization")
# Keys of a configuration that would make another model of it, and the values that do not.
_USUAL: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False, None),
    "is_decoder": (False, None),
    "position_embedding_type": ("absolute", "rope", "rotary", None),
}
_FINE = {"dtype": ("auto", "float32")}


class TextRefused(BadInput):
    """A text that this model can never embed: empty, too long, or not of its vocabulary."""


@dataclass(frozen=True, slots=True)
class Matryoshka:
    """A model whose leading numbers are embeddings by themselves; `sizes` empty: at any length."""

    sizes: tuple[int, ...]


class Embedder:
    """Not thread-safe: one thread calls `embed`; the rest may be called from any."""

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        pooling: Pooling,
        options: EngineOptions,
        max_model_len: int,
        matryoshka: Matryoshka | None = None,
    ) -> None:
        """`matryoshka` None: embeddings of this model mean nothing when shortened."""
        self.spec: ModelSpec = encoder.spec
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.options = options
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = _max_num_batched_tokens(options, max_model_len)
        self._encoder = encoder
        self._matryoshka = matryoshka

    @classmethod
    def load(
        cls,
        model: str | Path,
        options: EngineOptions | None = None,
        pooler_config: Mapping[str, object] | None = None,
    ) -> Embedder:
        """Read `model` (a directory) and get ready to serve it.

        Raises UnsupportedModel for a spec that it would not run exactly, MalformedCheckpoint for
        files that lie, BadUsage for options that an encoder does not have or that do not fit.
        """
        return cls.of(load(model), options, pooler_config)

    @classmethod
    def of(
        cls,
        found: Model,
        options: EngineOptions | None = None,
        pooler_config: Mapping[str, object] | None = None,
    ) -> Embedder:
        """As `load`, for a model whose headers have been read."""
        options = options or EngineOptions()
        _require_obeyed(options)
        spec = found.anatomy.spec
        require_encoder(spec)
        _require_usual(found)
        place = found.files.path
        pooling = read_pooling(place if place.is_dir() else place.parent, pooler_config)
        max_model_len = _max_model_len(spec, pooling, options)
        _max_num_batched_tokens(options, max_model_len)  # refuse before reading the weights
        tokenizer = load_tokenizer(found)
        encoder = Encoder(spec, EncoderWeights(found), LINEARS[options.quantization], max_model_len)
        nested = _matryoshka(found.files.config or {})
        return cls(encoder, tokenizer, pooling, options, max_model_len, nested)

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of the weights in memory; None where they are packed and cannot be counted."""
        return self._encoder.weights_bytes

    @property
    def num_dimensions(self) -> int:
        """Length of an embedding."""
        return self.spec.hidden_size * len(self.pooling.modes)

    def cased(self, text: str) -> str:
        """`text` in the case that the model's texts are put in."""
        return text.lower() if self.pooling.lower_case else text

    def tokens(
        self,
        text: str | Sequence[int],
        *,
        add_special: bool = True,
        limit: int | None = None,
        keep_end: bool = False,
    ) -> tuple[int, ...]:
        """Token ids of `text` in the model's case, or those given, cut to `limit` if there is one.

        The model's own tokens around a text survive the cut, which takes the end of the text, or
        its beginning where `keep_end`. Raises TextRefused for a limit that has no room for them,
        and without one for a text that is too long by far, before all of it is tokenized.
        """
        if not isinstance(text, str):
            ids = tuple(text)
            cut = len(ids) if limit is None else max(0, len(ids) - limit)
            return ids if limit is None else ids[cut:] if keep_end else ids[: len(ids) - cut]
        text = self.cased(text)
        if limit is None:
            if self.tokenizer.far_more(text, self.max_model_len) is not None:
                raise self._too_long(f"more than {self.max_model_len} tokens")
            return tuple(self.tokenizer.encode(text, add_special))
        fast = self.tokenizer.fast
        num_special = fast.num_special_tokens_to_add(False) if add_special else 0
        if limit < num_special:
            raise TextRefused(
                str(limit),
                field="truncate_prompt_tokens",
                expected=f"at least the {num_special} tokens around every text",
            )
        encoding = self.tokenizer.far_more(text, limit, keep_end=keep_end)
        if encoding is None:
            # In a batch, so that other threads run meanwhile: see Tokenizer.encode.
            encoding = fast.encode_batch([text], add_special_tokens=False)[0]
        encoding.truncate(limit - num_special, direction="left" if keep_end else "right")
        return tuple(fast.post_process(encoding, None, add_special).ids)

    def dimensions(self, asked: int | None) -> int:
        """How many numbers an embedding shall have. Raises TextRefused for what the model cannot.

        As in vLLM 0.32 a configuration must say that shortening means something (pooling_params.py:
        `is_matryoshka`, `matryoshka_dimensions`).
        """
        if asked is None or asked == self.num_dimensions:
            return self.num_dimensions
        sizes = () if self._matryoshka is None else self._matryoshka.sizes
        fits = asked in sizes if sizes else asked < self.num_dimensions
        if self._matryoshka is None or not fits:
            every = sizes or (f"up to {self.num_dimensions}",)
            expected = every if self._matryoshka else (str(self.num_dimensions),)
            raise TextRefused(
                f"{asked} dimensions", field="dimensions", expected=" or ".join(map(str, expected))
            )
        return asked

    def shortened(self, vectors_ND: torch.Tensor, size: int) -> torch.Tensor:
        """The leading `size` numbers, at length 1 again where the model's are."""
        if size == vectors_ND.shape[1]:
            return vectors_ND
        cut_ND = vectors_ND[:, :size]
        return F.normalize(cut_ND, dim=1) if self.pooling.normalize else cut_ND

    def require_fits(self, token_ids: Sequence[int]) -> None:
        """Raise TextRefused for what `embed` could not take. Nothing is ever cut here."""
        if not token_ids:
            raise TextRefused("no tokens", field="input", expected="at least one")
        if len(token_ids) > self.max_model_len:
            raise self._too_long(f"{len(token_ids)} tokens")
        if min(token_ids) < 0 or max(token_ids) >= self.spec.vocab_size:
            raise TextRefused(
                "a token id outside the vocabulary",
                field="input",
                expected=f"ids below {self.spec.vocab_size}",
            )

    def _too_long(self, found: str) -> TextRefused:
        return TextRefused(
            found,
            field="input",
            expected=f"at most {self.max_model_len}, or truncate_prompt_tokens with it",
        )

    def embed(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Embeddings, float32 [texts, dimensions], of texts that `require_fits` accepts."""
        states = self._encoder.forward(texts)
        return torch.stack([self.pooling(x_TE) for x_TE in states])


def _require_obeyed(options: EngineOptions) -> None:
    """Raises BadUsage for an option that was set and would do nothing."""
    for option in fields(options):
        found = getattr(options, option.name)
        fine = (option.default, *_FINE.get(option.name, ()))
        if option.name not in _OBEYED and found not in fine:
            raise BadUsage(
                "an encoder has no KV cache, no adapters and no decoding",
                field="--" + option.name.replace("_", "-"),
                expected="only " + ", ".join("--" + o.replace("_", "-") for o in _OBEYED),
            )


def _require_usual(found: Model) -> None:
    """Raises UnsupportedModel for a key that the spec does not tell and the encoder not obey."""
    config = found.files.config or {}
    for key, usual in _USUAL.items():
        if config.get(key) not in usual:
            raise UnsupportedModel(
                f"{config[key]!r} is not run by the embedded engine's encoder"[:200],
                file=found.files.config_file,
                field=key,
                expected=" or ".join(str(value) for value in usual if value is not None),
            )


def _matryoshka(config: Mapping[str, object]) -> Matryoshka | None:
    sizes = config.get("matryoshka_dimensions")
    if isinstance(sizes, list) and sizes and all(type(size) is int for size in sizes):
        return Matryoshka(tuple(sizes))
    return Matryoshka(()) if config.get("is_matryoshka") is True else None


def _max_model_len(spec: ModelSpec, pooling: Pooling, options: EngineOptions) -> int:
    """The longest text: what sentence-transformers' files say, else what the positions reach.

    vLLM 0.32 derives it so (config/model.py). Raises BadUsage for a flag above it.
    """
    reach = max_tokens(spec)
    own = min(reach, pooling.max_seq_length or reach)
    asked = options.max_model_len
    if asked is not None and not 1 <= asked <= own:
        raise BadUsage(
            str(asked), field="--max-model-len", expected=f"1 to {own}, the model's own limit"
        )
    return own if asked is None else asked


def _max_num_batched_tokens(options: EngineOptions, longest: int) -> int:
    """What a batch may hold; where nothing was asked for, at least the longest text.

    As in vLLM 0.32 (engine/arg_utils.py), since a text is never cut in two. Raises BadUsage for a
    flag below that.
    """
    asked, usual = options.max_num_batched_tokens, EngineOptions().max_num_batched_tokens
    if asked < longest and asked != usual:
        raise BadUsage(
            f"{asked} tokens in one batch",
            field="--max-num-batched-tokens",
            expected=f"at least {longest}, the longest text",
        )
    return max(asked, longest)

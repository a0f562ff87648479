"""From a text's hidden states to its embedding, as sentence-transformers' side files tell it.

Reads modules.json, the pooling module's config.json and the length limit beside them. What they do
not say is not guessed: without them, or --pooler-config, a model gives no embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ullage.anatomy.config.keys import parse_json
from ullage.anatomy.open import read_text
from ullage.errors import BadUsage, MalformedCheckpoint, UnsupportedModel

Pool = Callable[[torch.Tensor], torch.Tensor]

# Hidden states [tokens, hidden] → [hidden], by sentence-transformers' names.
POOLS: Mapping[str, Pool] = {
    "cls": lambda x_TE: x_TE[0],
    "lasttoken": lambda x_TE: x_TE[-1],
    "max": lambda x_TE: x_TE.amax(0),
    "mean": lambda x_TE: x_TE.mean(0),
    "mean_sqrt_len_tokens": lambda x_TE: x_TE.sum(0) / len(x_TE) ** 0.5,
    "weightedmean": lambda x_TE: (_ramp_T1(x_TE) * x_TE).sum(0) / _ramp_T1(x_TE).sum(),
}
# The flags of a pooling module's config.json, in the order in which several are put together.
_FLAGS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# vLLM's words for --pooler-config.
_VLLM_TYPES: Mapping[str, str] = {"CLS": "cls", "LAST": "lasttoken", "MEAN": "mean"}
# Which prompt tokens enter the mean matters to models with prompts only, which are not sent here.
_IDLE_KEYS = frozenset({"word_embedding_dimension", "embedding_dimension", "include_prompt"})
_LENGTH_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def _ramp_T1(x_TE: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, len(x_TE) + 1, dtype=x_TE.dtype)[:, None]


@dataclass(frozen=True, slots=True)
class Pooling:
    """`modes` are names of POOLS whose results are put one behind the other.

    `normalize` makes the length 1. `max_seq_length` is the model's limit in tokens, if it has one;
    `lower_case` says that texts are put in lower case first.
    """

    modes: tuple[str, ...]
    normalize: bool
    max_seq_length: int | None = None
    lower_case: bool = False

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """The embedding of one text, from its hidden states [tokens, hidden]."""
        pooled = torch.cat([POOLS[mode](x_TE) for mode in self.modes])
        return F.normalize(pooled, dim=0) if self.normalize else pooled


def read_pooling(directory: Path, pooler_config: Mapping[str, object] | None = None) -> Pooling:
    """How the model in `directory` makes embeddings.

    `pooler_config`, with vLLM's keys `pooling_type` and `use_activation`, comes before the files.
    Raises UnsupportedModel when nothing says how, or a module is not run; MalformedCheckpoint.
    """
    length, lower = _limits(directory)
    if pooler_config is not None:
        return _from_flag(pooler_config, length, lower)
    path = directory / "modules.json"
    if not path.is_file():
        raise UnsupportedModel(
            "nothing says how hidden states become an embedding",
            file=path,
            expected='modules.json, or --pooler-config \'{"pooling_type": "MEAN"}\'',
        )
    modes: tuple[str, ...] | None = None
    normalize = False
    modules = _read(path)
    if not isinstance(modules, list):
        raise MalformedCheckpoint("not a list", file=path, expected="a list of modules")
    for module in modules:
        kind = module.get("type") if isinstance(module, dict) else None
        name = kind.rpartition(".")[2] if isinstance(kind, str) else ""
        if name == "Pooling" and modes is None:
            modes = _modes(directory / _inside(path, module.get("path")) / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise UnsupportedModel(
                f"the module {kind!r} is not run by the embedded engine"[:200],
                file=path,
                field="type",
                expected="Transformer, Pooling, Normalize",
            )
    if modes is None:
        raise MalformedCheckpoint("no pooling module", file=path, field="type", expected="Pooling")
    return Pooling(modes, normalize, length, lower)


def _from_flag(config: Mapping[str, object], length: int | None, lower: bool) -> Pooling:
    unknown = [key for key in config if key not in ("pooling_type", "use_activation")]
    word, normalize = config.get("pooling_type"), config.get("use_activation", True)
    if unknown or not isinstance(word, str) or word.upper() not in _VLLM_TYPES:
        raise BadUsage(
            (unknown[0] if unknown else str(word))[:80],
            field="--pooler-config",
            expected="pooling_type " + " or ".join(_VLLM_TYPES) + ", and use_activation",
        )
    if not isinstance(normalize, bool):
        raise BadUsage(
            str(normalize)[:80], field="--pooler-config", expected="use_activation true or false"
        )
    return Pooling((_VLLM_TYPES[word.upper()],), normalize, length, lower)


def _modes(path: Path) -> tuple[str, ...]:
    config = _read(path)
    if not isinstance(config, dict):
        raise MalformedCheckpoint("not an object", file=path)
    named = config.get("pooling_mode")
    modes = [mode for flag, mode in _FLAGS.items() if config.get(flag) is True]
    if named is not None:  # newer files say it in one word, or several
        modes = named if isinstance(named, list) else [named]
    unknown = [
        key
        for key, value in config.items()
        if key not in _FLAGS and key not in _IDLE_KEYS and key != "pooling_mode" and value
    ]
    if unknown:
        raise UnsupportedModel(
            "this key is not known to the embedded engine", file=path, field=unknown[0][:80]
        )
    if not modes or any(mode not in POOLS for mode in modes):
        raise UnsupportedModel(
            f"pooling {modes} is not run by the embedded engine"[:200],
            file=path,
            field="pooling_mode",
            expected="some of " + ", ".join(POOLS),
        )
    return tuple(modes)


def _limits(directory: Path) -> tuple[int | None, bool]:
    """max_seq_length and do_lower_case of the first of sentence-transformers' files that is there.

    The names are those that vLLM 0.32 looks for (transformers_utils/config.py).
    """
    path = next((directory / name for name in _LENGTH_FILES if (directory / name).is_file()), None)
    if path is None:
        return None, False
    config = _read(path)
    length = config.get("max_seq_length") if isinstance(config, dict) else None
    lower = config.get("do_lower_case", False) if isinstance(config, dict) else None
    if (length is not None and (type(length) is not int or length < 1)) or type(lower) is not bool:
        raise MalformedCheckpoint(
            f"max_seq_length {length!r}, do_lower_case {lower!r}"[:200],
            file=path,
            expected="a positive integer, and true or false",
        )
    return length, lower


def _inside(path: Path, name: object) -> str:
    """A module's folder, which must lie below the model's."""
    if not isinstance(name, str) or "\0" in name or Path(name).is_absolute() or ".." in name:
        raise MalformedCheckpoint(
            repr(name)[:80], file=path, field="path", expected="a folder of the model's"
        )
    return name


def _read(path: Path) -> object:
    return parse_json(read_text(path), file=str(path))

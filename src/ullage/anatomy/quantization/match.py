"""Which scheme a module's weight is stored in: `scheme_for`, compiled once per model.

Exclusion lists are written with and without `model.` and `language_model.` in front, as exact
names, globs, regular expressions or bare words; this module gives them one meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ullage.anatomy.spec import ModelSpec, Quantization, WeightScheme
from ullage.errors import MalformedConfig

LINEAR = "Linear"
"""The target that means every linear layer but embeddings, output head and routers."""

EXPERTS = "RoutedExperts"
"""The target that means the matrices of the routed experts."""

# Prefixes under which the same language model is known to engines, checkpoints and recipes.
_PREFIXES = ("language_model.", "model.", "backbone.", "transformer.")
_EXPERT_ROLES = {"expert_gate", "expert_up", "expert_down", "expert_gate_up"}
# "Linear" never means these: vLLM 0.32 builds routers without a scheme, and the exporters leave
# embeddings and output heads alone unless a pattern names them.
_NEVER_IMPLIED = {"embed", "lm_head", "router", "shared_router", "position", "per_layer"}
_MAX_WILDCARDS = 6
_NESTED_REPEAT = re.compile(r"[*+}][^()|]*\)[*+{]")


def scheme_for(spec: ModelSpec, module: str, role: str) -> WeightScheme | None:
    """The scheme of the weight at `module` ({e} standing for any expert), or None: model dtype.

    Raises:
        MalformedConfig: a pattern of the quantisation is not a usable regular expression.
    """
    if spec.quantization is None:
        return None
    return scheme_table(spec.quantization).scheme(module, role)


_recent: list[tuple[Quantization, SchemeTable]] = []  # by identity: hashing 700 patterns is slow


def scheme_table(quantization: Quantization) -> SchemeTable:
    """The compiled form, made once for as long as the same few objects are asked about."""
    for known, table in _recent:
        if known is quantization:
            return table
    table = SchemeTable(quantization)
    _recent.insert(0, (quantization, table))
    del _recent[4:]
    return table


class SchemeTable:
    """A Quantization compiled: asking about a module costs a few dictionary look-ups."""

    def __init__(self, quantization: Quantization) -> None:
        # GGUF states the type of every tensor, embeddings and norms too.
        self.names_every_tensor = quantization.method == "gguf"
        self._ignore = _Patterns((pattern, True) for pattern in quantization.ignore)
        named = [pair for pair in quantization.schemes if pair[0] not in (LINEAR, EXPERTS)]
        self._named = _Patterns(named)
        implied = dict(reversed([p for p in quantization.schemes if p[0] in (LINEAR, EXPERTS)]))
        self._linear = implied.get(LINEAR)
        self._experts = implied.get(EXPERTS, self._linear)
        self._answers: dict[tuple[str, str], WeightScheme | None] = {}
        self._stored = {_bare(name): s for name, s in named} if self.names_every_tensor else {}

    def stored(self, tensor: str) -> WeightScheme | None:
        """The scheme of one tensor by its whole name, where every tensor has one (GGUF)."""
        name = _bare(tensor.removesuffix(".weight").replace("{e}", "0"))
        return self._stored.get(name, self._linear)

    def scheme(self, module: str, role: str) -> WeightScheme | None:
        """The scheme of one module's weight, None when it stays in the model's dtype."""
        if self.names_every_tensor:
            return self.stored(module)
        key = (module, role)
        if key not in self._answers:
            self._answers[key] = self._find(module.replace("{e}", "0"), role)
        return self._answers[key]

    def _find(self, module: str, role: str) -> WeightScheme | None:
        bare = _bare(module)
        if self._ignore.find(module, bare) is not None:
            return None
        named = self._named.find(module, bare)
        if isinstance(named, WeightScheme):
            return named
        if role in _NEVER_IMPLIED:
            return None
        return self._experts if role in _EXPERT_ROLES else self._linear


class _Patterns:
    """Patterns in order, each with a value; `find` gives the first pattern's that matches."""

    def __init__(self, pairs: Iterable[tuple[str, object]]) -> None:
        self._exact: dict[str, tuple[int, object]] = {}
        self._starts: dict[str, tuple[int, object]] = {}
        self._words: dict[str, tuple[int, object]] = {}
        self._globs: list[tuple[int, object, list[str]]] = []
        self._regexes: list[tuple[int, object, re.Pattern[str]]] = []
        for order, (pattern, value) in enumerate(pairs):
            self._add(order, pattern, value)
        self._start_keys = tuple(self._starts)

    def _add(self, order: int, pattern: str, value: object) -> None:
        entry = (order, value)
        if pattern.startswith("re:"):
            self._regexes.append((order, value, _regex(pattern[3:])))
            return
        bare = _bare(pattern).removesuffix(".weight")
        stem = bare[:-1]
        if "*" not in bare and "?" not in bare:
            if bare.count(".") < 2 and not any(part.isdigit() for part in bare.split(".")):
                self._words.setdefault(bare, entry)
            else:
                self._exact.setdefault(bare, entry)
        elif bare.endswith("*") and stem and "*" not in stem and "?" not in stem:
            # `layers.1*` means layer 1 and what is in it, not layer 10 (vLLM 0.32 modelopt.py).
            if stem.endswith("."):
                self._exact.setdefault(stem[:-1], entry)
            elif stem[-1].isdigit():
                self._exact.setdefault(stem, entry)
            else:
                self._starts.setdefault(stem, entry)
        else:
            self._globs.append((order, value, re.sub(r"[*?]+", "*", bare).split("*")))

    def find(self, module: str, bare: str) -> object | None:
        best: tuple[int, object] | None = None
        if self._exact:
            name = bare
            while name:
                best = _earlier(best, self._exact.get(name))
                name = name.rpartition(".")[0]
        if self._start_keys and bare.startswith(self._start_keys):
            for end in range(1, len(bare) + 1):
                best = _earlier(best, self._starts.get(bare[:end]))
        if self._words:
            parts = module.split(".")
            for first, second in zip(parts, [*parts[1:], ""], strict=True):
                best = _earlier(best, self._words.get(first))
                best = _earlier(best, self._words.get(f"{first}.{second}"))
        for order, value, pieces in self._globs:
            if (best is None or order < best[0]) and _glob_or_parent(pieces, bare, module):
                best = (order, value)
        for order, value, pattern in self._regexes:
            if (best is None or order < best[0]) and (
                pattern.match(module) or pattern.match(bare) or pattern.match("model." + bare)
            ):
                best = (order, value)
        return None if best is None else best[1]


def _earlier(
    one: tuple[int, object] | None, other: tuple[int, object] | None
) -> tuple[int, object] | None:
    if one is None or (other is not None and other[0] < one[0]):
        return other
    return one


def _bare(name: str) -> str:
    """The name below the language model's prefixes, whichever of them it was written with."""
    again = True
    while again:
        again = False
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name = name[len(prefix) :]
                again = True
    return name


def _glob_or_parent(pieces: list[str], bare: str, module: str) -> bool:
    """Whether the glob matches the module or one that it lies in.

    A match of a parent is the glob's last piece ending where a component ends.
    """
    return _glob(pieces, bare) or _glob(pieces, module)


def _glob(pieces: list[str], name: str) -> bool:
    if not name.startswith(pieces[0]):
        return False
    at = len(pieces[0])
    for piece in pieces[1:-1]:
        found = name.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    last = pieces[-1]
    if not last:
        return True
    while (found := name.find(last, at)) >= 0:
        end = found + len(last)
        if end == len(name) or name[end] == ".":
            return True
        at = found + 1
    return False


def _regex(text: str) -> re.Pattern[str]:
    """A pattern out of a configuration, refused when matching it could take for ever."""
    wildcards = text.count(".*") + text.count(".+")
    if wildcards > _MAX_WILDCARDS or _NESTED_REPEAT.search(text):
        raise MalformedConfig(
            f"found the regular expression {text[:80]!r}, which may take for ever to match",
            field="quantization_config",
            expected=f"at most {_MAX_WILDCARDS} wildcards and no repeated repeats",
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise MalformedConfig(
            f"found {text[:80]!r}, which is not a regular expression ({error})",
            field="quantization_config",
            expected="a regular expression",
        ) from None

"""The words for kinds of layers, and the lists that configurations make of them.

Holds the vocabulary and its plain readers; the plans of families are `plans.py`.
"""

from __future__ import annotations

from ullage.anatomy.config.keys import Section

# A layer's kind and the kind of its feed-forward (None: the expert keys decide).
Kind = tuple[str, str | None]

WORDS: dict[str, Kind] = {
    "full_attention": ("full", None),
    "attention": ("full", None),
    "global": ("full", None),
    "global_attention": ("full", None),
    "sliding_attention": ("sliding", None),
    "sliding_window_attention": ("sliding", None),
    "local": ("sliding", None),
    "local_attention": ("sliding", None),
    "chunked_attention": ("chunked", None),
    "linear_attention": ("linear", None),
    "conv": ("conv", None),
    "mamba": ("mamba", None),
    "mamba2": ("mamba", None),
    "recurrent": ("linear", None),
    "hybrid": ("hybrid", None),
    "indexed_attention": ("full", None),
    "minimax_m3_sparse": ("indexed", None),
    "moe": ("full", "moe"),
    "deepseek_sparse_attention": ("full", None),
    "compressed_sparse_attention": ("compressed", None),
    "heavily_compressed_attention": ("compressed", None),
}

# Layers that hold one thing only (Nemotron-H), by word and by letter of hybrid_override_pattern.
SINGLE_WORDS: dict[str, Kind] = {
    "mamba": ("mamba", "none"),
    "linear_attention": ("mamba", "none"),
    "sparse": ("none", "moe"),
    "dense": ("none", "dense"),
    "attention": ("full", "none"),
    "full_attention": ("full", "none"),
    "sliding_attention": ("sliding", "none"),
    "moe": ("none", "moe"),
    "mlp": ("none", "dense"),
}
SINGLE_LETTERS: dict[str, Kind] = {
    "M": ("mamba", "none"),
    "*": ("full", "none"),
    "E": ("none", "moe"),
    "-": ("none", "dense"),
}


def from_words(
    section: Section, name: str, words: tuple[str, ...], table: dict[str, Kind]
) -> list[Kind]:
    kinds = []
    for i, word in enumerate(words):
        if word not in table:
            raise section.error(f"{name}[{i}]", word, "one of " + ", ".join(sorted(table)))
        kinds.append(table[word])
    return kinds


def read_single(section: Section, words_key: str, letters_key: str) -> list[Kind] | None:
    """Layers with one thing each, as words (newer) or letters (older), or None when absent."""
    words = section.texts(words_key)
    if words is not None:
        section.ignore(letters_key)
        return from_words(section, words_key, words, SINGLE_WORDS)
    letters = section.find(letters_key)
    if not isinstance(letters, str):
        if section.has(letters_key):
            raise section.error(letters_key, letters, "a string of letters")
        return None
    if len(letters) > MAX_LAYERS:
        raise section.error(letters_key, letters, f"at most {MAX_LAYERS} letters")
    return from_words(section, letters_key, tuple(letters), SINGLE_LETTERS)


MAX_LAYERS = 4096


def num_layers(section: Section) -> int:
    return section.integer("num_hidden_layers", maximum=MAX_LAYERS)


def rope_layers(section: Section, n: int) -> list[bool]:
    """Which layers rotate, from no_rope_layers (1: rotates) or no_rope_layer_interval."""
    flags = section.integers("no_rope_layers", maximum=1)
    if flags:
        if len(flags) != n:
            raise section.error("no_rope_layers", list(flags), f"a list of {n}")
        section.ignore("no_rope_layer_interval")
        return [bool(flag) for flag in flags]
    interval = section.optional_integer("no_rope_layer_interval")
    return [interval is None or (i + 1) % interval != 0 for i in range(n)]

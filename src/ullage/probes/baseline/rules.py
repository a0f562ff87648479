"""The rules on a model's activations, P001 products to P009 sizes: what each says of itself.

Holds the table alone and imports nothing heavy; what is found and where is `verdicts`'.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage.findings.finding import Severity

_RELOAD = (
    "Take this replica out of rotation and load the weights anew; if it comes back, compare the "
    "files (`ullage probe compare`), then suspect the machine's memory or arithmetic."
)
_RELOAD_UNLESS = f"else {_RELOAD[0].lower()}{_RELOAD[1:]}"
_ALARM = (
    "alarms by a Shiryaev-Roberts test, of all parts together one false one in a million rows "
    "while what is healthy stays within three times what the baseline's prompts showed (Shin, "
    "Ramdas, Rinaldo, E-detectors, 2024); docs/probes.md, Against a baseline"
)
_PRODUCTS = (
    "r·(W·x) is (r·W)·x for random r (Freivalds, Probabilistic machines can use less running "
    "time, 1977; on arrays of processors: Huang and Abraham, Algorithm-based fault tolerance for "
    f"matrix operations, 1984); {_ALARM}"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """What all rules say of themselves (`findings.answer.Described`), and which cells it reads."""

    id: str
    title: str
    severity: Severity
    kinds: tuple[str, ...]
    why: str
    fix: str
    example: str
    source: str
    category: str = "activations"


RULES: tuple[Rule, ...] = (
    Rule(
        "P001", "Products of weights and activations", Severity.error, ("q", "k", "v", "o", "mlp"),
        "A matrix that multiplies otherwise than the healthy one did answers at full speed and "
        "wrongly: changed weights, a wrong scale of a quantised one, a processor that miscounts.",
        f"Where the activation is named, compare the configuration's hidden_act; {_RELOAD_UNLESS}",
        "q of one head four times as large", _PRODUCTS,
    ),
    Rule(
        "P002", "What norms make of their inputs", Severity.error, ("norm",),
        "A norm's weight stands in front of every product of its part; one flipped exponent bit "
        "scales one channel in all tokens.",
        "Where norms of many layers are named, compare the configuration's eps (rms_norm_eps); "
        f"{_RELOAD_UNLESS}",
        "one exponent bit of one norm weight flipped",
        f"each channel is computed again from the norm's input; {_ALARM}",
    ),
    Rule(
        "P003", "Positions as queries and keys are turned", Severity.error, ("rope",),
        "Other angles leave short answers right and long ones wrong, and raise no error.",
        "Compare rope_theta, rope_scaling and the length that is served with the baseline's "
        "(`ullage probe rope`).",
        "rope_theta five times as large",
        f"rotations are computed again from exact angles; {_ALARM}",
    ),
    Rule(
        "P004", "Attention over the cache", Severity.error, ("attention",),
        "Attention computed again from the same cache must be what the engine computed: else a "
        "kernel, a mask or a scale is wrong.",
        "Start with another attention path (`--attention-backend gathered`); report the model and "
        "options.",
        "scores scaled by 1/head_dim instead of 1/√head_dim",
        f"attention is computed again from the cache by another kernel; {_ALARM}",
    ),
    Rule(
        "P005", "Embedding and output head", Severity.error, ("embedding",),
        "Rows of the embedding stand for tokens: a changed one spoils what some tokens mean.",
        _RELOAD, "one row of the output head half as large again", _PRODUCTS,
    ),
    Rule(
        "P006", "Adapters as they are applied", Severity.error, ("lora",),
        "An adapter that is applied in part answers like something between the base and itself.",
        "Unload the adapter and load it again; check it with `ullage adapter check`.",
        "an adapter that is applied in all layers but one", _PRODUCTS,
    ),
    Rule(
        "P007", "Finite numbers", Severity.error, ("not_finite",),
        "NaN and Inf spread to everything behind them.",
        "Find the operator with `ullage probe numerics MODEL`.",
        "one Inf among the weights of a layer's feed-forward",
        "IEEE 754: what is computed with NaN is NaN; named where a row meets it first "
        "(docs/probes.md, Against a baseline)",
    ),
    Rule(
        "P008", "Entropy and scores of attention", Severity.warning, ("entropy",),
        "A head whose weights lie far more, or less, spread than over any prompt of the baseline "
        "reads its context otherwise: from another cache, or another sort of text.",
        "Look at the head (`GET /ullage/entropy`); where the texts are new, take a baseline of "
        "prompts like them.",
        "a head's entropy 5% of the highest possible in every request, 75% while it was well",
        f"measured on the baseline's prompts, each counted once; {_ALARM}",
    ),
    Rule(
        "P009", "Sizes of activations", Severity.warning, ("size",),
        "A residual stream or feed-forward far larger or smaller than over any prompt of the "
        "baseline: exploding or dead channels, or another sort of text.",
        "Where the texts are new, take a baseline of prompts like them.",
        "a residual stream a hundred times as large in every request",
        f"measured on the baseline's prompts, each counted once; {_ALARM}",
    ),
)  # fmt: skip

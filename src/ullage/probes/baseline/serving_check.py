"""A running server held against a baseline, by what it tells of itself at GET /ullage/entropy.

Holds the asking and the judging of entropies. A server that was started with a baseline judges its
own rows, which says more: then its findings are passed on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ullage.errors import BadUsage, Unreachable
from ullage.findings.answer import Answer, Clear, Fired, NotEvaluable, finding_of
from ullage.findings.finding import Evidence
from ullage.probes.baseline import usual
from ullage.probes.baseline.baseline import Baseline
from ullage.probes.baseline.rules import RULES
from ullage.probes.baseline.verdicts import Located

ROUTE = "/ullage/entropy"
LEAST_ROWS = 8
"""Fewer are no mean."""
FALSE_ALARMS = 1e-3
"""Of a healthy server's checks, at most: of sub-Gaussian z, by the union over all heads."""
_MOST_EVIDENCE = 12
_TIMEOUT_S = 60
_STARTED = "`ullage serve MODEL --probe-baseline FILE --enable-control-routes`"
_OUTSIDE = (
    "From outside only entropy is seen, and few faults move its mean far enough: weights, norms, "
    f"angles and adapters are judged by a server that was started with the baseline ({_STARTED})."
)


@dataclass(frozen=True, slots=True)
class ServerChecked:
    """`findings` are documents. `judged_by`: `server`, or `entropy` where only that is seen."""

    findings: list[dict[str, Any]]
    rows: int
    steps: int
    judged_by: str
    not_seen: str


def check_server(url: str, baseline: Baseline, file: str, api_key: str | None) -> ServerChecked:
    """Raises Unreachable, and BadUsage for a server that does not read along or another model."""
    told = _told(url, api_key)
    rows, steps = _count(told, "rows", url), _count(told, "steps", url)
    findings = told.get("findings")
    if isinstance(findings, list):
        _require_the_same(told.get("baseline"), baseline, url, file)
        return ServerChecked(_passed_on(findings, url), rows, steps, "server", "")
    seen = _not_finite(told, url) or [_of_entropy(told, baseline, url, file, rows)]
    return ServerChecked(seen, rows, steps, "entropy", _OUTSIDE)


def far_z(count: int) -> float:
    """Beyond it, one of `count` readings is a false alarm in `FALSE_ALARMS` of all checks."""
    return math.sqrt(2 * math.log(count / FALSE_ALARMS))


def telling_heads(baseline: Baseline) -> int:
    """Heads of which some entropy, from 0 to the highest, would be beyond `far_z`."""
    count = baseline.sketch.form.layers * baseline.sketch.form.heads
    mean, spread = baseline.usual.mean[:count], baseline.usual.spread[:count]
    ends = [usual.z_of(np.full(count, end), mean, spread) for end in (0.0, 1.0)]
    return int((np.maximum(*ends) > far_z(count)).sum())


def _told(url: str, api_key: str | None) -> Mapping[str, Any]:
    import httpx2

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx2.get(f"{url}{ROUTE}", timeout=_TIMEOUT_S, headers=headers)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise Unreachable(f"{url}: {error or type(error).__name__}") from error
    if answer.status_code != 200:
        expected = f"a server that reads along and tells so ({_STARTED}, or with --probe)"
        raise BadUsage(
            f"{ROUTE} answered {answer.status_code}", file=url,
            expected="the server's --api-key" if answer.status_code in (401, 403) else expected,
        )  # fmt: skip
    try:
        told = answer.json()
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict) or not isinstance(told.get("layers"), list):
        raise _unlike(url)
    return told


def _require_the_same(judged_by: Any, baseline: Baseline, url: str, file: str) -> None:
    """Raise BadUsage where the server judges itself by another baseline than it is asked about."""
    if not isinstance(judged_by, dict):
        raise _unlike(url)
    known = {
        "model": baseline.model, "by": baseline.by, "rows": baseline.rows,
        "prompts": baseline.prompts, "precision": asdict(baseline.precision),
    }  # fmt: skip
    for name, value in known.items():
        if judged_by.get(name) != value:
            raise BadUsage(
                f"{name} is {_shown(value)}", file=file,
                expected=f"the baseline that {url} judges itself by, {judged_by.get('file')} "
                f"({name} {_shown(judged_by.get(name))})",
            )  # fmt: skip


def _shown(value: object) -> str:
    return " ".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def _unlike(url: str) -> BadUsage:
    return BadUsage(f"{ROUTE} is not what ullage's servers answer", file=url)


def _count(told: Mapping[str, Any], name: str, url: str) -> int:
    value = told.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _unlike(url)
    return value


_KEYS = {
    **dict.fromkeys(("id", "title", "state", "severity", "kind", "cause", "remedy"), str),
    **dict.fromkeys(("layers", "heads", "evidence", "missing"), list),
}


def _passed_on(findings: list[Any], url: str) -> list[dict[str, Any]]:
    for one in findings:
        if not isinstance(one, dict):
            raise _unlike(url)
        if any(not isinstance(one.get(key), kind) for key, kind in _KEYS.items()):
            raise _unlike(url)
        if one["state"] not in ("fired", "clear", "not_evaluable"):
            raise _unlike(url)
        if any(not isinstance(e, dict) or {"name", "value", "unit"} - set(e)
               for e in one["evidence"]):  # fmt: skip
            raise _unlike(url)
    return findings


def _not_finite(told: Mapping[str, Any], url: str) -> list[dict[str, Any]]:
    """Of rows whose attention was no number: where it began. Then entropies say nothing."""
    counts = {
        (layer, head): _count(of, "not_finite", url)
        for layer, heads in enumerate(_heads(told))
        for head, of in enumerate(heads)
        if "not_finite" in of
    }
    if not any(counts.values()):
        return []
    first = min(layer for (layer, _), count in counts.items() if count)
    heads = tuple(head for (layer, head), count in counts.items() if layer == first and count)
    broken, entropy = (next(one for one in RULES if one.id == name) for name in ("P007", "P008"))
    fired = Fired(
        f"Attention gives numbers that are not finite, first in layer {first}: there or in what "
        "comes before it they began.",
        broken.fix,
        tuple(
            Evidence(f"layers.{first} head {head} not finite", counts[first, head], "rows",
                     f"{url}{ROUTE}")
            for head in heads[:_MOST_EVIDENCE]
        ),
    )  # fmt: skip
    behind = NotEvaluable(("finite numbers: entropies of rows that have none say nothing",))
    return [
        Located(finding_of(broken, fired), "attention", (first,), heads).document(),
        Located(finding_of(entropy, behind), entropy.kinds[0], ()).document(),
    ]


def _of_entropy(
    told: Mapping[str, Any], baseline: Baseline, url: str, file: str, rows: int
) -> dict[str, Any]:
    rule = next(one for one in RULES if one.id == "P008")
    rows = min([rows, *_rows_of_heads(told, url)])
    entropy_LH = _entropies(told, baseline, url, file) if rows >= LEAST_ROWS else None
    answer: Answer
    layers: list[int] = []
    heads: list[int] = []
    if entropy_LH is None:
        needed = f"rows: {rows} were read of every layer, {LEAST_ROWS} are needed"
        answer = NotEvaluable((needed,))
    else:
        form = baseline.sketch.form
        count = form.layers * form.heads
        mean, spread = baseline.usual.mean[:count], baseline.usual.spread[:count]
        z_LH = usual.z_of(entropy_LH.ravel(), mean, spread).reshape(entropy_LH.shape)
        far = [tuple(map(int, place)) for place in np.argwhere(z_LH > far_z(count))]
        shown = tuple(
            Evidence(
                f"layers.{layer} head {head} entropy", round(float(entropy_LH[layer, head]), 4),
                "of the highest possible", f"{url}{ROUTE}, mean of its rows",
            )
            for layer, head in far[:_MOST_EVIDENCE]
        )  # fmt: skip
        layers = sorted({layer for layer, _ in far})
        heads = sorted({head for _, head in far}) if len(layers) == 1 else []
        telling = telling_heads(baseline)
        answer = Clear(
            (
                Evidence("rows read", rows, "", f"{url}{ROUTE}"),
                Evidence("judged", f"{telling} of {count} heads, of the others no entropy would be "
                         "far enough", "", file),
            )
        )  # fmt: skip
        if not telling:
            answer = NotEvaluable(("heads: of none an entropy would be far enough",))
        if far:
            answer = Fired(
                f"The mean entropy of {len(far)} of {count} heads is further from the baseline's "
                "than texts explain.",
                rule.fix, shown,
            )  # fmt: skip
    return Located(finding_of(rule, answer), rule.kinds[0], tuple(layers), tuple(heads)).document()


def _rows_of_heads(told: Mapping[str, Any], url: str) -> list[int]:
    """Of a long context attention is not read in every layer of a row."""
    heads = [head for heads in _heads(told) for head in heads]
    return [_count(head, "rows", url) for head in heads if "rows" in head]


def _heads(told: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """By layer; what is none is left out (`_entropies` refuses it)."""
    layers = [layer.get("heads") for layer in told["layers"] if isinstance(layer, dict)]
    return [
        [head for head in heads if isinstance(head, dict)]
        for heads in layers
        if isinstance(heads, list)
    ]


def _entropies(
    told: Mapping[str, Any], baseline: Baseline, url: str, file: str
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[layers, heads] as shares of the highest possible; NaN where a head says nothing."""
    form = baseline.sketch.form
    try:
        found = np.array(
            [
                [
                    np.nan if head["entropy_normalized"] is None
                    else float(head["entropy_normalized"])
                    for head in layer["heads"]
                ]
                for layer in told["layers"]
            ],
            np.float64,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise _unlike(url) from error
    if found.shape != (form.layers, form.heads):
        shape = " × ".join(map(str, found.shape))
        raise BadUsage(
            f"of {form.layers} × {form.heads} layers and heads", file=file,
            expected=f"a baseline of the model that is served ({shape})",
        )  # fmt: skip
    return found

"""Alarms as findings: which layer and kind is not itself, by what it shows, and what to do.

Holds what is said of a place; the rules are `rules`', and when an alarm stands is `judging`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ullage.findings.answer import Answer, Clear, Fired, NotEvaluable, finding_of
from ullage.findings.finding import Evidence, Finding
from ullage.findings.json import finding_document
from ullage.probes.baseline.baseline import Baseline
from ullage.probes.baseline.judging import Alarm, Judge
from ullage.probes.baseline.relations import Cell
from ullage.probes.baseline.rules import RULES, Rule
from ullage.probes.baseline.usual import Figure, Requests

_LITTLE = 0.05
_MANY_LAYERS = 4
"""More layers of one kind are one fault: an option, a formula, a machine."""
_NEAR = 0.02
"""So near to a whole explanation (not there at all, wholly there) counts as it."""


@dataclass(frozen=True, slots=True)
class Located:
    """A finding and what it speaks of: layers in order (none: outside of them), heads of one."""

    finding: Finding
    kind: str
    layers: tuple[int, ...]
    heads: tuple[int, ...] = ()

    @property
    def layer(self) -> int | None:
        return self.layers[0] if len(self.layers) == 1 else None

    def document(self) -> dict[str, Any]:
        """As JSON: the finding, and the place that it speaks of."""
        return {
            **finding_document(self.finding),
            "kind": self.kind,
            "layer": self.layer,
            "layers": list(self.layers),
            "heads": list(self.heads),
        }


def verdicts(judge: Judge, strange_rows: int = 0) -> tuple[Located, ...]:
    """Every rule's answers: for each fired one a finding of its layer, or of all that are alike.

    `strange_rows` ran with adapters that the baseline does not know.
    """
    return of_alarms(
        judge.alarms(),
        judge.rows,
        judge.exchanged,
        unread_kinds(judge, strange_rows),
        lacking=lacking_kinds(judge, strange_rows),
        strange_rows=strange_rows,
    )


_FEW = f"requests: none so far of which {Requests.FIRST} rows were read"
_UNREAD: Mapping[str, str] = {
    "lora": "adapters: no row so far of one that the baseline knows",
    # Rows of a long context show attention in some of the layers each.
    "entropy": f"{_FEW} in every layer",
    "size": _FEW,
    "attention": "attention: no rows so far, run as the baseline's, in which every layer was read",
    "not_finite": "rows: none so far ran as rows of the baseline did",
}


def unread_kinds(judge: Judge, strange_rows: int = 0) -> Mapping[str, str]:
    """Kinds that have not been held against the baseline, and why: they are not clear."""
    found, read = dict(_blind_kinds(judge.baseline)), judge.read_kinds()
    for kind in (kind for rule in RULES for kind in rule.kinds):
        if kind not in read:
            why = _UNREAD.get(kind, f"{kind}: no row so far ran as rows of the baseline did")
            found.setdefault(kind, why)
    if strange_rows and "lora" in found:
        found["lora"] = _STRANGE
    return found


_STRANGE = (
    "adapters: rows ran with some that the baseline does not know (`ullage probe baseline --lora "
    "NAME=ADAPTER` takes one that does)"
)


def lacking_kinds(judge: Judge, strange_rows: int = 0) -> Mapping[str, str]:
    """Kinds of which there is nothing to judge, and what says so: nobody has to look for more.

    None before a product was judged: of a model of which nothing can be, nothing is clear.
    """
    if not judge.read_kinds().intersection(RULES[0].kinds):
        return {}
    found = {}
    if not judge.baseline.sketch.adapters and not strange_rows:
        found["lora"] = "no adapter in the baseline, and none ran"
    if all(of is None for of in judge.baseline.sketch.form.rope_of):
        found["rope"] = "no layer of this model rotates"
    return found


def _blind_kinds(baseline: Baseline) -> Mapping[str, str]:
    """Kinds of which nothing can be read, and why."""
    seen = {
        cell.kind
        for cell, levels in zip(baseline.cells, baseline.noise.T, strict=True)
        if not np.isnan(levels).all()
    }
    if baseline.sketch.adapters:
        seen.add("lora")
    return {
        kind: "the baseline holds no adapter" if kind == "lora" else f"no {kind} in this model"
        for rule in RULES[:6]
        for kind in rule.kinds
        if kind not in seen
    }


def of_alarms(
    alarms: Sequence[Alarm],
    rows: int,
    exchanged: Callable[[int], bool],
    unread: Mapping[str, str],
    *,
    lacking: Mapping[str, str] | None = None,
    strange_rows: int = 0,
) -> tuple[Located, ...]:
    """See `verdicts`. Behind a fault of the model's own, what texts usually do says nothing; behind
    numbers that are not finite nothing does."""
    own = [one for one in alarms if isinstance(one.at, Cell)]
    usual = [one for one in alarms if isinstance(one.at, Figure)]
    behind: dict[str, str] = {}
    if own:
        behind |= dict.fromkeys(("P008", "P009"), "a sound model: behind a fault these say nothing")
    if any(map(_is_broken, own)):
        behind |= {rule.id: _BROKEN for rule in RULES}
    found: list[Located] = []
    for rule in RULES:
        groups = _groups(rule, own, [] if own else usual)
        if groups:
            found += [_fired(rule, group, exchanged) for group in groups]
            continue
        if rule.id in behind:
            answer: Answer = NotEvaluable((behind[rule.id],))
        else:
            answer = _quiet(rule, rows, unread, lacking or {}, strange_rows)
        found.append(Located(finding_of(rule, answer), rule.kinds[0], ()))
    return tuple(found)


_BROKEN = "finite numbers: what lies behind the first that are not cannot be judged"


def _quiet(
    rule: Rule,
    rows: int,
    unread: Mapping[str, str],
    lacking: Mapping[str, str],
    strange_rows: int,
) -> Answer:
    """Of a rule that has not fired."""
    missing = [unread[kind] for kind in rule.kinds if kind in unread and kind not in lacking]
    if not rows:
        return NotEvaluable(("rows: no step was sampled so far",))
    if len(missing) == len(rule.kinds):
        return NotEvaluable(tuple(dict.fromkeys(missing)))
    source = "the engine's own activations"
    evidence = [Evidence("rows read", rows, "", source)]
    evidence += [Evidence("not judged", why, "", source) for why in dict.fromkeys(missing)]
    nothing = [lacking[kind] for kind in rule.kinds if kind in lacking]
    evidence += [Evidence("nothing to judge", why, "", source) for why in nothing]
    if strange_rows and rule.id in ("P001", "P006"):
        name = "rows not judged, of adapters that the baseline does not know"
        evidence.append(Evidence(name, strange_rows, "", source))
    return Clear(tuple(evidence))


def _is_broken(alarm: Alarm) -> bool:
    return math.isinf(alarm.z)


def _kind(alarm: Alarm) -> str:
    if isinstance(alarm.at, Figure):
        return alarm.at.kind
    if _is_broken(alarm):
        return "not_finite"
    return "lora" if alarm.adapter_share is not None else alarm.at.kind


def _groups(
    rule: Rule, own: Sequence[Alarm], usual: Sequence[Alarm]
) -> list[tuple[str, list[Alarm]]]:
    """Alarms of a rule by kind and layer; one group of a kind that stands in many layers."""
    if rule.id == "P007":
        broken = list(filter(_is_broken, own))
        return [("not_finite", broken)] if broken else []
    by: dict[tuple[str, int | None], list[Alarm]] = {}
    for one in (*own, *usual):
        kind = _kind(one)
        if kind in rule.kinds:
            by.setdefault((kind, one.at.layer), []).append(one)
    groups: list[tuple[str, list[Alarm]]] = []
    for kind in dict.fromkeys(kind for kind, _ in by):
        own_layers = [alarms for (of, _), alarms in by.items() if of == kind]
        if rule.id in ("P003", "P006", "P008", "P009") or len(own_layers) > _MANY_LAYERS:
            groups.append((kind, [one for alarms in own_layers for one in alarms]))
        else:
            groups += [(kind, alarms) for alarms in own_layers]
    return groups


def _fired(rule: Rule, group: tuple[str, list[Alarm]], exchanged: Callable[[int], bool]) -> Located:
    kind, alarms = group
    if kind == "not_finite":
        # What comes first on the row's way is where it began.
        alarms = [min(alarms, key=_way)]
        kind = alarms[0].at.kind if isinstance(alarms[0].at, Cell) else kind
    layers = tuple(sorted({one.at.layer for one in alarms if one.at.layer is not None}))
    heads = tuple(sorted({one.at.head for one in alarms if one.at.head is not None}))
    worst = max(alarms, key=lambda one: one.z)
    evidence = [_evidence(one) for one in alarms[:_MOST_EVIDENCE]]
    answer = Fired(_cause(rule, kind, alarms, worst, layers, exchanged), rule.fix, tuple(evidence))
    return Located(finding_of(rule, answer), kind, layers, heads if len(layers) == 1 else ())


_MOST_EVIDENCE = 12


def _way(alarm: Alarm) -> tuple[float, int]:
    from ullage.probes.baseline.relations import KINDS

    assert isinstance(alarm.at, Cell)
    part = list(KINDS).index(alarm.at.part)
    if alarm.at.layer is None:
        return (-1.0 if alarm.at.part == "embedding" else math.inf, part)
    return (float(alarm.at.layer), part)


def _evidence(alarm: Alarm) -> Evidence:
    at = alarm.at
    what = at.part if isinstance(at, Cell) else at.name
    place = "" if at.layer is None else f"layers.{at.layer}."
    head = "" if at.head is None else f" head {at.head}"
    far: float | str = "not finite" if math.isinf(alarm.z) else round(alarm.z, 1)
    unit = "" if isinstance(far, str) else "times what rounding explains"
    if isinstance(at, Figure):
        unit = "times what requests may differ by"
    return Evidence(f"{place}{what}{head}", far, unit, f"{alarm.readings} rows")


def _place(layers: Sequence[int]) -> str:
    if not layers:
        return "outside of the layers"
    if len(layers) == 1:
        return f"in layer {layers[0]}"
    shown = ", ".join(map(str, layers[:8])) + (", …" if len(layers) > 8 else "")
    return f"in {len(layers)} layers ({shown})"


def _cause(
    rule: Rule,
    kind: str,
    alarms: Sequence[Alarm],
    worst: Alarm,
    layers: Sequence[int],
    exchanged: Callable[[int], bool],
) -> str:
    place = _place(layers)
    if math.isinf(worst.z):
        return f"Numbers that are not finite begin with {_named(worst)}, {place}."
    if rule.id == "P006":
        return _of_adapter(alarms, place)
    if kind == "mlp" and len(layers) == 1 and exchanged(layers[0]):
        return f"Gate and up have changed places {place}."
    if rule.id == "P008":
        return f"Attention is not as over any prompt of the baseline {place}."
    if rule.id == "P009":
        return f"Activations are not as large as over any prompt of the baseline {place}."
    named = _named(worst) if len(alarms) == 1 else _all_named(alarms, layers)
    verb = "do" if "," in named.split(" of ")[0] else "does"
    where = f" {place}" if layers else ""
    said = f"{named}{where} {verb} not give what {_given(alarms)}{_furthest(alarms, worst, layers)}"
    return f"{said[0].upper()}{said[1:]}."


_GIVERS: Mapping[str, str] = {
    "rope": "the baseline's angles give",
    "activation": "the baseline's activation function gives",
    "attention": "another kernel gives over the same cache",
}
"""What else than weights a part is held against."""


def _given(alarms: Sequence[Alarm]) -> str:
    givers = {_GIVERS.get(_part(one), "the baseline's weights give") for one in alarms}
    return givers.pop() if len(givers) == 1 else "the baseline's weights give"


def _all_named(alarms: Sequence[Alarm], layers: Sequence[int]) -> str:
    """The parts of several alarms; heads where they are those of one part in one layer."""
    parts = list(dict.fromkeys(map(_part, alarms)))
    heads = sorted({one.at.head for one in alarms if one.at.head is not None})
    if len(parts) > 1 or not heads or (len(heads) > 1 and len(layers) > 1):
        return ", ".join(parts)
    shown = ", ".join(map(str, heads[:8])) + (", …" if len(heads) > 8 else "")
    return f"{parts[0]} of head{'s' if len(heads) > 1 else ''} {shown}"


def _furthest(alarms: Sequence[Alarm], worst: Alarm, layers: Sequence[int]) -> str:
    """What explains all of them, or else what is said of the worst, and that it is that one's."""
    explained = _explained(worst)
    factors = [one.factor for one in alarms]
    if worst.channel is None and None not in factors:
        spread = max(abs(one - worst.factor) for one in factors)  # type: ignore[operator]
        if spread <= _NEAR * max(1.0, abs(worst.factor or 0.0)):
            return explained
    if worst.channel is None and not explained:
        return ""
    of = "" if len(alarms) == 1 else f" {_named(worst)}"
    layer = f" in layer {worst.at.layer}" if len(layers) > 1 else ""
    channel = "" if worst.channel is None else f" in channel {worst.channel}"
    return f", furthest{of}{layer}{channel}{explained}"


def _part(alarm: Alarm) -> str:
    return alarm.at.part if isinstance(alarm.at, Cell) else alarm.at.name


def _named(alarm: Alarm) -> str:
    head = "" if alarm.at.head is None else f" of head {alarm.at.head}"
    return f"{_part(alarm)}{head}"


def _explained(alarm: Alarm) -> str:
    if alarm.channel is not None and alarm.made is not None and alarm.said:
        return _times(alarm.made / alarm.said)
    if alarm.factor is None:
        return ""
    if abs(alarm.factor) < _NEAR:
        return ": nothing comes of it"
    return _times(alarm.factor)


def _times(factor: float) -> str:
    if 0 < abs(factor - 1) < _LITTLE:
        return f": it is {abs(factor - 1):.2%} too {'large' if factor > 1 else 'small'}"
    return f": it is {factor:.3g} times as large"


def _of_adapter(alarms: Iterable[Alarm], place: str) -> str:
    shares = [one.adapter_share for one in alarms if one.adapter_share is not None]
    middle = sorted(shares)[len(shares) // 2]
    parts = {one.at.part for one in alarms if isinstance(one.at, Cell)}
    what = ", ".join(sorted(parts))
    if abs(middle) < _NEAR:
        return f"The adapter is not applied to {what} {place}."
    return f"The adapter is applied {middle:.3g} times to {what} {place}."

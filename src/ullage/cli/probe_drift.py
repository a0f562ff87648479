"""`ullage probe drift MODEL [--against FILE|MODEL]`: sizes at norms and residuals, and their drift.

Holds flags, the table and the JSON document; the reading is `ullage.probes.drift.take`, the
comparing `ullage.probes.drift.drift`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.anatomy import load
from ullage.cli.flags import add_model_argument
from ullage.cli.probe_baseline import add_prompts
from ullage.cli.probe_fingerprint import local, require_engine
from ullage.errors import BadUsage
from ullage.probes.drift import file as drift_file
from ullage.probes.drift.drift import FALSE_ALARMS, LIMITS, NEAR, compare

if TYPE_CHECKING:
    from ullage.probes.drift.drift import Comparison, Drifted, DriftReading, SpotReading

SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage probe drift`."""
    add_model_argument(parser)
    parser.add_argument(
        "--prompt", metavar="TEXT", action="append", help="what it reads; repeatable"
    )
    add_prompts(parser, "what it reads (default: prose, code, tables in five languages)")
    parser.add_argument(
        "--against", metavar="FILE|MODEL", help="a saved reading, or a model that reads the same"
    )
    parser.add_argument("--save", metavar="FILE", type=Path, help="to compare with later")
    parser.add_argument("--output", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """0; 1 where something drifted, overflows or is not finite. Raises BadInput."""
    if args.prompt and args.prompts:
        raise BadUsage("given with --prompts", file="--prompt", expected="one of the two")
    if args.save is not None and (args.save.is_dir() or not args.save.parent.is_dir()):
        raise BadUsage("cannot be written", file="--save", expected="a path of a file")
    require_engine()
    from ullage.probes.baseline.prompts import LEARNED, read_prompts

    texts = args.prompt or (read_prompts(args.prompts) if args.prompts else LEARNED)
    before = None
    if args.against is not None and drift_file.is_saved(Path(args.against)):
        before = drift_file.read(Path(args.against))
    now = _taken(args.model, texts)
    if args.save is not None:
        drift_file.write(now, args.save)
    if args.against is not None and before is None:
        before = _taken(args.against, texts)
    compared = None if before is None else compare(now, before)
    if args.output == "json":
        document = {**drift_file.to_document(now), "compared": compared and _document(compared)}
        print(json.dumps(document, allow_nan=False))
    else:
        print("\n".join([*_lines(now), *(() if compared is None else _compared(compared))]))
    drifted = compared is not None and (compared.drifted or compared.why_not is not None)
    return int(bool(drifted or now.overflows or now.not_finite))


def _taken(name: str, texts: Sequence[str]) -> DriftReading:
    from ullage.engine.text.loading import load_tokenizer
    from ullage.probes.drift.take import MAX_TOKENS, take
    from ullage.probes.sameness.fingerprints import memory_short

    model = load(local(name))
    if (short := memory_short(model)) is not None:
        raise BadUsage(short, file=name)
    tokenizer = load_tokenizer(model)
    longest = model.anatomy.spec.max_positions or MAX_TOKENS
    ids = [tuple(tokenizer.encode(text))[: min(MAX_TOKENS, longest)] for text in texts]
    return take(model, ids, longest, name=name, tell=_tell)


def _tell(done: int) -> None:
    if sys.stderr.isatty():
        print(f"ullage probe: {done} prompts", end="\r", file=sys.stderr)


def _document(found: Comparison) -> dict[str, object]:
    return {**asdict(found), "false_alarms": FALSE_ALARMS}


def _lines(now: DriftReading) -> list[str]:
    lines = [
        f"{now.model}: {len(now.tokens)} prompts, {sum(now.tokens)} tokens, {now.num_layers} "
        f"layers, held to {now.dtype}",
        "",
        "rms at each norm (first tokens left out), and the largest number in front of it",
        f"  {'layer':>5} {'residual':>9} {'normed':>9} {'middle':>9} {'normed':>9} {'mlp':>9} "
        f"{'largest':>11} {'channel':>8}  massive channels",
    ]
    by = {(one.spot.place, one.spot.layer): one for one in now.spots}
    for layer in range(now.num_layers + 1):
        row = [
            by.get((place, layer)) for place in ("x", "normed", "middle", "mlp_normed", "hidden")
        ]
        x = by["x", layer]
        sizes = " ".join(f"{'' if one is None else f'{one.rms:.3g}':>9}" for one in row)
        massive = ", ".join(f"{channel} (×{times:.0f})" for channel, times in x.massive[:4])
        more = ", …" if len(x.massive) > 4 else ""
        name = layer if layer < now.num_layers else "last"
        lines.append(
            f"  {name:>5} {sizes} {x.largest.value:>11.4g} {x.largest.channel:>8}  {massive}{more}"
        )
    top = max(now.spots, key=lambda one: abs(one.largest.value))
    lines += ["", f"largest number   {_told(top)}"]
    lines += [f"{name:<16} {_near(now, name)}" for name in LIMITS]
    dead = [one for one in now.spots if one.dead]
    if dead:
        first = dead[0]
        lines.append(
            f"dead channels    {sum(len(one.dead) for one in dead)} in {len(dead)} places, first "
            f"layer {first.spot.layer} {first.spot.place}: {', '.join(map(str, first.dead[:8]))}"
        )
    lines += [
        f"NOT FINITE       {one.not_finite} numbers, {_told(one)}" for one in now.not_finite[:1]
    ]
    lines += [
        f"OVERFLOWS        {now.dtype} does not hold {_told(one)}" for one in now.overflows[:1]
    ]
    return lines


def _near(now: DriftReading, name: str) -> str:
    most = max(now.spots, key=lambda one: one.near[name])
    if not most.near[name]:
        return f"no number above {NEAR:g} of its limit"
    beyond = sum(abs(one.largest.value) > LIMITS[name] for one in now.spots)
    return (
        f"{most.near[name]:.2g} of the numbers at layer {most.spot.layer} {most.spot.place} lie "
        f"above {NEAR:g} of its limit; {beyond} places would be infinite"
    )


def _told(one: SpotReading) -> str:
    at = one.largest
    return (
        f"{at.value:.5g} at layer {one.spot.layer} {one.spot.place}, channel {at.channel}, token "
        f"{at.position} of prompt {at.prompt}"
    )


def _compared(found: Comparison) -> list[str]:
    which = "the same prompts" if found.paired else "other prompts"
    head = ["", f"against {found.against}: {found.channels:,} channels, {which}"]
    if found.why_not is not None:
        return [*head, f"  not decided: {found.why_not}"]
    seen = f"half of the channels are seen from ×{found.visible_factor:.2f} on"
    if not found.drifted:
        return [*head, f"  nothing drifted (p = {found.p:.3g} of all channels; {seen})"]
    lines = [
        *head,
        f"  drifted (p = {found.p:.3g}; sound models differ so in at most {FALSE_ALARMS:.0%} of "
        f"comparisons; {seen}), in the order of running:",
    ]
    lines += [f"  {_drifted(one)}" for one in found.drifted[:SHOWN]]
    if (more := len(found.drifted) - SHOWN) > 0:
        lines.append(f"  and {more} places behind them")
    return lines


def _drifted(one: Drifted) -> str:
    where = "outside of layers" if one.layer is None else f"layer {one.layer}"
    size = "nothing in it any more" if one.died else f"×{one.factor:.3g}"
    return (
        f"{where:<9} {one.kind:<9} {one.spot.place}: {one.channels} of {one.of} channels, most "
        f"channel {one.channel}: {size}"
    )

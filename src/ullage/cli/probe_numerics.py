"""`ullage probe numerics MODEL`, `ullage probe numerics compare A B`: where numbers go wrong.

Holds flags, tables and JSON documents; the looking is `ullage.probes.numerics.run`, the comparing
`ullage.probes.numerics.bundle_compare`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.anatomy import load
from ullage.cli.flags import add_model_argument
from ullage.cli.probe_fingerprint import local, require_engine
from ullage.errors import BadUsage
from ullage.probes.numerics.bundle import read, write
from ullage.probes.numerics.bundle_compare import compare

if TYPE_CHECKING:
    from ullage.probes.numerics.bundle_compare import Compared, OperatorApart
    from ullage.probes.numerics.numerics import Departure, Fault, NumericsReading, Place

SHOWN = 8
DTYPES = ("bfloat16", "float16", "float32")
PROMPT = (
    "A lighthouse keeper counts ships: 12 at dawn, 7 at noon, 31 by night. "
    "def total(n): return sum(n)"
)
MAX_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage probe numerics`."""
    add_model_argument(parser)
    parser.add_argument(
        "bundles",
        nargs="*",
        metavar="A B",
        help="after the word compare in MODEL's place: two files of --save to compare",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="what it runs in (default: bfloat16)")
    parser.add_argument("--backward", action="store_true", help="a training step's gradients too")
    parser.add_argument(
        "--prompt", metavar="TEXT", help=f"what the model reads, {MAX_TOKENS} tokens of it"
    )
    parser.add_argument("--device", metavar="NAME", help="for example cuda:0 (default: cpu)")
    parser.add_argument(
        "--save", metavar="FILE", type=Path, help="every operator's results, to compare"
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """0 sound, or equal; 1 a fault, or a difference. Raises BadInput for what is wrong."""
    if args.model == "compare":
        return _compare(args)
    if args.bundles:
        raise BadUsage(f"{args.bundles[0]!r} after MODEL", expected="one model, or compare A B")
    require_engine()
    try:
        import torch
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise BadUsage(
            f"the Python package {error.name} is not installed", expected="pip install transformers"
        ) from error
    from ullage.engine.text.loading import load_tokenizer
    from ullage.probes.numerics.run import read_numerics

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    path = local(args.model)
    device = args.device or "cpu"
    _require_device(device)
    model = load(path)
    limit = min(MAX_TOKENS, model.anatomy.spec.max_positions or MAX_TOKENS)
    token_ids = tuple(load_tokenizer(model).encode(PROMPT if args.prompt is None else args.prompt))
    reading, bundle = read_numerics(
        path,
        token_ids[:limit],
        name=args.model,
        dtype=getattr(torch, args.dtype or DTYPES[0]),
        device=device,
        backward=args.backward,
        marks=args.save is not None,
    )
    if bundle is not None:
        write(bundle, args.save)
    if args.output == "json":
        print(json.dumps(reading.to_json(), allow_nan=False))
    else:
        print("\n".join(_lines(reading)))
    return int(not reading.sound)


def _require_device(name: str) -> None:
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        said = str(error).partition("\n")[0][:80]
        raise BadUsage(said, file="--device", field=name) from error


def _compare(args: argparse.Namespace) -> int:
    flags = ("dtype", "prompt", "device", "save", "backward")
    if given := next((name for name in flags if getattr(args, name)), None):
        raise BadUsage("bundles are compared as they are", file=f"--{given}")
    if len(args.bundles) != 2:
        raise BadUsage(f"{len(args.bundles)} files", file="compare", expected="A and B")
    a, b = (read(Path(name)) for name in args.bundles)
    found = compare(a, b)
    if args.output == "json":
        print(json.dumps({"a": a.source, "b": b.source, **asdict(found)}, allow_nan=False))
    else:
        print("\n".join(_compared(found)))
    return int(found.verdict == "differs")


def _lines(reading: NumericsReading) -> list[str]:
    lines = [
        f"{reading.model}: {reading.tokens} tokens in {reading.dtype} on {reading.device}, "
        f"{reading.modules} looks at modules against {reading.reference_dtype}"
    ]
    lines += [_fault(one) for one in reading.faults]
    told = {(one.direction, one.place.path) for one in reading.faults}
    off = [one for one in reading.departures if (one.direction, one.place.path) not in told]
    lines += [_departure(one) for one in off[:SHOWN]]
    lines += _more(len(off), "departures")
    lines += [f"parameter  {name} holds NaN or Inf" for name in reading.not_finite_parameters]
    lines += _norm_lines(reading)
    bad = [one for one in reading.kernels if one.departs]
    lines += [
        f"kernel     {one.kernel}, head size {one.head_dim}, {one.rows} rows: "
        + ("not finite" if one.off is None else f"{one.off:.2g} off, {one.allowed:.2g} explained")
        for one in bad[:SHOWN]
    ]
    ran = [one for one in reading.kernels if one.refused is None]
    sizes = sorted({one.head_dim for one in ran})
    if ran:
        worst = max(one.off or 0.0 for one in ran)
        names = ", ".join(sorted({one.kernel for one in ran}))
        lines.append(f"kernels    {names} at head sizes {sizes[0]} to {sizes[-1]}: {worst:.2g} off")
    lines += [f"not judged {path}: {reason}" for path, reason in reading.not_judged[:SHOWN]]
    lines += _more(len(reading.not_judged), "not judged")
    if reading.sound:
        lines.append("sound: nothing is NaN or Inf, nothing is off by more than rounding explains")
    return lines


def _more(count: int, what: str) -> list[str]:
    return [f"           {count - SHOWN} {what} more (--output json)"] if count > SHOWN else []


def _norm_lines(reading: NumericsReading) -> list[str]:
    """One line per kind of norm that is alike, and one per norm that is not what it says."""
    alike: dict[tuple[str, str], list[Place]] = {}
    for one in reading.norms:
        seen = "below sight" if one.eps_executed is None else f"{one.eps_executed:.2g}"
        told = "unknown" if one.eps_configured is None else f"{one.eps_configured:.2g}"
        words = (
            f"eps {told}"
            + (" as told" if one.eps_fits else f", EXECUTED AS {seen}")
            + f", variance over {one.divisor or 'an unknown number'}, sum in {one.reduces_in}, "
            + f"one row alone: {one.one_row}"
        )
        alike.setdefault((one.place.class_name, words), []).append(one.place)
    lines = []
    for (name, words), places in alike.items():
        where = places[0].path if len(places) == 1 else f"{len(places)} norms"
        lines.append(f"norm       {where} ({name}): {words}")
    return lines


def _where(place: Place) -> str:
    layer = "" if place.layer is None else f"layer {place.layer} "
    return f"{layer}{place.kind}  {place.path or 'the model'} ({place.class_name})"


def _fault(one: Fault) -> str:
    operator = f", first in {one.operator}" if one.operator else ""
    own = f"; its {', '.join(one.parameters)} holds some" if one.parameters else ""
    later = f"; {one.later} modules make some anew after it" if one.later else ""
    return (
        f"{one.what:<10} {_where(one.place)}, {one.direction}: {one.num_bad:,} of "
        f"{one.num_elements:,} numbers{operator}{own}{later}"
    )


def _departure(one: Departure) -> str:
    off = "not finite" if one.off >= 1e9 else f"{one.off:.2g}"
    return f"off        {_where(one.place)}, {one.direction}: {off}, {one.allowed:.2g} explained"


_VERDICTS = {
    "same_bits": "the same bits from every operator",
    "rounding_only": "the same within rounding",
    "differs": "differs",
}


def _compared(found: Compared) -> list[str]:
    lines = [f"{_VERDICTS[found.verdict]}: {found.compared:,} operators compared"]
    if found.first is not None:
        lines.append(f"first at fault     {_operator(found.first)}")
    if found.first_bits is not None:
        lines.append(f"first other bits   {_operator(found.first_bits)}")
    lines += [f"only in {one}" for one in found.unmatched[:SHOWN]]
    lines += _more(len(found.unmatched), "operators of one side")
    lines += [f"machine  {name}: {a} in A, {b} in B" for name, a, b in found.environment]
    return lines


def _operator(one: OperatorApart) -> str:
    held = one.operator
    layer = "" if held.layer is None else f"layer {held.layer} "
    way = " (backward)" if held.backward else ""
    return (
        f"{held.name} in {layer}{held.kind} {held.path or 'the model'}{way}, operator {one.index}: "
        f"{one.what}; its inputs {one.inputs_apart:.2g}, explained {one.allowed:.2g}"
    )

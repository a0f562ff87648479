"""`ullage probe compare A B`: are two models, servers or saved fingerprints the same model?

Holds flags, the table and the JSON document; the comparing is `ullage.probes.sameness.sameness`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.cli.checkup import server_url
from ullage.cli.probe_fingerprint import local, require_engine
from ullage.errors import BadUsage
from ullage.probes.sameness.marks import is_saved, read

if TYPE_CHECKING:
    from ullage.probes.sameness.marks import Fingerprint
    from ullage.probes.sameness.sameness import Difference, Sameness

SHOWN = 12
_WHAT = "a model, a file of ullage probe fingerprint, or a server's URL (URL#NAME: a model there)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage probe compare`."""
    parser.add_argument("a", metavar="A", help=_WHAT)
    parser.add_argument("b", metavar="B", help="the same")
    parser.add_argument(
        "--reference", metavar="MODEL", help="tells what precision does to answers of two servers"
    )
    parser.add_argument("--lora-a", metavar="ADAPTER", help="A is this model with this adapter")
    parser.add_argument("--lora-b", metavar="ADAPTER", help="B is this model with this adapter")
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16", "int8"),
        help="what servers compute in that do not tell: nothing rougher is then explained",
    )
    parser.add_argument("--api-key", metavar="KEY", help="sent to servers as a bearer token")
    parser.add_argument(
        "--weights-only", action="store_true", help="run no prompts: weights and settings alone"
    )
    parser.add_argument(
        "--strict", action="store_true", help="another precision fails too (exit code 1)"
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """0 for the same model, 1 for another one or what cannot be decided.

    Raises BadInput for what is neither model, fingerprint nor URL, Unreachable for a dead server.
    """
    sides = ((args.a, args.lora_a, "--lora-a"), (args.b, args.lora_b, "--lora-b"))
    for name, lora, flag in sides:
        if lora is not None and (_is_url(name) or is_saved(Path(name))):
            raise BadUsage(f"{name} is no model on this disk", file=flag, expected="URL#ADAPTER")
    if args.weights_only and any(_is_url(name) or lora is not None for name, lora, _ in sides):
        raise BadUsage("a server or an adapter shows answers only", file="--weights-only")
    # Precisions are measured where weights will not decide.
    by_answers = any(_is_url(name) or lora is not None for name, lora, _ in sides)
    a, b = (_taken(name, lora, args, noise=by_answers) for name, lora, _ in sides)
    reference = None
    if args.reference is not None:
        reference = _taken(args.reference, None, args, noise=True)
    from ullage.probes.sameness.sameness import compare

    found = compare(a, b, reference)
    if args.output == "json":
        print(json.dumps(document(a, b, found), allow_nan=False))
    else:
        print("\n".join(_lines(a, b, found)))
    other = found.verdict == "same_model_other_precision"
    return int(not found.same or (other and args.strict))


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _taken(name: str, lora: str | None, args: argparse.Namespace, *, noise: bool) -> Fingerprint:
    if _is_url(name):
        url, _, model = name.partition("#")
        require_engine()  # httpx2 comes with it
        from ullage.probes.sameness.fingerprints import of_server

        found = of_server(server_url(url, "A or B"), model or None, args.api_key)
        return found if found.precision else replace(found, precision=args.precision)
    if is_saved(Path(name)):
        return read(Path(name))
    require_engine()
    from ullage.probes.sameness.fingerprints import of_model

    return of_model(local(name), lora, answers=not args.weights_only, noise=noise)


def document(a: Fingerprint, b: Fingerprint, found: Sameness) -> dict[str, object]:
    """The JSON document of one comparison."""
    return {
        "a": a.source,
        "b": b.source,
        "verdict": found.verdict,
        "same": found.same,
        "sentence": found.sentence,
        "first_difference": asdict(found.differences[0]) if found.differences else None,
        "differences": [asdict(one) for one in found.differences],
        "answers": None if found.answers is None else asdict(found.answers),
        "not_compared": dict(found.not_compared),
    }


def _lines(a: Fingerprint, b: Fingerprint, found: Sameness) -> list[str]:
    lines = [
        f"A  {a.source} ({a.by})",
        f"B  {b.source} ({b.by})",
        f"{found.verdict.replace('_', ' ')}: {found.sentence}",
    ]
    lines += [f"  {_difference(one)}" for one in found.differences[:SHOWN]]
    if len(found.differences) > SHOWN:
        lines.append(f"  and {len(found.differences) - SHOWN} more (--output json)")
    if found.answers is not None:
        rungs = ", ".join(f"{name} {most:.2g}" for name, most in found.answers.rungs)
        lines.append(
            f"answers: {found.answers.mean_nats:.2g} nats apart in the mean over "
            f"{found.answers.tokens} tokens (explained: {rungs})"
        )
    lines += [f"not compared, {part}: {reason}" for part, reason in found.not_compared]
    return lines


def _difference(one: Difference) -> str:
    kind = "" if one.kind is None or one.kind == one.part else f" {one.kind}"
    place = kind if one.layer is None else f" layer {one.layer}{kind}"
    size = "" if one.size is None else f": {one.size:.3g} apart"
    allowed = "" if not one.allowed else f", {one.allowed:.2g} explained by rounding"
    return f"{one.part}{place}  {one.what}{size}{allowed}"

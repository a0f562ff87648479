"""`ullage probe fingerprint MODEL [--save FILE]`: what to hold a model against later.

Holds flags, the table and the JSON document; the taking is `ullage.probes.sameness.fingerprints`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.cli.flags import add_model_argument, located
from ullage.errors import BadUsage
from ullage.probes.sameness.marks import to_document, write

if TYPE_CHECKING:
    from ullage.probes.sameness.marks import Fingerprint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage probe fingerprint`."""
    add_model_argument(parser)
    parser.add_argument("--save", metavar="FILE", type=Path, help="for ullage probe compare")
    parser.add_argument("--lora", metavar="ADAPTER", help="take the answers with this adapter")
    parser.add_argument(
        "--weights-only", action="store_true", help="run no prompts: weights and settings alone"
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """0. Raises BadInput for a model, an adapter or a file that is wrong."""
    if args.lora is not None and args.weights_only:
        raise BadUsage("given with --lora, of which answers are taken", file="--weights-only")
    require_engine()
    from ullage.probes.sameness.fingerprints import of_model

    found = of_model(local(args.model), args.lora, answers=not args.weights_only)
    if args.save is not None:
        write(found, args.save)
    if args.output == "json":
        print(json.dumps(to_document(found), allow_nan=False))
    else:
        print("\n".join(_lines(found)))
    return 0


def require_engine() -> None:
    """Raises BadUsage where the engine's extra is not installed."""
    try:
        import ullage.engine.engine  # noqa: F401 - OpenMP's waiting is set before torch loads
    except ModuleNotFoundError as error:
        if (error.name or "ullage").startswith("ullage"):
            raise  # our own mistake, not a missing extra
        raise BadUsage(
            f"the Python package {error.name} is not installed",
            expected="pip install 'ullage[engine]'",
        ) from error


def local(model: str) -> Path:
    """A model on this disk. Raises BadUsage for a hub id, of which only headers are fetched."""
    path, headers_only = located(model)
    if headers_only:
        raise BadUsage("only its headers are here", file=model, expected="a downloaded model")
    return path


def _lines(found: Fingerprint) -> list[str]:
    stored = hashlib.sha256()
    for mark in sorted(found.stored, key=lambda mark: mark.name):
        stored.update(f"{mark.name} {mark.dtype} {mark.shape} {mark.sum64}\n".encode())
    types = ", ".join(sorted({mark.dtype for mark in found.stored}))
    lines = [f"{found.source}"]
    if found.stored:
        lines.append(f"  tensors    {stored.hexdigest()[:16]}  {len(found.stored)} ({types})")
    if found.values:
        lines.append(f"  values     {len(found.values)} weights by layer and kind")
    if found.answers:
        tokens = sum(len(mark.logprobs) for mark in found.answers)
        mean = sum(sum(mark.logprobs) for mark in found.answers) / tokens
        lines.append(
            f"  answers    {tokens} tokens of {len(found.answers)} prompts, logprob {mean:.4f}"
        )
    lines += [
        f"  {one.precision:<10} moves a logprob by {one.mean_nats:.3g} nats in the mean "
        f"(at most {one.max_nats:.3g})"
        for one in found.noise
    ]
    named = (("angles", found.rope), ("tokenizer", found.tokenizer and found.tokenizer[:16]))
    lines += [f"  {name:<10} {value}" for name, value in named if value]
    lines += [f"  no {part}: {reason}" for part, reason in found.absent]
    return lines

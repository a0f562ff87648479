"""`ullage adapter fix ADAPTER --base MODEL --engine E --save DIR`: what the engine reads, written.

Holds flags and what is said of the result; rewriting is `ullage.adapters.rewriting.fix`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.anatomy.adapters.read import read_adapter
from ullage.cli.adapter import add_adapter_and_base, add_engine_arguments, base_spec, options_from
from ullage.errors import BadUsage

if TYPE_CHECKING:
    from ullage.adapters.rewriting.fix import Fixed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage adapter fix`."""
    add_adapter_and_base(parser)
    add_engine_arguments(parser)
    parser.add_argument(
        "--save", metavar="DIR", required=True, help="a new directory for the rewritten adapter"
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.set_defaults(do=run)


def run(args: argparse.Namespace) -> int:
    """Write the adapter; 0 when the engine reads all of it, else nothing is written and 2."""
    try:
        from ullage.adapters.rewriting.fix import fix
    except ImportError as error:
        if (error.name or "ullage").startswith("ullage"):
            raise  # our own mistake, not a missing extra
        raise BadUsage(
            f"{error.name} is not installed", expected="pip install 'ullage[deep]'"
        ) from error
    adapter = read_adapter(Path(args.adapter))
    fixed = fix(adapter, base_spec(args.base), options_from(args), Path(args.save))
    if args.output == "json":
        json.dump(_document(args.adapter, fixed), sys.stdout)
        print()
    else:
        _print(fixed)
    return 0


def _document(original: str, fixed: Fixed) -> dict[str, object]:
    judgement = fixed.judgement
    return {
        "original": original,
        "saved": fixed.directory,
        "engine": judgement.engine,
        "version": judgement.version,
        "verdict": judgement.verdict,
        "basis": judgement.basis,
        "matched": judgement.matched,
        "total": judgement.total,
        "notes": list(fixed.notes),
        "tensors": [
            {"to": c.to, "from": list(c.sources), "change": c.change} for c in fixed.changes
        ],
    }


def _print(fixed: Fixed) -> None:
    judgement = fixed.judgement
    print(
        f"{fixed.directory}: works on {judgement.engine} {judgement.version} ({judgement.basis}), "
        f"{judgement.matched} of {judgement.total} modules"
    )
    for change, count in Counter(c.change for c in fixed.changes).most_common():
        first = next(c for c in fixed.changes if c.change == change)
        print(f"  {count} tensors {change}")
        if change != "copied":
            print(f"    {', '.join(first.sources[:3])}\n    → {first.to}")
    for note in fixed.notes:
        print(f"  {note}")
    print("  every tensor's origin: ullage_fix.json beside it")

"""`ullage adapter merge-check ADAPTER --base MODEL --merged DIR`: was it merged as trained?

Holds flags, the table and the JSON document; comparing is `ullage.adapters.merge`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.anatomy import Model, load
from ullage.anatomy.adapters.read import read_adapter
from ullage.cli.adapter import add_adapter_and_base
from ullage.cli.flags import located
from ullage.errors import BadUsage

if TYPE_CHECKING:
    from ullage.adapters.merge import MergedTensor

SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage adapter merge-check`."""
    add_adapter_and_base(parser)
    parser.add_argument(
        "--merged", metavar="MODEL", required=True, help="the merged checkpoint (safetensors)"
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.set_defaults(do=run)


def run(args: argparse.Namespace) -> int:
    """0 when every tensor is what it should be, else 1."""
    try:
        from ullage.adapters.merge import GOOD, merge_check
    except ImportError as error:
        if (error.name or "ullage").startswith("ullage"):
            raise  # our own mistake, not a missing extra
        raise BadUsage(
            f"{error.name} is not installed", expected="pip install 'ullage[deep]'"
        ) from error
    adapter = read_adapter(Path(args.adapter))
    base, merged = _weights(args.base, "--base"), _weights(args.merged, "--merged")
    if base.anatomy.low is not base.anatomy.high:
        raise BadUsage("not all of it is understood", file=args.base, expected="a known base model")
    assert base.checkpoint is not None
    assert merged.checkpoint is not None
    tensors = merge_check(adapter, base.anatomy.spec, base.checkpoint, merged.checkpoint)
    good = all(tensor.state in GOOD for tensor in tensors)
    if args.output == "json":
        json.dump(_document(tensors, good=good), sys.stdout)
        print()
    else:
        _print(tensors, good=good)
    return int(not good)


def _weights(name: str, flag: str) -> Model:
    path, headers_only = located(name)
    model = load(path)
    if model.checkpoint is None or headers_only:
        raise BadUsage("no weights here", file=f"{flag} {name}", expected="a checkpoint on disk")
    return model


def _document(tensors: tuple[MergedTensor, ...], *, good: bool) -> dict[str, object]:
    return {
        "merged": good,
        "counts": dict(Counter(tensor.state.value for tensor in tensors)),
        "tensors": [
            {
                "name": tensor.name,
                "state": tensor.state.value,
                "worst_ratio": _finite(tensor.worst_ratio),
                "scale_found": _finite(tensor.scale_found),
                "detail": tensor.detail,
            }
            for tensor in tensors
        ],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and value - value == 0 else None


def _print(tensors: tuple[MergedTensor, ...], *, good: bool) -> None:
    counts = Counter(tensor.state.value for tensor in tensors)
    said = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    print(f"{'merged as trained' if good else 'NOT merged as trained'}: {said}")
    for state in ("not_merged", "wrong_scale", "wrong", "changed", "missing", "below_rounding"):
        of = [tensor for tensor in tensors if tensor.state == state]
        for tensor in of[:SHOWN]:
            parts = [tensor.detail] if tensor.detail else []
            if state == "wrong_scale" and tensor.scale_found is not None:
                parts.append(f"{tensor.scale_found:.4g} times the change that was trained")
            elif state == "wrong" and tensor.worst_ratio is not None:
                parts.append(f"{tensor.worst_ratio:.3g} times what rounding explains")
            print(f"  {state}: {tensor.name}" + "".join(f" ({part})" for part in parts))
        if len(of) > SHOWN:
            print(f"  {state}: {len(of) - SHOWN} more")

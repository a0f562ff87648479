"""`ullage probe baseline MODEL --save FILE`: what a healthy model is like inside, to judge it by.

Holds flags and what is printed; the taking is `ullage.probes.baseline.learning`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.cli.flags import add_model_argument, positive_integer
from ullage.cli.probe_fingerprint import local, require_engine
from ullage.errors import BadUsage

if TYPE_CHECKING:
    from ullage.probes.baseline.baseline import Baseline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage probe baseline`."""
    add_model_argument(parser)
    add_prompts(parser, "what the model reads (default: prose, code, tables in five languages)")
    parser.add_argument(
        "--save", metavar="FILE", required=True, help="for probe check and serve --probe-baseline"
    )
    parser.add_argument(
        "--tokens", type=positive_integer, metavar="N", help="answered to each (default: 48)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of weights and arithmetic, as it will be served; auto is float32",
    )
    parser.add_argument("--quantization", choices=("none", "int8"), default="none")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "float32", "bfloat16", "int8_per_token_head", "int4_per_token_head"),
        default="auto",
    )
    parser.add_argument(
        "--max-model-len",
        type=positive_integer,
        metavar="TOKENS",
        help="as it will be served (default: the model's own)",
    )
    add_lora(parser, "also know this adapter; repeatable")
    parser.add_argument("--output", choices=("table", "json"), default="table")


def add_prompts(parser: argparse.ArgumentParser, what: str) -> None:
    """--prompts, of both commands."""
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        action="append",
        default=[],
        help=f'{what}; one prompt per line, or JSON lines with "prompt"; repeatable',
    )


def add_lora(parser: argparse.ArgumentParser, what: str) -> None:
    """--lora, of both commands."""
    parser.add_argument("--lora", metavar="NAME=ADAPTER", action="append", default=[], help=what)


def adapters_of(pairs: list[str]) -> dict[str, str]:
    """NAME=ADAPTER. Raises BadUsage."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, path = pair.partition("=")
        if not name or not path or name in found:
            raise BadUsage(pair, field="--lora", expected="NAME=ADAPTER, each name once")
        found[name] = path
    return found


def run(args: argparse.Namespace) -> int:
    """0. Raises BadInput for a model, prompts, an adapter or a place that is wrong."""
    adapters = adapters_of(args.lora)
    model = local(args.model)
    require_engine()
    from ullage.engine.options import EngineOptions
    from ullage.probes.baseline.baseline import save
    from ullage.probes.baseline.learning import NEW_TOKENS, learn
    from ullage.probes.baseline.prompts import LEARNED, read_prompts

    prompts = read_prompts(args.prompts) if args.prompts else LEARNED
    options = EngineOptions(
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=args.max_model_len,
    )
    _require_place(args.save)
    started_s = time.monotonic()
    found = learn(
        model, prompts, options, adapters, name=args.model, new_tokens=args.tokens or NEW_TOKENS
    )
    save(found, args.save)
    document = _document(found, args.save, time.monotonic() - started_s)
    print(json.dumps(document) if args.output == "json" else "\n".join(_lines(document)))
    return 0


def _require_place(path: str) -> None:
    """Raise BadUsage before a minute of work where the file could not be written anyway."""
    folder = Path(path).parent
    if not folder.is_dir() or Path(path).is_dir():
        raise BadUsage("cannot be written", file=path, field="--save", expected="a path of a file")


def _document(found: Baseline, path: str, took_s: float) -> dict[str, object]:
    precision = found.precision
    return {
        "model": found.model,
        "file": path,
        "file_bytes": Path(path).stat().st_size,
        "layers": found.sketch.form.layers,
        "cells": len(found.cells),
        "prompts": found.prompts,
        "rows": found.rows,
        "dtype": precision.dtype,
        "quantization": precision.quantization,
        "kv_cache_dtype": precision.kv_cache_dtype,
        "max_model_len": found.max_model_len,
        "adapters": list(found.sketch.adapters),
        "took_s": round(took_s, 2),
    }


def _lines(told: dict[str, object]) -> list[str]:
    adapters = told["adapters"]
    assert isinstance(adapters, list)
    lines = [
        f"{told['model']}: {told['layers']} layers, {told['cells']:,} cells",
        f"  read        {told['rows']:,} tokens of {told['prompts']} prompts in "
        f"{told['took_s']:.1f} s",
        f"  precision   dtype {told['dtype']}, quantization {told['quantization']}, "
        f"KV cache {told['kv_cache_dtype']}, up to {told['max_model_len']:,} tokens",
    ]
    if adapters:
        lines.append(f"  adapters    {', '.join(map(str, adapters))}")
    return [*lines, f"  saved       {told['file']} ({told['file_bytes']:,} bytes)"]

"""`ullage probe attention MODEL --prompt TEXT`: how each head attends to one prompt.

Holds flags, the choice of who runs the model and the JSON document; the measuring is
`ullage.probes`, the table `probe_attention_table`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.anatomy import Model, load
from ullage.cli.flags import add_model_argument, located, positive_integer
from ullage.cli.probe_attention_table import FIGURES, lines
from ullage.errors import BadUsage, UnsupportedModel

if TYPE_CHECKING:
    from ullage.engine.text.tokenizer import Tokenizer
    from ullage.probes.attention.readings import AttentionReading

DTYPES = ("float32", "bfloat16")
ENGINES = ("auto", "embedded", "transformers")
DEFAULT_ROWS = 256
MAX_PROMPT_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage probe attention`."""
    add_model_argument(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="what the model reads")
    prompt.add_argument("--prompt-file", metavar="FILE", help="the same from a file; - for stdin")
    parser.add_argument(
        "--rows",
        type=_rows,
        default=DEFAULT_ROWS,
        metavar="N|all",
        help="query positions that are looked at, at even distances (default: 256)",
    )
    parser.add_argument(
        "--layers", type=_layers, metavar="LIST", help="for example 0,3,8-11 (default: all)"
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="auto",
        help="who runs the model; auto: the embedded engine, else transformers where it is "
        "installed",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument(
        "--max-model-len",
        type=positive_integer,
        metavar="TOKENS",
        help="the length that it is served with, by which some rotary scalings choose their "
        "angles (default: the model's own)",
    )
    parser.add_argument(
        "--show",
        choices=tuple(FIGURES),
        default="entropy",
        help="the table's figure (default: entropy, as a share of its highest possible)",
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """0; 1 where attention is not finite. Raises BadInput for a model or flags that are wrong."""
    if args.model.startswith(("http://", "https://")):
        raise BadUsage("a live server", file=args.model, expected="a model on this machine")
    text = _prompt(args)
    path, headers_only = located(args.model)
    if headers_only:
        raise BadUsage(
            "of a hub's model only the headers are fetched",
            file=args.model,
            expected="a downloaded model",
        )
    model = load(path)
    _require_layers(args.layers, model.anatomy.spec.num_layers)
    try:
        reading = _read(args, path, model, text)
    except ModuleNotFoundError as error:
        if (error.name or "ullage").startswith("ullage"):
            raise  # our own mistake, not a missing extra
        wanted = "transformers" if error.name == "transformers" else "'ullage[engine]'"
        raise BadUsage(
            f"the Python package {error.name} is not installed", expected=f"pip install {wanted}"
        ) from error
    if args.output == "json":
        print(json.dumps(reading.to_json(), allow_nan=False))
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines(reading, args.show)))
    return int(any(head.not_finite for _, head in reading.heads()))


def _read(args: argparse.Namespace, path: Path, model: Model, text: str) -> AttentionReading:
    """By the embedded engine where it may and can, else by transformers."""
    import ullage.engine  # noqa: F401 - before torch, see there
    from ullage.engine.model.support import require_supported
    from ullage.engine.text.loading import load_tokenizer

    spec = model.anatomy.spec
    if args.engine != "transformers":
        try:
            require_supported(spec, args.max_model_len or spec.max_positions)
        except UnsupportedModel as refused:
            if args.engine == "embedded":
                raise
            print(f"ullage probe: {refused}; trying transformers", file=sys.stderr)
        else:
            limit = args.max_model_len or spec.max_positions
            return _embedded(args, path, _tokens(load_tokenizer(model), text, limit))
    if args.max_model_len is not None:
        raise BadUsage("is the embedded engine's", file="--max-model-len")
    import torch
    from transformers.utils import logging

    from ullage.probes.attention.through_transformers import read_prompt

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    prompt_ids = _tokens(load_tokenizer(model), text, spec.max_positions)
    return read_prompt(
        path,
        prompt_ids,
        name=args.model,
        rows=args.rows,
        layers=args.layers,
        dtype=getattr(torch, args.dtype),
    )


def _embedded(
    args: argparse.Namespace, path: Path, prompt_ids: tuple[int, ...]
) -> AttentionReading:
    from ullage.engine.options import EngineOptions
    from ullage.probes.attention.embedded import read_prompt

    options = EngineOptions(
        attention="gathered", dtype=args.dtype, max_model_len=args.max_model_len
    )
    return read_prompt(
        path, prompt_ids, name=args.model, rows=args.rows, layers=args.layers, options=options
    )


def _tokens(tokenizer: Tokenizer, text: str, limit: int) -> tuple[int, ...]:
    """The text's ids; of a text that is far too long only a part is tokenized before it is said."""
    if limit > 0 and tokenizer.far_more(text, limit) is not None:
        raise BadUsage(f"more than {2 * limit:,} tokens", field="prompt", expected=f"{limit:,}")
    return tuple(tokenizer.encode(text))


def _prompt(args: argparse.Namespace) -> str:
    """The prompt's text. Raises BadUsage for a file that is none, or no text."""
    if args.prompt is not None:
        return str(args.prompt)
    place = args.prompt_file
    try:
        if place == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with Path(place).open("rb") as file:
                data = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise BadUsage(error.strerror or str(error), file=place) from error
    if len(data) > MAX_PROMPT_BYTES:
        raise BadUsage(f"more than {MAX_PROMPT_BYTES:,} bytes", file=place, expected="a prompt")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadUsage(f"byte {error.start} is no UTF-8", file=place, expected="text") from error


def _require_layers(layers: frozenset[int] | None, num_layers: int) -> None:
    if layers is not None and (last := max(layers)) >= num_layers:
        raise BadUsage(f"layer {last}", file="--layers", expected=f"0 to {num_layers - 1}")


def _rows(text: str) -> int | None:
    """None: all."""
    return None if text == "all" else positive_integer(text)


def _layers(text: str) -> frozenset[int]:
    """Numbers and ranges, both ends included."""
    found: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.partition("-")
        try:
            first, last = int(low), int(high) if dash else int(low)
        except ValueError:
            first, last = 0, -1
        if not 0 <= first <= last < 100_000:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r}; expected layers and ranges such as 0,3,8-11"
            )
        found |= set(range(first, last + 1))
    return frozenset(found)

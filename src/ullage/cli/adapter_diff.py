"""`ullage adapter diff ADAPTER --base MODEL [--engine-url URL]`: what an adapter really changes.

Holds flags, the table and the JSON document. "Identical to the base" is a failure.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.anatomy import load
from ullage.anatomy.adapters.read import read_adapter
from ullage.cli.adapter import add_adapter_and_base, base_spec
from ullage.cli.flags import located
from ullage.errors import BadUsage

if TYPE_CHECKING:
    from ullage.adapters.changes import ModuleChange
    from ullage.checkup.adapter_diff import Divergence

MAX_PROMPTS = 1000
MAX_PROMPTS_BYTES = 8 << 20
SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage adapter diff`."""
    add_adapter_and_base(parser)
    parser.add_argument(
        "--engine-url", metavar="URL", help="ask this server, which serves both (default: ullage)"
    )
    parser.add_argument("--lora-name", metavar="NAME", help="the adapter's name on that server")
    parser.add_argument("--api-key", metavar="KEY", help="sent to the server as a bearer token")
    parser.add_argument("--prompts", metavar="FILE", help="probe prompts, one a line")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.set_defaults(do=run)


def run(args: argparse.Namespace) -> int:
    """0 when the adapter changes something, 1 when the answers are the base's."""
    try:
        from ullage.adapters.changes import by_layer, module_changes
        from ullage.checkup.adapter_diff import PROMPTS, embedded, served
    except ImportError as error:
        if (error.name or "ullage").startswith("ullage"):
            raise  # our own mistake, not a missing extra
        raise BadUsage(
            f"{error.name} is not installed", expected="pip install 'ullage[engine]'"
        ) from error
    prompts = PROMPTS if args.prompts is None else _prompts(Path(args.prompts))
    adapter = read_adapter(Path(args.adapter))
    path, headers_only = located(args.base)
    checkpoint = None if headers_only else load(path).checkpoint
    changes = module_changes(adapter, base_spec(args.base), checkpoint)
    if args.engine_url is not None:
        divergence = served(args.engine_url, args.lora_name, prompts, args.api_key)
    else:
        divergence = embedded(path, args.adapter, prompts)
    layers = by_layer(changes)
    if args.output == "json":
        json.dump(_document(changes, layers, divergence), sys.stdout)
        print()
    else:
        _print(changes, layers, divergence)
    return int(divergence.identical)


def _prompts(file: Path) -> tuple[str, ...]:
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_PROMPTS_BYTES + 1).decode()
    except OSError as error:
        raise BadUsage(f"cannot be read: {error.strerror}", file=file) from None
    except UnicodeDecodeError:
        raise BadUsage("not UTF-8 text", file=file) from None
    lines = tuple(line for line in text.splitlines() if line.strip())
    if not 0 < len(lines) <= MAX_PROMPTS or len(text) > MAX_PROMPTS_BYTES:
        raise BadUsage(f"{len(lines)} prompts", file=file, expected=f"1 to {MAX_PROMPTS} lines")
    return lines


def _document(
    changes: tuple[ModuleChange, ...], layers: dict[int, float | None], divergence: Divergence
) -> dict[str, object]:
    return {
        "identical": divergence.identical,
        "source": divergence.source,
        "layers": [{"layer": n, "relative_change": value} for n, value in layers.items()],
        "modules": [
            {
                "module": change.module,
                "layer": change.layer,
                "rank": change.rank,
                "scale": change.scale,
                "change_norm": change.change_norm,
                "weight_norm": change.weight_norm,
                "relative_change": change.relative,
            }
            for change in changes
        ],
        "prompts": [asdict(prompt) for prompt in divergence.prompts],
    }


def _print(
    changes: tuple[ModuleChange, ...], layers: dict[int, float | None], divergence: Divergence
) -> None:
    word = "IDENTICAL to the base" if divergence.identical else "differs from the base"
    print(f"{word} ({divergence.source})")
    for found in divergence.prompts[:SHOWN]:
        prompt = found.prompt if len(found.prompt) <= 40 else found.prompt[:39] + "…"
        if found.kl_mean_nats is not None and found.top1_agreement_ratio is not None:
            said = (
                f"KL {found.kl_mean_nats:.4g} nats (most {found.kl_max_nats:.4g}), "
                f"same best token at {found.top1_agreement_ratio:.0%} of positions"
            )
        else:
            said = (
                f"{found.agreeing_tokens} tokens agree, first token's logprobs differ by "
                f"{found.max_logprob_difference:.4g}"
            )
        print(f"  {prompt!r}: {said}")
    known = {layer: value for layer, value in layers.items() if value is not None}
    print(f"  {len(changes)} modules in {len(layers)} layers; ‖ΔW‖/‖W‖ per layer:")
    if not known:
        print("    not known: the base's float weights are not at hand")
    width = max(known.values(), default=0.0)
    for layer, value in known.items():
        bar = "█" * round(30 * value / width) if width else ""
        print(f"    {layer:>3}  {value:<10.4g} {bar}")

"""`ullage adapter check ADAPTER --base MODEL`: what an engine makes of a LoRA adapter.

Holds flags, the table and the JSON document; judging is `ullage.adapters`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from ullage.adapters.base import base_tree
from ullage.adapters.check import check
from ullage.adapters.engines.table import ENGINES
from ullage.adapters.rules.table import Base
from ullage.adapters.verdict import Judgement, ServeOptions
from ullage.anatomy import load
from ullage.anatomy.adapters.read import read_adapter
from ullage.anatomy.spec import Anatomy, ModelSpec
from ullage.cli.actions import add_actions
from ullage.cli.flags import located, positive_integer
from ullage.errors import BadUsage

ACTIONS: Mapping[str, str] = {
    "check": "say what an engine makes of an adapter, module by module",
    "fix": "rewrite an adapter to what an engine reads, the original untouched",
    "merge-check": "compare a merged checkpoint with base + scale·B·A, tensor by tensor",
    "diff": "measure what an adapter changes, weight by weight and in the logits",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `ullage adapter` and their flags."""
    add_actions(parser, ACTIONS, _add_flags)


def _add_flags(name: str, parser: argparse.ArgumentParser) -> None:
    if name == "check":
        add_check_arguments(parser)
    else:
        import_module(f"ullage.cli.adapter_{name.replace('-', '_')}").add_arguments(parser)


def add_adapter_and_base(parser: argparse.ArgumentParser) -> None:
    """ADAPTER and --base, which every action has."""
    parser.add_argument(
        "adapter",
        metavar="ADAPTER",
        help="the adapter's directory (adapter_config.json and its weights)",
    )
    parser.add_argument(
        "--base", metavar="MODEL", required=True,
        help="the base model, as for `ullage size`: a directory, a configuration, a hub id",
    )  # fmt: skip


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine and how it is started, in vLLM's names."""
    engine = parser.add_argument_group("engine")
    engine.add_argument("--engine", choices=tuple(ENGINES), default="vllm", help="default: vllm")
    engine.add_argument("--engine-version", metavar="X.Y", help="default: the newest that is known")
    engine.add_argument("--max-lora-rank", type=positive_integer, metavar="N")
    engine.add_argument("--max-loras", type=positive_integer, metavar="N")
    engine.add_argument(
        "--lora-target-modules", nargs="+", metavar="NAME", help="only these modules are adapted"
    )
    engine.add_argument("--lora-dtype", choices=("auto", "float16", "bfloat16"), default="auto")
    engine.add_argument(
        "--tensor-parallel-size", "--tp", "-tp", type=positive_integer, default=1, metavar="N"
    )
    for flag in ("--enable-tower-connector-lora", "--enable-mixed-moe-lora-format",
                 "--fully-sharded-loras"):  # fmt: skip
        engine.add_argument(flag, action=argparse.BooleanOptionalAction, default=False)
    engine.add_argument(
        "--is-3d-lora-weight", action=argparse.BooleanOptionalAction, default=False,
        help="the request says so (only with --enable-mixed-moe-lora-format)",
    )  # fmt: skip


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    add_adapter_and_base(parser)
    add_engine_arguments(parser)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="list every module and every clear rule"
    )
    parser.set_defaults(do=run_check)


def options_from(args: argparse.Namespace) -> ServeOptions:
    """The options that the flags describe; what was not said stays the engine's default."""
    return ServeOptions(
        engine=args.engine,
        version=args.engine_version,
        max_lora_rank=args.max_lora_rank,
        max_loras=args.max_loras,
        lora_target_modules=None
        if args.lora_target_modules is None
        else tuple(part for text in args.lora_target_modules for part in text.split(",") if part),
        enable_tower_connector_lora=args.enable_tower_connector_lora,
        enable_mixed_moe_lora_format=args.enable_mixed_moe_lora_format,
        is_3d_lora_weight=args.is_3d_lora_weight,
        fully_sharded_loras=args.fully_sharded_loras,
        tensor_parallel_size=args.tensor_parallel_size,
        lora_dtype=None if args.lora_dtype == "auto" else args.lora_dtype,
    )


def run(args: argparse.Namespace) -> int:
    """Do the action: 0 when it works, 1 when it does not, 2 for bad input."""
    code: int = args.do(args)
    return code


def run_check(args: argparse.Namespace) -> int:
    judgement = judged(args)
    if args.output == "json":
        # In one piece: json.dump to a stream would go through Python for every value.
        print(json.dumps(document(args.adapter, args.base, judgement), allow_nan=False))
    else:
        from ullage.cli.adapter_table import lines  # only a reader of tables pays for it

        sys.stdout.write("".join(f"{line}\n" for line in lines(args, judgement)))
    return int(judgement.verdict != "works")


def judged(args: argparse.Namespace) -> Judgement:
    """The judgement that the flags ask for."""
    adapter = read_adapter(Path(args.adapter))
    path, _ = located(args.base)
    return check(adapter, _known(load(path).anatomy, args.base), options_from(args),
                 Base(name=args.base, revision=_revision(args.base, path)))  # fmt: skip


def base_spec(name: str) -> ModelSpec:
    """The base model that --base names. Raises BadUsage where its modules are not known."""
    path, _ = located(name)
    return _known(load(path).anatomy, name)


def _revision(name: str, path: Path) -> str | None:
    """The base's revision: asked for (ORG/NAME@revision), or the snapshot of a cache it lies in."""
    for place in (path, path.parent):
        if place.parent.name == "snapshots":
            return place.name
    return None if path == Path(name) else name.partition("@")[2] or None


def _known(anatomy: Anatomy, name: str) -> ModelSpec:
    """The spec, if whatever is not understood of it leaves its modules alone."""
    spec, low, high = anatomy.spec, anatomy.low, anatomy.high
    if low is high:
        return spec
    if base_tree(low).modules != base_tree(high).modules:
        unknown = ", ".join(f"{u.field} {u.found}" for u in spec.unknowns) or "its sizes"
        raise BadUsage(
            f"not understood: {unknown}", file=name, expected="a base model whose modules are known"
        )
    if low.dtype == high.dtype:
        return spec
    # A dtype that is not said gives no bytes per slot instead of a guess, and decides nothing else.
    rest = tuple(unknown for unknown in spec.unknowns if unknown.field != "dtype")
    return replace(spec, dtype="unknown", unknowns=rest)


def document(adapter: str, base: str, judgement: Judgement) -> dict[str, object]:
    """The JSON document of one judgement."""
    from ullage.findings.json import finding_document

    return {
        "adapter": adapter,
        "base": base,
        "engine": judgement.engine,
        "engine_version": judgement.version,
        "verdict": judgement.verdict,
        "matched": judgement.matched,
        "total": judgement.total,
        "basis": judgement.basis,
        "source": judgement.source,
        "message": judgement.message,
        "slot_bytes": judgement.slot_bytes,
        "limits": dict(judgement.limits),
        "notes": list(judgement.notes),
        "modules": [
            {
                "key": module.key,
                "module": module.module,
                "target": module.target,
                "scale_expected": module.scale_expected,
                "scale_applied": module.scale_applied,
                "state": module.state.value,
                "detail": module.detail,
            }
            for module in judgement.modules
        ],
        "findings": [finding_document(finding) for finding in judgement.findings],
    }

"""`ullage serve MODEL`: run the embedded engine behind OpenAI's routes until SIGTERM.

Parses flags with vLLM's names; torch and the server are imported when the flags are understood.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ullage.errors import BadUsage

if TYPE_CHECKING:
    from ullage.engine.encoder.embedder import Embedder
    from ullage.engine.engine import Engine
    from ullage.engine.options import EngineOptions

# Engine flags without a default here take EngineOptions' own.
SIZES = {
    "--max-num-seqs": "sequences in one step",
    "--max-num-batched-tokens": "tokens in one step; longer prompts run in chunks",
    "--long-prefill-token-threshold": "most tokens of one long prompt in a step (0: no limit)",
    "--max-long-partial-prefills": "long prompts in prefill at once (default: 1)",
    "--max-model-len": "limit on prompt and answer together (default: the model's own)",
    "--block-size": "tokens in one KV block",
    "--kv-cache-memory-bytes": "bytes of KV cache (default: 1 GiB)",
    "--max-loras": "adapters that may be loaded, all of them in one batch (default: 8)",
    "--max-lora-rank": "largest rank of an adapter (default: 16)",
}
CHOICES = {
    "--dtype": (("auto", "float32", "bfloat16"), "of weights and arithmetic; auto is float32"),
    "--quantization": (
        ("none", "int8"),
        "int8: weights by channel, activations on the fly (default: none)",
    ),
    "--kv-cache-dtype": (
        ("auto", "float32", "bfloat16", "int8_per_token_head", "int4_per_token_head"),
        "how keys and values are stored (default: auto, as --dtype)",
    ),
    "--scheduling": (
        ("continuous", "static"),
        "static: a batch runs to its end before the next one begins, for comparison",
    ),
    "--scheduling-policy": (("fcfs", "priority"), "who goes first (default: fcfs)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a directory, safetensors or GGUF file")
    parser.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 picks one (default: 8000)")
    for flag, text in SIZES.items():
        parser.add_argument(flag, type=int, metavar="N", help=text)
    for flag, (values, text) in CHOICES.items():
        parser.add_argument(flag, choices=values, help=text)
    parser.add_argument(
        "--attention-backend",
        dest="attention",
        choices=("auto", "paged", "gathered", "reference"),
        help="how attention reads the KV cache (default: auto, the fastest that runs here)",
    )
    parser.add_argument(
        "--enforce-eager",
        action="store_true",
        default=None,
        help="never the compiled step: all in PyTorch",
    )
    parser.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="keep the KV of prompts that begin alike (default: yes)",
    )
    parser.add_argument(
        "--max-num-queued-reqs",
        type=int,
        metavar="N",
        default=256,
        help="requests that may wait; more get 429 (default: 256)",
    )
    parser.add_argument(
        "--max-num-queued-tokens",
        type=int,
        metavar="N",
        help="prompt tokens without a first answer, above which newcomers get 429 (default: any)",
    )
    parser.add_argument(
        "--enable-lora",
        action="store_true",
        help="serve adapters: /v1/load_lora_adapter, /v1/unload_lora_adapter",
    )
    parser.add_argument(
        "--lora-modules",
        metavar="NAME=PATH",
        nargs="+",
        default=[],
        help="adapters to load at start, each served as the model NAME",
    )
    parser.add_argument("--api-key", metavar="KEY", help="demanded as a bearer token")
    parser.add_argument("--served-model-name", metavar="NAME", help="default: MODEL as given")
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        metavar="SECONDS",
        help="how long SIGTERM lets requests finish (default: as long as it takes)",
    )
    parser.add_argument(
        "--enable-control-routes",
        action="store_true",
        help="/ullage/kv, /ullage/cancel_oldest, /ullage/drain; needs --api-key",
    )
    parser.add_argument(
        "--probe-quality",
        action="store_true",
        help="watch answers for loops, early ends, lost confidence, another script: on /metrics, "
        "and with --enable-control-routes at /ullage/quality",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="read along: of one step in so many, how each head attends (on /metrics, and with "
        "--enable-control-routes at /ullage/entropy)",
    )
    parser.add_argument(
        "--probe-every", type=int, metavar="N", help="steps of which one is read (default: 16)"
    )
    parser.add_argument(
        "--probe-baseline",
        metavar="FILE",
        help="judge what is read by a file of `ullage probe baseline`; implies --probe",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write a Chrome trace of every step to FILE"
    )
    parser.add_argument(
        "--pooler-config",
        metavar="JSON",
        help="how an encoder's states become embeddings, where no modules.json says it: "
        '{"pooling_type": "MEAN" or "CLS" or "LAST", "use_activation": true}',
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM; 0 when everything that was taken has been answered."""
    try:
        from ullage.engine.options import EngineOptions
    except ImportError as error:
        raise _not_installed(error) from error
    for name in ("max_num_queued_reqs", "max_num_queued_tokens", "shutdown_timeout"):
        value = getattr(args, name)
        if value is not None and not value >= 0:
            flag = f"--{name.replace('_', '-')}"
            raise BadUsage(str(value), field=flag, expected="0 or more")
    _require_meant(args)
    options = EngineOptions(**_given(args, EngineOptions))
    _require_possible(args.model, options)
    try:
        from ullage.serving.app import ServeOptions, run_server
    except ImportError as error:
        raise _not_installed(error) from error
    serve = ServeOptions(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        served_model_name=args.served_model_name,
        max_num_queued_reqs=args.max_num_queued_reqs,
        max_num_queued_tokens=args.max_num_queued_tokens,
        lora_modules=_lora_modules(args.lora_modules),
        enable_control_routes=args.enable_control_routes,
        shutdown_timeout_s=args.shutdown_timeout,
        trace=args.trace,
        pooler_config=_pooler_config(args.pooler_config),
        probe_quality=args.probe_quality,
        probe=args.probe,
        probe_every=args.probe_every,
        probe_baseline=args.probe_baseline,
    )
    run_server(
        args.model,
        options,
        serve,
        _say_if_it_compiles,
        _announce,
    )
    return 0


def _not_installed(error: ImportError) -> BadUsage:
    """What to say of a module that is not there. Raises `error` where it is our own mistake."""
    if (error.name or "ullage").startswith("ullage"):
        raise error
    return BadUsage(f"{error.name} is not installed", expected="pip install 'ullage[engine]'")


def _require_meant(args: argparse.Namespace) -> None:
    """Raise BadUsage for flags that would do nothing, or not what they seem to ask for."""
    for name in ("api_key", "served_model_name"):
        value = getattr(args, name)
        if value is not None and not value.strip():
            raise BadUsage(repr(value), field=f"--{name.replace('_', '-')}", expected="some text")
    if not args.enable_lora:
        for name in ("max_loras", "max_lora_rank", "lora_modules"):
            if getattr(args, name):
                flag = f"--{name.replace('_', '-')}"
                raise BadUsage("adapters are off", field=flag, expected="--enable-lora with it")


def _require_possible(model: str, options: EngineOptions) -> None:
    """Refuse what a decoder's configuration rules out, before torch takes its seconds to load."""
    from ullage.anatomy import load

    spec = load(model).anatomy.spec
    if spec.kind != "encoder":
        try:
            from ullage.engine.possible import require_possible
        except ImportError as error:
            raise _not_installed(error) from error
        require_possible(spec, options)


def _given(args: argparse.Namespace, options: type[Any]) -> dict[str, Any]:
    """The engine's options that a flag of the same name sets."""
    given = {field.name: getattr(args, field.name) for field in fields(options)}
    return {name: value for name, value in given.items() if value is not None}


def _lora_modules(pairs: list[str]) -> dict[str, str]:
    """NAME=PATH, as vLLM writes them. Raises BadUsage."""
    modules: dict[str, str] = {}
    for pair in pairs:
        name, _, path = pair.partition("=")
        if not name or not path or name in modules:
            raise BadUsage(pair, field="--lora-modules", expected="NAME=PATH, each name once")
        modules[name] = path
    return modules


def _pooler_config(text: str | None) -> dict[str, object] | None:
    """The object that the flag holds. Raises BadUsage."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadUsage(text[:80], field="--pooler-config", expected="a JSON object")
    return found


def _say_if_it_compiles(served: Engine | Embedder) -> None:
    """The first start is silent for the time of a compilation, unless somebody says why."""
    from ullage.engine.kernels.compiling import available, note

    if getattr(served, "attention", None) == "paged" and available() and (said := note()):
        print(said, file=sys.stderr, flush=True)


def _announce(url: str, served: Engine | Embedder) -> None:
    from ullage.engine.positions.scaling import length_note

    pool = getattr(served, "pool", None)
    if pool is None:
        said = f"embeddings of texts of up to {served.max_model_len:,} tokens"
    else:
        said = f"{pool.num_tokens:,} tokens of KV in {pool.num_blocks:,} blocks"
        if because := getattr(served, "eager_because", None):
            print(f"every step runs in torch: {because}", file=sys.stderr, flush=True)
        if note := length_note(served.spec, served.max_model_len):
            print(note, file=sys.stderr, flush=True)
    print(f"ready on {url}: {said}", flush=True)

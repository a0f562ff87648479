"""`ullage probe check MODEL|URL --baseline FILE`: is the model still what the baseline says?

Holds flags, the table, the JSON document and the exit code; the judging is `ullage.probes`.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ullage.cli.checkup import server_url
from ullage.cli.flags import positive_integer
from ullage.cli.probe_baseline import adapters_of, add_lora, add_prompts
from ullage.cli.probe_fingerprint import local, require_engine
from ullage.errors import BadUsage

if TYPE_CHECKING:
    from ullage.probes.baseline.baseline import Baseline
    from ullage.probes.baseline.checking import Checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage probe check`."""
    parser.add_argument(
        "model", metavar="MODEL|URL", help="a model on this machine, or a server started by ullage"
    )
    parser.add_argument("--baseline", metavar="FILE", required=True, help="of probe baseline")
    add_prompts(parser, "what the model reads (default: other texts than a baseline's)")
    parser.add_argument(
        "--tokens", type=positive_integer, metavar="N", help="answered to each (default: 64)"
    )
    parser.add_argument(
        "--every",
        type=positive_integer,
        metavar="N",
        help="one row of every N-th step is judged, as in a server (default: 16)",
    )
    add_lora(parser, "also answer with this adapter, which the baseline knows; repeatable")
    parser.add_argument("--api-key", metavar="KEY", help="sent to a server as a bearer token")
    parser.add_argument("--output", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """0 clean, 1 something fired or nothing could be judged.

    Raises BadInput, and Unreachable for a server that is not.
    """
    adapters = adapters_of(args.lora)
    is_url = args.model.startswith(("http://", "https://"))
    model = server_url(args.model, "URL") if is_url else local(args.model)
    if is_url:
        _require_nothing_to_run(args)
    require_engine()
    from ullage.probes.baseline.baseline import read

    baseline = read(args.baseline)
    if is_url:
        from ullage.probes.baseline.serving_check import check_server

        found = check_server(str(model), baseline, args.baseline, args.api_key)
        document = _document_of(args, baseline, found.findings) | {
            "rows": found.rows, "steps": found.steps, "judged_by": found.judged_by,
            "not_seen": found.not_seen,
        }  # fmt: skip
    else:
        checked = _checked(args, model, baseline, adapters)
        document = _document(args, baseline, checked)
    print(json.dumps(document, allow_nan=False) if args.output == "json" else _table(document))
    states = {one["state"] for one in document["findings"]}
    return int("fired" in states or states <= {"not_evaluable"})


def _require_nothing_to_run(args: argparse.Namespace) -> None:
    """A server is read as it is: Raise BadUsage for flags that say what to run."""
    for flag in ("prompts", "tokens", "every", "lora"):
        if getattr(args, flag):
            raise BadUsage(
                "given with a URL", file=f"--{flag}",
                expected="a model: a server is read, and answers its own requests",
            )  # fmt: skip


def _checked(
    args: argparse.Namespace, model: Any, baseline: Baseline, adapters: dict[str, str]
) -> Checked:
    from ullage.probes.baseline.checking import NEW_TOKENS, check, load
    from ullage.probes.baseline.live import EVERY
    from ullage.probes.baseline.prompts import CHECKED, read_prompts

    prompts = read_prompts(args.prompts) if args.prompts else CHECKED
    engine = load(model, baseline, args.baseline, adapters)
    return check(
        engine, baseline, prompts, new_tokens=args.tokens or NEW_TOKENS, every=args.every or EVERY
    )


def _document_of(
    args: argparse.Namespace, baseline: Baseline, findings: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "model": args.model,
        "baseline": {"file": args.baseline, "model": baseline.model, "by": baseline.by},
        "findings": findings,
    }


def _document(args: argparse.Namespace, baseline: Baseline, found: Checked) -> dict[str, Any]:
    return _document_of(args, baseline, [one.document() for one in found.findings]) | {
        "rows": found.rows,
        "steps": found.steps,
        "tokens": found.tokens,
        "prompts": found.prompts,
        "first_alarm_row": found.first_alarm_row,
        "first_alarm_tokens": found.first_alarm_tokens,
        "judged_by": "baseline",
        "not_seen": "",
    }


_STATES = {"fired": "FIRED", "clear": "clear", "not_evaluable": "not evaluable"}


def _why(quiet: dict[str, Any]) -> str:
    """What a rule that has not fired lacks; of one that is clear what of it was not judged, or is
    not there (rows that were read stand above)."""
    if quiet["missing"]:
        return f": {'; '.join(quiet['missing'])}"
    seen = [e for e in quiet["evidence"] if e["name"] != "rows read"]
    words = [f"{e['name']}: {_number(e['value'])} {e['unit']}".rstrip() for e in seen]
    return f" ({'; '.join(words)})" if words else ""


def _table(document: dict[str, Any]) -> str:
    fired = [one for one in document["findings"] if one["state"] == "fired"]
    lines = [f"{document['model']} by {document['baseline']['file']}: {_read(document)}"]
    for one in fired:
        lines += [
            f"{one['id']} {one['severity']:<8} {_where(one)}",
            f"  cause   {one['cause']}",
            f"  remedy  {one['remedy']}",
        ]
        shown = [f"{e['name']} {_number(e['value'])} {e['unit']}".rstrip() for e in one["evidence"]]
        lines += [f"  seen    {text}" for text in shown[:3]]
    rest = [one for one in document["findings"] if one["state"] != "fired"]
    for one in rest:
        lines.append(f"{one['id']} {_STATES[one['state']]:<14} {one['title']}{_why(one)}")
    if document.get("first_alarm_tokens"):
        lines.append(
            f"first alarm at row {document['first_alarm_row']} of those read, by token "
            f"{document['first_alarm_tokens']:,} of those generated"
        )
    if all(one["state"] == "not_evaluable" for one in document["findings"]):
        lines.append("not decided: nothing could be judged")
    if document["not_seen"]:
        lines.append(document["not_seen"])
    return "\n".join(lines)


def _read(document: dict[str, Any]) -> str:
    tokens = f" of {document['tokens']:,} tokens" if "tokens" in document else ""
    return f"{document['rows']:,} rows read in {document['steps']:,} steps{tokens}"


def _where(one: dict[str, Any]) -> str:
    layers, heads = one["layers"], one["heads"]
    if not layers:
        return str(one["kind"])
    shown = ", ".join(map(str, layers[:12])) + (", …" if len(layers) > 12 else "")
    place = f"layer {shown}" if len(layers) == 1 else f"layers {shown}"
    head = f" head {', '.join(map(str, heads))}" if heads else ""
    return f"{one['kind']}, {place}{head}"


def _number(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)

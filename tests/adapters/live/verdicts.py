"""ullage's verdict on an adapter beside what the real server did with it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ullage.adapters.check import check
from ullage.adapters.verdict import Judgement, ServeOptions, State
from ullage.anatomy.adapters.read import read_adapter
from ullage.anatomy.spec import ModelSpec
from ullage.cli.adapter import add_engine_arguments, options_from
from ullage.errors import UllageError

VERDICT = {
    "no_start": "rejected",
    "rejected": "rejected",
    "dies": "rejected",
    "base": "no_effect",
    "as_trained": "works",
    "otherwise": "partial",
}
FILLED = (State.APPLIED, State.WRONG_SCALE, State.SHAPE_MISMATCH)
WHOLE_HEADS = ("score", "classifier")
"""Modules that are replaced and not adapted: vLLM's log does not name them."""


def serve_options(record: Mapping[str, Any]) -> ServeOptions:
    """The server of a record, told by its flags as to `ullage adapter check`."""
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    switches = [f"--{name.replace('_', '-')}" for name in record["request"]]
    return options_from(parser.parse_args([*record["flags"], *switches]))


def disagreement(record: Mapping[str, Any], adapter: Path, spec: ModelSpec) -> str | None:
    """How ullage's verdict and the server's conduct differ; None when they do not.

    An adapter that ullage cannot read (exit code 2) is one that vLLM must have refused.
    """
    try:
        judgement = check(read_adapter(adapter), spec, serve_options(record))
    except UllageError as error:
        if VERDICT[record["outcome"]] == "rejected":
            return None
        return f"vLLM: {record['outcome']}, ullage cannot read it: {error}"
    if record["unseen"] and record["adapted"] is not None:
        return _filled_otherwise(record["adapted"], judgement)
    if judgement.verdict != VERDICT[record["outcome"]]:
        return f"vLLM: {record['outcome']}, ullage: {judgement.verdict} ({_told(judgement)})"
    if judgement.verdict == "rejected":
        return _said_otherwise(record, judgement, adapter)
    if judgement.verdict == "no_effect":  # what holds nothing but zeros is filled in vain
        return None
    return _filled_otherwise(record["adapted"], judgement)


def _told(judgement: Judgement) -> str:
    states = {f"{m.state} {m.detail}".strip(): m.key for m in judgement.modules}
    return "; ".join(f"{key}: {state}" for state, key in list(states.items())[:3])


def _said_otherwise(record: Mapping[str, Any], judgement: Judgement, adapter: Path) -> str | None:
    """The server's answer must hold the message, or without one its log that exception."""
    expected = neutral(judgement.message or "", adapter)
    said = record["message"]
    if "failed with error ''," in said:
        said = record["raised"]
    return None if expected and expected in said else f"vLLM says {said!r}, ullage {expected!r}"


def neutral(message: str, adapter: Path) -> str:
    """The message without what differs from run to run: folder, number, a set's order."""
    message = message.replace(str(adapter), "<path>")
    message = re.sub(r"\bLoRA adapter \d+ ", "LoRA adapter N ", message)
    return re.sub(r"\{('[^{}]*')\}", _sorted_set, message)


def _sorted_set(found: re.Match[str]) -> str:
    return "{" + ", ".join(sorted(found[1].split(", "))) + "}"


def _filled_otherwise(adapted: Sequence[str], judgement: Judgement) -> str | None:
    """The served modules that ullage calls filled must be those of the server's log."""
    ours = {str(m.target) for m in judgement.modules if m.state in FILLED}
    in_vain = {str(m.target) for m in judgement.modules if m.state is State.IGNORED}
    theirs = set(adapted)
    missing, extra = theirs - ours - in_vain, ours - theirs - set(WHOLE_HEADS)
    if not missing and not extra:
        return None
    return f"filled: vLLM alone {sorted(missing)[:4]}, ullage alone {sorted(extra)[:4]}"

"""`ullage probe ACTION …`: is a model still sane inside? One action looks at one thing.

Holds the table of actions; each has a module of its own (`ullage.cli.probe_ACTION`), imported once
it is chosen, with `add_arguments(parser)` and `run(args) -> exit code`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module

from ullage.cli.actions import add_actions

ACTIONS: Mapping[str, str] = {
    "attention": "measure how each head attends: entropy, sinks, reach, scores",
    "rope": "hold rotary tables, as engines build them, against exact ones",
    "fingerprint": "sum up weights, angles and answers of a model, to compare with later",
    "numerics": "find the module that makes NaN, or is off; compare two machines",
    "baseline": "remember what a healthy model is like inside, to judge it by later",
    "check": "say whether a model or server is still what its baseline says, and which part not",
    "drift": "read sizes at norms and residuals, and whether they moved since",
    "sensitivity": "change weights one at a time and rank them by what moves",
    "compare": "say whether two models, servers or fingerprints are the same model",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `ullage probe` and their flags."""
    add_actions(parser, ACTIONS, _add_flags)


def _add_flags(name: str, parser: argparse.ArgumentParser) -> None:
    module = import_module(f"ullage.cli.probe_{name.replace('-', '_')}")
    module.add_arguments(parser)
    parser.set_defaults(do=module.run)


def run(args: argparse.Namespace) -> int:
    """Do the action: 0 done, 1 a finding, 2 bad input, 3 a server that could not be reached."""
    code: int = args.do(args)
    return code

"""`ullage probe ACTION …`: is a model still sane inside? One action looks at one thing.

Holds the table of actions; each has a module of its own (`ullage.cli.probe_ACTION`), imported once
it is chosen, with `add_arguments(parser)` and `run(args) -> exit code`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import Any

ACTIONS: Mapping[str, str] = {
    "attention": "measure how each head attends: entropy, sinks, reach, scores",
    "rope": "hold rotary tables, as engines build them, against exact ones",
    "fingerprint": "sum up weights, angles and answers of a model, to compare with later",
    "numerics": "find the module that makes NaN, or is off; compare two machines",
    "compare": "say whether two models, servers or fingerprints are the same model",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `ullage probe` and their flags."""
    kind: type[argparse.ArgumentParser] = type(parser)

    class Late(kind):  # type: ignore[valid-type, misc]
        """The parser of one action, which gets its flags once it is chosen: the others' modules
        are not imported then."""

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            name = self.prog.rpartition(" ")[2]
            module = import_module(f"ullage.cli.probe_{name.replace('-', '_')}")
            module.add_arguments(self)
            self.set_defaults(do=module.run)
            return super().parse_known_args(args, namespace)

    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Late
    )
    for name, summary in ACTIONS.items():
        actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")


def run(args: argparse.Namespace) -> int:
    """Do the action: 0 done, 1 a finding, 2 bad input, 3 a server that could not be reached."""
    code: int = args.do(args)
    return code

"""A verb with actions (`ullage probe ACTION …`): each gets its flags once it is chosen.

Holds the parser of actions alone; what they are is each verb's own table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any


def add_actions(
    parser: argparse.ArgumentParser,
    actions: Mapping[str, str],
    add_flags: Callable[[str, argparse.ArgumentParser], None],
) -> None:
    """One subcommand for each of `actions` (name → summary), chosen as `args.action`.

    `add_flags(name, parser)` is called for the one that is chosen, so that the others' modules are
    not imported.
    """
    kind: type[argparse.ArgumentParser] = type(parser)

    class Late(kind):  # type: ignore[valid-type, misc]
        """The parser of one action, which has no flags until it is asked to parse."""

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            add_flags(self.prog.rpartition(" ")[2], self)
            return super().parse_known_args(args, namespace)

    group = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Late)
    for name, summary in actions.items():
        group.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")

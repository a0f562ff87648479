"""Asks vLLM's own parser whether it takes given `vllm serve` command lines.

Run with the Python of vLLM's environment. Reads a JSON list of argument lists (what follows
`vllm serve`) on stdin, writes a JSON list: null where it is taken, else the parser's complaint.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")


def main() -> None:
    cases = json.load(sys.stdin)
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM prints on stdout; answers alone belong there
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message):
            raise ValueError(message)

    parser = make_arg_parser(Parser())

    def complaint(arguments):
        try:
            parser.parse_args(arguments)
        except (ValueError, SystemExit) as error:
            return str(error) or "refused"
        return None

    os.write(answers, json.dumps([complaint(case) for case in cases]).encode())


if __name__ == "__main__":
    main()

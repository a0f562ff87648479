"""Record the flags of `vllm serve` from vLLM's own argument parser.

Run `tools/record_vllm_flags.py` with the Python of a vLLM environment (tools/vllm_setup.sh); it
writes src/ullage/launch/vllm_flags.tsv. `--check` only says whether the file is current.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PLACE = Path(__file__).parents[1] / "src" / "ullage" / "launch" / "vllm_flags.tsv"
ARITY = {"?": "optional", "+": "many", "*": "any", 0: "none", None: "one"}
TYPES = {
    "int": "integer",
    "float": "number",
    "loads": "json",
    "human_readable_int": "size",
    "human_readable_int_or_auto": "size-or-auto",
}


def type_name(parse: object) -> str:
    """The name of a flag's parser; `_optional_type` and `_parse_type` wrap another one."""
    for _ in range(3):
        inner = [cell.cell_contents for cell in getattr(parse, "__closure__", None) or ()]
        if not inner or not callable(inner[0]):
            break
        parse = inner[0]
    return getattr(parse, "__name__", "text")


def flags() -> str:
    """The table: names, how many values, their type, the allowed ones; a flag per line."""
    from vllm import __version__ as version
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    rows = [
        f"# Flags of `vllm serve`, vLLM {version}; tools/record_vllm_flags.py writes this.",
        "# names\tvalues\ttype\tchoices",
    ]
    for action in parser._actions:
        if not action.option_strings:
            continue
        kind = TYPES.get(type_name(action.type), "text")
        if getattr(action.type, "__name__", "") == "_optional_type":
            kind += "?"
        choices = [str(choice) for choice in action.choices or () if choice is not None]
        rows.append(
            "\t".join(
                (
                    " ".join(action.option_strings),
                    ARITY[action.nargs],
                    kind,
                    " ".join(choices),
                )
            )
        )
    return "\n".join(rows) + "\n"


def main(arguments: list[str]) -> int:
    text = flags()
    if "--check" in arguments:
        current = PLACE.is_file() and PLACE.read_text() == text
        print("current" if current else "stale", file=sys.stderr)
        return int(not current)
    PLACE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Record the flags of SGLang's server from its sources, which are read and never imported.

Run `python tools/record_sglang_flags.py DIRECTORY VERSION` on an unpacked wheel of sglang; it
writes src/ullage/launch/sglang_flags.tsv in the form of vllm_flags.tsv.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PLACE = Path(__file__).parents[1] / "src" / "ullage" / "launch" / "sglang_flags.tsv"
TYPES = {"int": "integer", "float": "number"}


def field_flags(tree: ast.Module) -> list[tuple[str, str, str, str]]:
    """Rows of the annotated fields `name: A[type, help or Arg(...)]` in one module."""
    rows = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.annotation, ast.Subscript):
            continue
        if getattr(node.annotation.value, "id", "") != "A":
            continue
        kind, *notes = node.annotation.slice.elts
        settings: dict[str, ast.expr] = {}
        for note in notes:
            if isinstance(note, ast.Call) and getattr(note.func, "id", "") == "Arg":
                settings = {word.arg: word.value for word in note.keywords if word.arg}
        if "no_cli" in settings and ast.literal_eval(settings["no_cli"]):
            continue
        name = f"--{node.target.id.replace('_', '-')}"
        if "cli_name" in settings:
            name = ast.literal_eval(settings["cli_name"])
        names = [name, *(ast.literal_eval(settings["aliases"]) if "aliases" in settings else ())]
        rows.append((" ".join(names), *shape(ast.unparse(kind), settings)))
    return rows


def shape(kind: str, settings: dict[str, ast.expr]) -> tuple[str, str, str]:
    """How many values a field takes, their type, and the choices where they are written out."""
    inner = kind.removeprefix("Optional[").removesuffix("]") if "Optional[" in kind else kind
    choices = ""
    if inner.startswith("Literal["):
        choices = " ".join(str(c) for c in ast.literal_eval(f"[{inner[8:].rstrip(']')}]"))
    elif isinstance(settings.get("choices"), ast.List):
        choices = " ".join(str(c) for c in ast.literal_eval(settings["choices"]))
    arity = "one"
    if "action" in settings or "nargs" in settings:
        arity = "any"
    elif inner.lower().startswith("list[") and "type_parser" not in settings:
        arity = "many"
    elif inner == "bool":
        arity = "none"
    return arity, "text" if "type_parser" in settings else TYPES.get(inner, "text"), choices


def hand_written(tree: ast.Module) -> list[tuple[str, str, str, str]]:
    """Rows of the `parser.add_argument("--name", …)` calls in one module."""
    rows = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names = [a.value for a in node.args if isinstance(a, ast.Constant)]
            words = {word.arg for word in node.keywords}
            if names:
                rows.append((" ".join(names), "any" if "action" in words else "one", "text", ""))
    return rows


def main(arguments: list[str]) -> int:
    root, version = Path(arguments[0]) / "sglang" / "srt", arguments[1]
    rows = []
    for path in sorted((root / "arg_groups" / "fields").glob("*.py")):
        rows += field_flags(ast.parse(path.read_text()))
    rows += hand_written(ast.parse((root / "server_args.py").read_text()))
    head = (
        f"# Flags of SGLang's server, SGLang {version}; tools/record_sglang_flags.py writes this."
    )
    lines = [head, "# names\tvalues\ttype\tchoices", *("\t".join(row) for row in rows)]
    PLACE.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

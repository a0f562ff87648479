"""The text that answers are scored on: docstrings of Python's standard library, on every machine.

Holds reading it and cutting windows of tokens; the text differs a little between Pythons, so the
version is said with the results.
"""

from __future__ import annotations

import ast
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ullage.engine.text.tokenizer import Tokenizer
from ullage.errors import UllageError

# Modules whose docstrings explain something, in the order in which they are read.
MODULES = (
    *("argparse", "ast", "bisect", "calendar", "cmd", "code", "codecs", "concurrent/futures/_base"),
    *("configparser", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib"),
    *("doctest", "enum", "fractions", "functools", "gettext", "heapq", "inspect", "ipaddress"),
    *("logging/__init__", "optparse", "pathlib", "pickle", "pprint", "queue", "random", "sched"),
    *("shelve", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap"),
    *("threading", "timeit", "trace", "turtle", "types", "typing", "uuid", "weakref", "zipfile"),
)
LEAST_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of token ids, all of one length, and in words what they were cut from."""

    ids: tuple[tuple[int, ...], ...]
    words: str

    @property
    def num_scored(self) -> int:
        """Tokens that are predicted from the ones before: all but each window's first."""
        return sum(len(window) - 1 for window in self.ids)


def windows(tokenizer: Tokenizer, count: int, length: int) -> Windows:
    """`count` windows that do not overlap. Raises UllageError where the library has no sources."""
    ids: list[int] = []
    for text in docstrings():
        ids += tokenizer.encode(text + "\n\n", add_special=False)
        if len(ids) >= count * length:
            break
    else:
        raise UllageError(
            f"the docstrings of Python's standard library have only {len(ids):,} tokens here, "
            f"{count * length:,} are needed"
        )
    cut = tuple(tuple(ids[i * length : (i + 1) * length]) for i in range(count))
    words = (
        f"docstrings of the standard library of Python {platform.python_version()}, {count} "
        f"windows of {length} tokens"
    )
    return Windows(cut, words)


def docstrings() -> Iterator[str]:
    """Docstrings of the modules, their classes and functions, in the order of the source."""
    root = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        try:
            tree = ast.parse((root / f"{module}.py").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, SyntaxError):
            continue  # a Python without this module; the others are enough
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= LEAST_CHARACTERS:
                    yield text

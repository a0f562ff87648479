"""Write docs/rules/: one page per rule, and an index, from the rules themselves.

Run `python tools/generate_rule_pages.py` after a change to a rule; `--check` only says whether the
pages are current (exit code 1 when they are not).
"""

from __future__ import annotations

import sys
from pathlib import Path

from ullage.adapters.rules.table import RULES as ADAPTER_RULES
from ullage.audit.pages import index_page, rule_page
from ullage.audit.rules import RULES as AUDIT_RULES
from ullage.probes.baseline.rules import RULES as BASELINE_RULES
from ullage.probes.quality.rules import RULES as QUALITY_RULES
from ullage.watch.rules.table import RULES as WATCH_RULES

RULES = (*AUDIT_RULES, *ADAPTER_RULES, *BASELINE_RULES, *QUALITY_RULES, *WATCH_RULES)

PLACE = Path(__file__).parents[1] / "docs" / "rules"


def pages() -> dict[str, str]:
    """File name → text of every page."""
    made = {f"{rule.id}.md": rule_page(rule) for rule in RULES}
    return {"README.md": index_page(RULES), **made}


def stale(place: Path = PLACE) -> list[str]:
    """Names of the pages that are missing, out of date, or of rules that are no more."""
    wanted = pages()
    found = {path.name: path.read_text() for path in place.glob("*.md")}
    return sorted(n for n in {*wanted, *found} if wanted.get(n) != found.get(n))


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        names = stale()
        print(f"stale: {', '.join(names)}" if names else "current", file=sys.stderr)
        return int(bool(names))
    PLACE.mkdir(parents=True, exist_ok=True)
    for name in stale():
        (PLACE / name).unlink(missing_ok=True)
    for name, text in pages().items():
        (PLACE / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

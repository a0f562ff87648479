"""Texts that a baseline is taken of, other texts that a model is checked with, and files of texts.

Holds the texts and the reading of files. What is made of them is `learning`'s and `checking`'s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ullage.errors import BadUsage

MAX_BYTES = 64 << 20
MOST = 10_000
_EXPECTED = 'a text file with one prompt per line, or JSON lines with "prompt"'

_PROSE = (
    "The lighthouse keeper climbed the narrow stairs every evening at dusk, carrying a can of oil "
    "in one hand and a lantern in the other. On clear nights he could see the lamps of the fishing "
    "boats as they left the harbour, one after another, and he counted them without meaning to. "
    "When the wind turned to the north the sea grew loud, and the tower trembled a little under "
    "his feet; he had long ago stopped noticing it. In the logbook he wrote the hour, the weather "
    "and the names of the ships, in a small upright hand that had not changed in thirty years. "
)
_REPORT = (
    "Between 02:00 and 04:30 the replica served 18,214 requests, 311 of which were ended by the "
    "client before the first token. The queue was longest at 02:47 (96 requests waiting), when two "
    "of the four replicas were restarted after the driver had been updated. Time to the first "
    "token rose from 210 ms to 3.4 s at the 95th percentile and fell again within six minutes. No "
    "request failed; the cache was evicted twice. "
)
_CODE = (
    "class Account:\n    def __init__(self, owner, balance=0):\n        self.owner = owner\n"
    "        self.balance = balance\n\n    def deposit(self, amount):\n        if amount <= 0:\n"
    '            raise ValueError("amount must be positive")\n        self.balance += amount\n'
    "        return self.balance\n\n"
)

LEARNED = (
    "The lighthouse keeper climbed the narrow stairs every evening at dusk, because",
    "Water freezes at 0 degrees Celsius and boils at 100 degrees Celsius at sea level. Iron melts",
    "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and",
    "Les ouvriers ont quitté le chantier à midi, et le soir, dans la petite rue derrière la gare,",
    "从前有一座山，山上有一座小庙，庙里住着一个老和尚和一个小和尚。有一天，",
    "2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048,",
    '{"order": 48213, "customer": {"name": "M. Duarte", "city": "Porto"}, "lines": [{"sku": "A1",',
    "Dear Ms. Okafor,\n\nThank you for your letter of 3 March. We are sorry to hear that",
    "Q: Which planet has the most moons?\nA: Saturn.\nQ: Who wrote Don Quixote?\nA:",
    "SELECT customers.name, SUM(orders.total) AS spent\nFROM customers\nJOIN orders ON",
    "| month | visits | orders |\n|---|---|---|\n| January | 1,204 | 87 |\n| February | 1,377 |",
    "Die Sitzung wurde um neun Uhr eröffnet. Zuerst berichtete der Kassenwart über",
    "The theorem follows by induction on n. For n = 1 it is clear. Suppose that it holds for",
    "<html>\n<head><title>Opening hours</title></head>\n<body>\n<ul>\n<li>Monday:",
    _PROSE + _REPORT + _CODE + _PROSE.lower() + _REPORT,
)
"""Of a baseline; the last one is long."""

CHECKED = (
    "In the spring of 1911 a young surveyor arrived in the valley with a theodolite and",
    "Photosynthesis is the process by which plants",
    "import os\n\ndef list_files(path):\n    for name in sorted(os.listdir(path)):\n        ",
    "Le train de nuit pour Marseille partait toujours en retard, mais ce soir-là",
    "水稻是世界上最重要的粮食作物之一，主要种植在亚洲的",
    "The invoice total is 1,250.00 EUR, of which 19% VAT is",
    '[{"id": 1, "status": "open"}, {"id": 2, "status": "closed"}, {"id": 3,',
    "User: How do I reset my password?\nAssistant:",
    _REPORT + _PROSE + "To sum up,",
)
"""Of a check. No text of a baseline: what is judged holds whatever the text."""


def read_prompts(files: Sequence[str]) -> tuple[str, ...]:
    """Every prompt of the files, in order. Raises BadUsage for a file that has none."""
    found: list[str] = []
    for file in files:
        own = _of_file(file)
        if not own:
            raise BadUsage("no prompt in it", file=file, expected=_EXPECTED)
        found += own
    if len(found) > MOST:
        raise BadUsage(f"{len(found):,} prompts", field="--prompts", expected=f"at most {MOST:,}")
    return tuple(found)


def _of_file(file: str) -> list[str]:
    try:
        with Path(file).open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a usable path"
        raise BadUsage(f"cannot be read ({reason})", file=file, expected=_EXPECTED) from error
    if len(data) > MAX_BYTES:
        raise BadUsage(f"more than {MAX_BYTES:,} bytes", file=file, expected=_EXPECTED)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadUsage(f"byte {error.start} is no UTF-8", file=file, expected=_EXPECTED) from error
    # Not splitlines(): a prompt may hold a line separator of Unicode.
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line]
    if not lines or not (file.endswith(".jsonl") or _prompt_of(lines[0][1]) is not None):
        return [line for _, line in lines]
    found = []
    for number, line in lines:
        prompt = _prompt_of(line)
        if prompt is None:
            raise BadUsage(
                'no JSON object with a text "prompt"', file=file, field=f"line {number}",
                expected=_EXPECTED,
            )  # fmt: skip
        found.append(prompt)
    return found


def _prompt_of(line: str) -> str | None:
    """The prompt of one JSON line; None where it is none."""
    if not line.startswith("{"):
        return None
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    prompt = document.get("prompt") if isinstance(document, dict) else None
    return prompt if isinstance(prompt, str) and prompt else None

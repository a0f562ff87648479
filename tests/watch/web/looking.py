"""Photographs of the page: `python -m tests.watch.web.looking FOLDER`.

Serves the simulated fleet, opens it narrow and wide, in the dark and light, and writes PNGs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.watch.web import chrome, simulated
from tests.watch.web.served import served
from ullage.watch.web.feed import Feed, id_of

STRIP = 1500
ALL_OF_AN_HOUR = (
    "(() => { const span = document.getElementById('span'); span.value = '3600';"
    "span.dispatchEvent(new Event('change')); })()"
)


def main(folder: Path, widths: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    feed = Feed()
    for sight in simulated.rounds(3600):
        feed.take(sight)
    chosen = f"#replica={id_of(simulated.name_of(2))}"
    with served(feed) as url, chrome.browser() as page:
        for width in widths:
            for dark in (False, True):
                page.look(width, dark=dark, still=True)
                page.open(f"{url}/?{width}{dark}{chosen if dark else ''}")
                page.wait("document.querySelectorAll('#rows tr').length > 0")
                page.evaluate(ALL_OF_AN_HOUR)
                page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
                height = page.evaluate("document.documentElement.scrollHeight")
                for i in range(-(-height // STRIP)):
                    name = f"{width}-{'dark' if dark else 'light'}-{i}.png"
                    strip = min(STRIP, height - i * STRIP)
                    page.photograph(folder / name, top=i * STRIP, height=strip)
        print("\n".join(page.complaints()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(width) for width in sys.argv[2:]] or [1360, 800, 360])

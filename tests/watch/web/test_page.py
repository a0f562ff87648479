"""The page in a real Chromium: what it shows, how it is used, what it never does."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.watch import sights
from tests.watch.web import chrome, simulated
from tests.watch.web.served import served
from ullage.pages import words
from ullage.watch.rule import Judged
from ullage.watch.sight import Incident
from ullage.watch.view import Change
from ullage.watch.web.feed import Feed, id_of

pytestmark = pytest.mark.skipif(chrome.find() is None, reason="no chromium on this machine")
READY = "document.querySelectorAll('#rows tr').length > 0"
STORM, DOWN, QUIET = (simulated.name_of(i) for i in (2, 7, 9))


@pytest.fixture(scope="module")
def page() -> Iterator[chrome.Page]:
    with chrome.browser() as page:
        yield page


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[Feed, str]]:
    feed = Feed()
    for sight in simulated.rounds(1800, every=3):
        feed.take(sight)
    with served(feed) as url:
        yield feed, url


@pytest.fixture
def opened(page: chrome.Page, fleet: tuple[Feed, str]) -> Iterator[chrome.Page]:
    """The fleet's page, fresh, at 1280 × 900; afterwards: nothing failed, nothing was fetched."""
    page.look(1280, still=True)
    page.open("about:blank")
    page.wait("location.href === 'about:blank'")
    page.events.clear()
    page.open(f"{fleet[1]}/")
    page.wait(READY)
    yield page
    assert page.complaints() == []
    assert {url.split("/")[2] for url in page.asked() if url.startswith("http")} == {
        fleet[1].removeprefix("http://")
    }


def test_it_shows_the_fleet_worst_first(opened: chrome.Page) -> None:
    assert opened.text("h1") == "12 replicas, 2 models"
    verdict = opened.text("#verdict")
    assert "1 replica of 12 does not answer" in verdict
    assert "W003" in verdict
    names = opened.evaluate("[...document.querySelectorAll('#rows .name')].map(n => n.innerText)")
    assert names[:4] == [DOWN, STORM, simulated.name_of(5), QUIET]
    assert len(names) == 12
    assert "connection refused" in opened.text("#rows tr:first-child")
    assert opened.text("#rows tr:nth-child(2) .bar-text span") == "99.9%"
    width = opened.evaluate("document.querySelectorAll('#rows .bar i')[1].style.width")
    assert float(width.removesuffix("%")) > 99


def test_an_incident_says_which_since_when_why_and_what_changed(opened: chrome.Page) -> None:
    first = opened.text("#incidents-now article:first-child")
    for part in (STORM, "40 min", "2.3 requests a second", "--max-num-seqs 20",
                 "gpu_memory_utilization", "0.92 → 0.80", "40 s before"):  # fmt: skip
        assert part in first
    lists = "[...document.querySelectorAll('#incidents-now article:first-child .changed ul')]"
    before, later = opened.evaluate(f"{lists}.map(list => list.innerText)")
    assert "before" in before and "after" not in before
    assert "num_blocks" in later and "4 s after it began" in later
    labels = lists.replace(" ul", " .label")
    assert opened.evaluate(f"{labels}.map(label => label.textContent)") == [
        "What changed shortly before",
        "Seen to change after it began",
    ]
    opened.click("#incidents-now article:first-child summary")
    assert "vllm:kv_cache_usage_perc" in opened.text("#incidents-now article:first-child")
    assert opened.text("#incidents-past summary") == "1 that ended in the last day"


def test_what_is_not_known_is_a_dash_that_says_why(opened: chrome.Page) -> None:
    row = "#rows tr:nth-child(4) .preemptions span"
    assert opened.text(row) == "–"
    opened.evaluate(f"document.querySelector('{row}').focus()")
    opened.wait("!document.getElementById('tip').hidden")
    assert opened.text("#tip") == f"not known: {sights.WHY}"
    assert opened.evaluate(f"document.querySelector('{row}').ariaLabel") == opened.text("#tip")
    opened.press("Escape", 27)
    assert opened.evaluate("document.getElementById('tip').hidden")
    assert opened.evaluate("document.querySelectorAll('#rows tr:nth-child(4) .unknown').length")


def test_a_replica_is_chosen_with_the_keyboard_and_told_in_full(opened: chrome.Page) -> None:
    opened.evaluate("document.querySelector('#rows tr:nth-child(2) .name').focus()")
    opened.press("Enter", 13)
    opened.wait("document.querySelectorAll('#figures tr').length > 10")
    assert opened.evaluate("location.hash") == f"#replica={id_of(STORM)}"
    assert opened.text("#time-title") == f"Over time: {STORM}"
    assert "page utilisation" in opened.text("#absent")
    assert sights.WHY in opened.text("#absent")
    assert "acme/thirty-two-b" in opened.text("#identity")
    assert "1755 MHz" in opened.text("#gpus")
    assert "gpu_memory_utilization" in opened.text("#changes")
    assert "not evaluable" in opened.text("#findings")
    opened.click("#everything")
    opened.wait("document.getElementById('replica').hidden")
    assert opened.text("#time-title") == "Over time"


def test_a_replica_that_is_down_shows_no_old_figures(opened: chrome.Page) -> None:
    opened.click("#rows tr:first-child .name")
    opened.wait("!document.getElementById('replica-error').hidden")
    assert "connection refused. Its last answer was at" in opened.text("#replica-error")
    assert opened.evaluate("document.querySelectorAll('#figures tr').length") == 0
    # It answered until 15 minutes ago, so its line ends before the right edge.
    assert "not known" in opened.text("#chart-kv figcaption")


def test_a_sum_of_some_says_of_how_many(opened: chrome.Page) -> None:
    assert "10 of 11 replicas tell it" in opened.text("#chart-kv figcaption")
    assert "tell it" not in opened.text("#chart-requests figcaption")
    used = "#keys div:first-child"
    # One engine tells no bytes, one does not answer: the share is not made of bytes then.
    assert opened.text(f"{used} small") == "mean of replicas; 10 of 11 tell it"


def test_a_short_past_fills_the_chart(page: chrome.Page) -> None:
    feed = Feed()
    for sight in simulated.rounds(120):
        feed.take(sight)
    with served(feed) as url:
        page.open(f"{url}/")
        page.wait(READY)
        xs = page.evaluate(
            "document.querySelector('#chart-prefix polyline').getAttribute('points')"
            ".split(' ').map(p => +p.split(',')[0])"
        )
        left = page.evaluate("+document.querySelector('#chart-prefix .base').getAttribute('x1')")
    assert len(xs) == 25
    assert xs[0] == pytest.approx(left, abs=0.2)


def test_a_chart_says_why_there_is_nothing_to_draw(opened: chrome.Page) -> None:
    opened.click("#rows tr:nth-child(4) .name")
    opened.wait(f"document.getElementById('time-title').innerText.includes('{QUIET}')")
    assert opened.text("#chart-ttft figcaption").endswith(f"not known: {sights.WHY}")


def test_the_moment_is_moved_with_the_keyboard_and_read_in_every_chart(
    opened: chrome.Page, fleet: tuple[Feed, str]
) -> None:
    opened.evaluate("document.getElementById('moment').focus()")
    for _ in range(5):
        opened.press("ArrowLeft", 37)
    opened.wait("document.getElementById('moment-text').innerText !== 'now'")
    rows = fleet[0].past.fleet.since(0)
    used = rows[-6][1][1]
    opened.wait(
        f"document.querySelector('#chart-kv .legend').innerText.includes('{words.byte_size(used)}')"
    )
    assert opened.evaluate("document.getElementById('moment').ariaValueText || true")
    label = opened.evaluate("document.querySelector('#chart-kv svg').getAttribute('aria-label')")
    assert words.byte_size(used) in label


def test_the_moment_follows_the_pointer(opened: chrome.Page) -> None:
    box = opened.evaluate(
        "(() => { const c = document.querySelector('#chart-requests svg');"
        "c.scrollIntoView({block: 'center'}); const b = c.getBoundingClientRect();"
        "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
    )
    opened.point(*box)
    opened.wait("document.querySelectorAll('svg line.moment').length >= 6")
    opened.point(2, 2)
    opened.wait("document.querySelectorAll('svg line.moment').length === 0")


def test_a_line_is_where_its_value_is(opened: chrome.Page, fleet: tuple[Feed, str]) -> None:
    """The last point of the ratio's line, against the numbers that were drawn."""
    points = opened.evaluate(
        "document.querySelector('#chart-prefix polyline').getAttribute('points')"
    )
    x, y = map(float, points.split()[-1].split(","))
    ticks = opened.evaluate(
        "[...document.querySelectorAll('#chart-prefix line.grid')].map(l => +l.getAttribute('y1'))"
    )
    zero, full = max(ticks), min(ticks)
    row = fleet[0].past.fleet.since(0)[-1][1]
    assert (zero - y) / (zero - full) == pytest.approx(row[10], abs=0.004)
    assert x == pytest.approx(
        opened.evaluate("+document.querySelector('#chart-prefix line.base').getAttribute('x2')"),
        abs=0.2,
    )


def test_a_new_round_is_shown_at_once_and_leaves_hands_where_they_are(
    opened: chrome.Page, fleet: tuple[Feed, str]
) -> None:
    opened.click("#incidents-now article:first-child summary")
    opened.evaluate("document.getElementById('search').focus()")
    opened.type("W0")
    opened.wait("document.querySelectorAll('#rows tr').length === 2")
    meta = opened.text("#meta")
    fleet[0].take(simulated.sight_at(simulated.START_S))
    opened.wait(f"document.getElementById('meta').innerText !== {json.dumps(meta)}")
    assert opened.evaluate("document.querySelector('#incidents-now details').open")
    assert opened.evaluate("document.activeElement.id") == "search"
    assert opened.evaluate("document.querySelectorAll('#rows tr').length") == 2


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_width_can_be_read(opened: chrome.Page, dark: bool) -> None:
    opened.click("#rows tr:nth-child(2) .name")
    opened.wait("document.querySelectorAll('#figures tr').length > 10")
    for width in (320, 360, 800, 1000, 1360, 1920):
        opened.look(width, dark=dark, still=True)
        opened.wait(f"innerWidth === {width}")
        assert opened.evaluate(WIDE) == [], width
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.evaluate(FAINT) == [], width
        assert opened.evaluate(BROKEN) == [], width


# A figure of the cache that is parted from its per cent.
BROKEN = """[...document.querySelectorAll('.bar-text > *')]
  .filter(e => e.offsetHeight > 1.9 * parseFloat(getComputedStyle(e).fontSize))
  .map(e => e.innerText).slice(0, 5)"""
WIDE = """[...document.querySelectorAll('body *')].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1;
}).map(e => e.tagName + '.' + e.className + ' ' + e.innerText).slice(0, 5)"""
# Text whose colour is too near to what is behind it (WCAG 2.2, 1.4.3: 4.5 to 1, large text 3 to 1).
FAINT = """(() => {
  const parse = text => {
    const m = text.match(/[\\d.]+/g).map(Number);
    return m.length < 4 ? [...m.slice(0, 3), 1] : m;
  };
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) =>
    0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = node => {
    for (let e = node; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour[3] === 1) return colour;
    }
  };
  const out = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim(), e = walker.currentNode.parentElement;
    if (!text || !e.getClientRects().length || e.closest('[hidden], noscript, .skip')) continue;
    const style = getComputedStyle(e), size = parseFloat(style.fontSize);
    const a = light(parse(e.closest('svg') ? style.fill : style.color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    if (ratio < least) out.add(`${e.tagName}.${e.className} ${ratio.toFixed(2)} ${text}`);
  }
  return [...out].slice(0, 12);
})()"""


def test_everything_that_can_be_used_has_a_name(opened: chrome.Page) -> None:
    opened.click("#rows tr:nth-child(2) .name")
    opened.wait("document.querySelectorAll('#figures tr').length > 10")
    nameless = opened.evaluate(
        "[...document.querySelectorAll('button, input, select, [tabindex=\"0\"]')].filter(e =>"
        "e.getClientRects().length && !(e.textContent || e.ariaLabel ||"
        "[...(e.labels ?? [])].some(l => l.innerText)))"
        ".map(e => e.outerHTML)"
    )
    assert nameless == []
    ids = opened.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    unlabelled = opened.evaluate(
        "[...document.querySelectorAll('svg[role=img]')].filter(e =>"
        "!e.getAttribute('aria-label')).length"
    )
    assert unlabelled == 0


def test_nothing_moves_for_those_who_asked_for_stillness(opened: chrome.Page) -> None:
    opened.wait("document.getElementById('pulse').dataset.state !== 'waiting'")
    assert opened.evaluate("document.getAnimations().length") == 0


def test_a_watcher_that_is_gone_is_said_loudly(page: chrome.Page) -> None:
    feed = Feed()
    feed.take(simulated.sight_at(simulated.START_S))
    page.look(1280, still=True)
    with served(feed) as url:
        page.open(f"{url}/")
        page.wait(READY)
    page.wait("!document.getElementById('stale').hidden && document.body.classList.contains('old')")
    assert "the watcher does not answer" in page.text("#stale")
    assert page.evaluate("document.getElementById('pulse').dataset.state") == "lost"


def test_a_round_that_is_old_is_said_to_be(page: chrome.Page) -> None:
    feed = Feed()
    feed.take(simulated.sight_at(time.time() - 600))
    with served(feed) as url:
        page.open(f"{url}/")
        page.wait("!document.getElementById('stale').hidden")
    assert "10 min old" in page.text("#stale")


TEETH = "</script><img src=x onerror='pwned=1'><script>pwned=1</script>\u202e\x00\"'`${pwned=1}"


def test_hostile_names_stay_names(page: chrome.Page) -> None:
    url = f"http://{TEETH}"
    now = sights.snapshot(
        models=(TEETH,), settings={TEETH: TEETH}, version=TEETH, adapters=(TEETH,), engine=TEETH
    )
    change = Change(sights.NOW_S, TEETH, TEETH, TEETH)
    finding = sights.fired(title=TEETH, cause=TEETH, remedy=TEETH)
    feed = Feed()
    feed.take(
        sights.sight(
            sights.view(url, now=now, changes=(change,), pod={TEETH: TEETH}),
            sights.down(f"{url}2", error=TEETH),
            judged=(Judged(url, finding), Judged(url, sights.lacking(missing=TEETH))),
            incidents=(Incident(url, finding, sights.NOW_S - 60, None, (change,)),),
        )
    )
    page.events.clear()
    with served(feed) as address:
        page.open(f"{address}/#replica={id_of(url)}")
        page.wait("document.querySelectorAll('#figures tr').length > 10")
        for where in ("h1", "#verdict", "#incidents-now", "#rows", "#identity", "#changes"):
            assert "<img src=x onerror='pwned=1'>" in page.text(where)
        assert page.evaluate("typeof pwned") == "undefined"
        assert page.evaluate("document.querySelectorAll('img, main script').length") == 0
        assert "\u202e" not in page.evaluate("document.documentElement.outerHTML")
        page.look(360, still=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.complaints() == []


def test_a_thousand_replicas_stay_usable(page: chrome.Page) -> None:
    feed = Feed()
    feed.take(simulated.sight_at(simulated.START_S, num=1000))
    page.look(1280, still=True)
    with served(feed) as url:
        page.open(f"{url}/")
        page.wait("document.querySelectorAll('#rows tr').length === 50")
        assert page.text("#shown") == "1,000 replicas; the first 50 are shown."
        page.click("#more")
        page.wait("document.querySelectorAll('#rows tr').length === 100")
        page.evaluate("document.getElementById('search').focus()")
        page.type(simulated.name_of(702))
        page.wait("document.querySelectorAll('#rows tr').length === 1")
        assert page.text("#rows .name") == simulated.name_of(702)
        assert page.evaluate("document.querySelectorAll('*').length") < 3000
        took = page.evaluate(
            "fetch('/api/sight').then(r => r.json()).then(() => performance"
            ".getEntriesByType('resource').at(-1).duration)"
        )
        assert took < 1000


def test_one_replica_alone_is_told_in_full_without_choosing(page: chrome.Page) -> None:
    feed = Feed()
    feed.take(sights.sight(sights.view(), judged=(Judged(sights.URL, sights.clear()),)))
    with served(feed) as url:
        page.open(f"{url}/")
        page.wait("document.querySelectorAll('#figures tr').length > 10")
        assert page.text("h1") == "acme/seven-b"
        assert page.text("#verdict strong") == "Nothing fired"
        assert page.evaluate("document.getElementById('find').hidden")


def test_the_key_is_asked_for_and_lets_in(page: chrome.Page) -> None:
    feed = Feed()
    feed.take(sights.sight(sights.view()))
    with served(feed, api_key="open sesame") as url:
        page.open(f"{url}/")
        page.wait("location.pathname === '/login' && Boolean(document.getElementById('key'))")
        page.evaluate("document.getElementById('key').focus()")
        page.type("open sesame")
        page.press("Enter", 13)
        page.wait(f"location.pathname === '/' && {READY}")


NUMBERS = (0, 1, 9.994, 9.995, 12, 99.95, 100, 999, 999.6, 1000, 1234.6, 65_536, 999_999, 1e6,
           134_515_008, 55e9, 2.5e12, 0.1, 0.0123, 0.00099, 1e-4, 3.21e-6, -5, -0.25)  # fmt: skip


def test_numbers_read_as_in_the_other_pages(opened: chrome.Page) -> None:
    for unit in ("bytes", "s", "ratio", "tokens/s"):
        shown = opened.evaluate(
            f"import('/words.js').then(w => {json.dumps(NUMBERS)}"
            f".map(v => w.quantity(v, '{unit}')))"
        )
        assert shown == [words.quantity(number, unit) for number in NUMBERS]

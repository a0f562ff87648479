"""How a replica's heads attend, on the page: asked of the one that is looked at, drawn, walked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.watch import sights
from tests.watch.web import chrome
from tests.watch.web.served import served
from tests.watch.web.test_page import BROKEN, FAINT, WIDE
from ullage.watch.web.attention import ENGINES, FIGURES, ROUTE, Attention, document_of
from ullage.watch.web.feed import Feed

LAYERS, HEADS = 5, 4


def head(number: int, entropy: float | None, *, outside: bool | None = False) -> dict[str, Any]:
    spread = None if entropy is None else {"mean": 6 * entropy, "p5": 0.0, "p95": 6.0}
    return {
        "head": number,
        "rows": 40,
        "not_finite": 0,
        "entropy_nats": spread,
        "entropy_normalized": entropy,
        "sink_mass": 0.25,
        "band_mass": 0.5,
        "band_entropy_nats": None,
        "effective_context": 12.5,
        "max_score": 20.09,
        "usual_entropy_normalized": {"mean": 0.4, "spread": 0.05},
        "outside": outside,
    }


def fired(rule: str, title: str, kind: str, layers: list[int], heads: list[int]) -> dict[str, Any]:
    return {
        "id": rule, "title": title, "severity": "error", "state": "fired", "kind": kind,
        "layer": layers[0], "layers": layers, "heads": heads, "evidence": [], "missing": [],
        "cause": "It is 4 times as large.", "remedy": "Load the weights anew.", "accepted": False,
    }  # fmt: skip


def told(**changes: Any) -> dict[str, Any]:
    """What GET /ullage/entropy says: layer 2 head 1 is far from the baseline, 3 / 0 is unknown."""
    special = {(2, 1): head(1, 0.93, outside=True), (3, 0): head(0, None, outside=None)}
    layers = [
        {
            "layer": layer,
            "heads": [
                special.get((layer, number), head(number, 0.1 * layer + 0.05 * number))
                for number in range(HEADS)
            ],
        }
        for layer in range(LAYERS)
    ]
    clear = {**fired("P002", "norms", "norm", [0], []), "state": "clear", "layers": []}
    return {
        "model": "tiny",
        "source": "embedded engine",
        "every": 16,
        "steps": 656,
        "rows": 41,
        "rows_kept": 41,
        "seconds": 0.0625,
        "baseline": {"file": "b", "model": "tiny", "by": "ullage", "rows": 96, "prompts": 3},
        "findings": [fired("P001", "products of weights", "q", [2], [1]), clear],
        "layers": layers,
        **changes,
    }


# --- the document ---


def test_tables_are_by_layer_and_head() -> None:
    found = document_of(told())
    assert (found["layers"], found["heads"]) == ([0, 1, 2, 3, 4], [0, 1, 2, 3])
    assert found["entropy"][2] == [0.2, 0.93, 0.3, 0.35]
    assert found["entropy"][3][0] is None and found["nats"][3][0] is None
    assert [row.index(True) for row in found["outside"] if True in row] == [1]
    assert found["score"][0] == [20.09] * HEADS
    assert [(one["id"], one["kind"], one["layers"]) for one in found["findings"]] == [
        ("P001", "q", [2]),
        ("P002", "norm", []),
    ]


def test_what_vllms_plugin_says_is_drawn_without_a_baseline() -> None:
    """It has no findings; heads have no usual figures."""
    said = told()
    for name in ("baseline", "findings", "steps"):
        del said[name]
    for layer in said["layers"]:
        for one in layer["heads"]:
            del one["usual_entropy_normalized"], one["outside"]
    found = document_of(said)
    assert (found["baseline"], found["findings"]) == (None, [])
    assert not any(any(row) for row in found["outside"])
    assert found["entropy"][2][1] == 0.93


def test_layers_of_unlike_heads_have_gaps() -> None:
    said = told()
    del said["layers"][1]["heads"][2]
    assert document_of(said)["entropy"][1][2] is None


@pytest.mark.parametrize(
    "hostile",
    [
        {"layers": "x"},
        {"layers": [3]},
        {"layers": [{"layer": -1, "heads": []}]},
        {"layers": [{"layer": 0, "heads": [{"head": "0"}]}]},
        {"rows": None},
        {"every": True},
        {"findings": [{"id": "P001"}]},
        {"findings": "none"},
        {"findings": [{**fired("P001", "t", "q", [1], []), "severity": "<b>"}]},
        {"baseline": "b"},
    ],
)
def test_another_form_is_refused_whole(hostile: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        document_of(told(**hostile))


def test_numbers_that_are_none_and_texts_are_made_harmless() -> None:
    said = told()
    said["layers"][0]["heads"][0]["entropy_normalized"] = "1e9"
    said["layers"][0]["heads"][1]["max_score"] = 10**400
    said["findings"][0]["title"] = "a\x1b[31m\u202eb" * 400
    found = document_of(said)
    assert found["entropy"][0][0] is None
    assert found["score"][0][1] is None
    title = found["findings"][0]["title"]
    assert len(title) <= 400 and title.isprintable()


def test_a_giant_is_said_and_not_drawn() -> None:
    many = [{"layer": n, "heads": [head(h, 0.5) for h in range(300)]} for n in range(150)]
    assert "45,000" in document_of(told(layers=many))["why"]


# --- asking ---


class _Replica(ThreadingHTTPServer):
    """Answers with what it is told to; counts."""

    answer: tuple[int, bytes] = (200, b"")
    seen: list[str | None]
    daemon_threads = True


@contextlib.contextmanager
def replica(status: int, body: Any) -> Iterator[tuple[str, _Replica]]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert isinstance(self.server, _Replica)
            assert self.path == ROUTE
            self.server.seen.append(self.headers.get("authorization"))
            status, body = self.server.answer
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = _Replica(("127.0.0.1", 0), Handler)
    server.seen = []
    server.answer = (status, body if isinstance(body, bytes) else json.dumps(body).encode())
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked(url: str, times: int = 1, api_key: str | None = None) -> Any:
    async def ask() -> Any:
        attention = Attention(api_key=api_key)
        found = await asyncio.gather(*(attention.of(url) for _ in range(times)))
        attention.close()
        assert all(one == found[0] for one in found)
        return found[0]

    return asyncio.run(ask())


def test_many_lookers_ask_once_with_the_watchers_key() -> None:
    with replica(200, told()) as (url, server):
        assert asked(url, times=5, api_key="k") == document_of(told())
        assert server.seen == ["Bearer k"]


@pytest.mark.parametrize("path", ["/metrics", "/v1", ""])
def test_a_url_is_taken_as_it_is_scraped(path: str) -> None:
    with replica(200, told()) as (url, _):
        assert asked(url + path)["rows"] == 41


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, b"{}", "a key (--api-key)"),
        (200, b"<html>", "not of the form"),
        (200, b"[" * 5000, "not of the form"),
        (200, b'{"layers": 3}', "not of the form"),
    ],
)
def test_what_it_does_not_tell_is_said(status: int, body: bytes, why: str) -> None:
    with replica(status, body) as (url, _):
        assert why in asked(url)["why"]


@pytest.mark.parametrize("status", [404, 501, 503])
def test_a_server_that_does_not_read_along_shows_nothing(status: int) -> None:
    with replica(status, b"{}") as (url, _):
        assert asked(url) is None


@pytest.mark.parametrize(("status", "again"), [(200, True), (401, True), (404, False)])
def test_one_without_the_route_is_asked_less_often(
    status: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage.watch.web.attention.FRESH_S", 0.0)

    async def ask(url: str) -> None:
        attention = Attention()
        for _ in range(3):
            await attention.of(url)
        attention.close()

    with replica(status, told()) as (url, server):
        asyncio.run(ask(url))
        assert len(server.seen) == (3 if again else 1)


def test_one_that_is_gone_is_said() -> None:
    with replica(200, told()) as (url, _):
        pass
    assert "refused" in asked(url)["why"]


def test_only_so_many_connections_are_kept() -> None:
    async def ask() -> int:
        attention = Attention()
        for port in range(100):
            attention._kept_of(f"http://127.0.0.1:{port + 1}")
        return len(attention._kept)

    assert asyncio.run(ask()) <= 32


# --- the page ---


@pytest.fixture(scope="module")
def page() -> Iterator[chrome.Page]:
    if chrome.find() is None:
        pytest.skip("no chromium on this machine")
    with chrome.browser() as page:
        yield page


Opened = Callable[..., contextlib.AbstractContextManager[chrome.Page]]


@pytest.fixture
def opened(page: chrome.Page) -> Opened:
    """The page of one replica, that answers as told; afterwards nothing failed."""

    @contextlib.contextmanager
    def open_page(
        said: Any, status: int = 200, engine: str = "ullage", width: int = 1280, dark: bool = False
    ) -> Iterator[chrome.Page]:
        with replica(status, said) as (url, _):
            now = sights.snapshot(engine=engine)
            feed = Feed()
            feed.take(sights.sight(sights.view(url, now=now)))
            with served(feed, attention=Attention()) as address:
                page.look(width, dark=dark, still=True)
                page.open("about:blank")
                page.wait("location.href === 'about:blank'")
                page.events.clear()
                page.open(f"{address}/")
                page.wait("document.querySelectorAll('#rows tr').length > 0")
                yield page
                assert page.complaints() == []
                page.open("about:blank")
                page.wait("location.href === 'about:blank'")

    return open_page


DRAWN = "document.querySelectorAll('#heat rect:not(.cursor)').length"


def test_every_head_is_a_cell_and_what_is_far_is_crossed(opened: Opened) -> None:
    with opened(told()) as page:
        page.wait(f"{DRAWN} === {LAYERS * HEADS}")
        assert page.evaluate("document.querySelectorAll('#heat .outside').length") == 1
        assert page.evaluate("document.querySelectorAll('#heat .unknown').length") == 1
        fills = page.evaluate(
            "[...document.querySelectorAll('#heat rect:not(.cursor)')]"
            ".map(r => getComputedStyle(r).fill)"
        )
        assert len(set(fills)) > 10  # the colours are applied, not fenced off
        assert "all 41 rows so far" in page.text("#heat .note:last-child")
        assert "1 heads are" not in page.text("#heat .note:last-child")
        label = page.evaluate("document.querySelector('#heat svg').getAttribute('aria-label')")
        assert "5 layers by 4 heads" in label


def test_findings_stand_with_layer_and_kind_in_both_lists(opened: Opened) -> None:
    with opened(told()) as page:
        page.wait("document.querySelectorAll('#attention-fired li').length === 1")
        assert "P001 products of weights: q, layer 2, head 1" in page.text("#attention-fired")
        page.wait("document.querySelector('#findings').innerText.includes('P001')")
        assert "q, layer 2, head 1: It is 4 times as large." in page.text("#findings")
        assert "P002 norms" in page.text("#findings")


def test_a_head_is_pointed_at_and_walked_to(opened: Opened) -> None:
    with opened(told()) as page:
        page.wait(f"{DRAWN} > 0")
        page.evaluate("document.querySelector('#heat svg').focus()")
        for key, code in (("ArrowDown", 40), ("ArrowDown", 40), ("ArrowDown", 40)):
            page.press(key, code)
        page.press("ArrowRight", 39)
        said = page.text("#heat-said")
        for part in ("layer 2 head 1", "93.0%", "5.58 nats", "prompts 40.0%", "further"):
            assert part in said
        box = page.evaluate(
            "(() => { const r = document.querySelectorAll('#heat rect')[5];"
            "r.scrollIntoView({block: 'center'}); const b = r.getBoundingClientRect();"
            "return [b.left + 2, b.top + 2]; })()"
        )
        page.point(*box)
        page.wait("document.querySelector('#heat-said').innerText.startsWith('layer 1 head 1')")


def test_another_figure_is_chosen(opened: Opened) -> None:
    with opened(told()) as page:
        page.wait(f"{DRAWN} > 0")
        options = page.evaluate("[...document.querySelector('#heat-of').options].map(o => o.value)")
        assert options == list(FIGURES)
        page.evaluate(
            "(() => { const s = document.querySelector('#heat-of'); s.value = 'score';"
            "s.dispatchEvent(new Event('change')); })()"
        )
        assert "highest score" in page.text("#heat .heat-legend")
        assert "20.1" in page.text("#heat .heat-legend")


@pytest.mark.parametrize(
    ("said", "status", "engine"),
    [(b"{}", 404, "ullage"), (told(), 200, "sglang")],
    ids=["not read along", "another engine"],
)
def test_without_anything_to_show_there_is_no_section(
    opened: Opened, said: Any, status: int, engine: str
) -> None:
    assert engine in ENGINES or status == 200
    with opened(said, status, engine) as page:
        page.wait(
            "performance.getEntriesByType('resource').some(e => e.name.includes('attention'))"
        )
        page.evaluate("new Promise(done => setTimeout(done, 100))")
        assert page.evaluate("document.getElementById('attention').hidden")


def test_a_key_that_lacks_is_said(opened: Opened) -> None:
    with opened(b"{}", 401) as page:
        page.wait("!document.getElementById('attention').hidden")
        assert "wants a key (--api-key)" in page.text("#attention-why")
        assert page.evaluate("document.querySelector('#heat figure').hidden")


def wide() -> dict[str, Any]:
    """80 layers of 64 heads."""
    layers = [
        {"layer": n, "heads": [head(h, ((n * 7 + h * 13) % 100) / 100) for h in range(64)]}
        for n in range(80)
    ]
    return told(layers=layers)


@pytest.mark.parametrize(("width", "dark"), [(360, False), (360, True), (768, False), (1440, True)])
@pytest.mark.parametrize("make", [told, wide])
def test_it_fits_every_window(
    opened: Opened, make: Callable[[], Any], width: int, dark: bool
) -> None:
    with opened(make(), width=width, dark=dark) as page:
        page.wait(f"{DRAWN} > 0")
        page.wait("document.querySelectorAll('#attention-fired li').length === 1")
        assert page.evaluate(WIDE) == []
        assert page.evaluate(FAINT) == []
        assert page.evaluate(BROKEN) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sizes = page.evaluate(
            "[...document.querySelectorAll('#heat rect:not(.cursor)')].map(r => "
            "r.getBoundingClientRect().width)"
        )
        assert min(sizes) >= 3


def photographs(folder: Path) -> None:  # pragma: no cover - for eyes
    """Of the section, narrow and wide, in the dark and light, into `folder`."""
    with chrome.browser() as page, replica(200, told()) as (url, server):
        feed = Feed()
        feed.take(sights.sight(sights.view(url, now=sights.snapshot(engine="ullage"))))
        for name, said in (("small", told()), ("wide", wide())):
            server.answer = (200, json.dumps(said).encode())
            for width, dark in ((1280, False), (1280, True), (390, False)):
                with served(feed, attention=Attention()) as address:
                    page.look(width, dark=dark, still=True)
                    page.open(f"{address}/")
                    page.wait("document.querySelectorAll('#attention-fired li').length === 1")
                    page.wait("document.body.classList.remove('old') || true")
                    box = "document.getElementById('attention').getBoundingClientRect()"
                    top, tall = page.evaluate(f"[{box}.top + scrollY, {box}.height]")
                    file = folder / f"{name}-{width}-{'dark' if dark else 'light'}.png"
                    page.photograph(file, top=top, height=min(tall, 1400))

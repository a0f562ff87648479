"""The dashboards: whole documents, laid out, every expression answered by a real Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.telemetry.prometheus_server import (
    NEEDS_PROMETHEUS,
    Prometheus,
    page_server,
    prometheus,
)
from tests.watch.test_exporter import whole
from ullage.telemetry.dialects.table import DIALECTS
from ullage.watch.code.dashboard import dashboard_json
from ullage.watch.code.exporter_code import OWN, exporter_board, exporter_rule_file
from ullage.watch.code.expressions import Scope
from ullage.watch.code.gpu_board import gpu_board
from ullage.watch.code.panels import board_of
from ullage.watch.code.records import Spans
from ullage.watch.exporter import METRICS, PREFIX, exposition

BOARDS = {
    **{dialect.engine: board_of(dialect) for dialect in DIALECTS},
    "exporter": exporter_board(),
    "dcgm": gpu_board(),
}
DOCUMENTS: Mapping[str, dict[str, Any]] = {
    name: json.loads(dashboard_json(board)) for name, board in BOARDS.items()
}
PAGES = Path(__file__).parents[2] / "telemetry" / "pages"
# What each engine shows first and then: pages recorded of it, else written from published names.
SHOWN = {
    "vllm": ("vllm-0.32-overload", "vllm-0.32-after"),
    "ullage": ("ullage-overload", "ullage-after"),
    "llamacpp": ("llamacpp-b11434-busy", "llamacpp-b11434-after"),
    "sglang": ("published/sglang-0.5.23",) * 2,
    "trtllm": ("published/trtllm-serve",) * 2,
    "triton": ("published/triton-trtllm",) * 2,
    "tgi": ("published/tgi-3",) * 2,
    "lmdeploy": ("published/lmdeploy-0.18",) * 2,
    "dcgm": ("published/gpus/dcgm-exporter-3.3", "published/gpus/dcgm-exporter-4.9"),
}


def targets(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(panel's title, expression)."""
    for panel in document["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


@pytest.mark.parametrize("name", BOARDS)
def test_panels_stand_side_by_side(name: str) -> None:
    document = DOCUMENTS[name]
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    numbers = [panel["id"] for panel in document["panels"]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("name", BOARDS)
def test_queries_have_letters_and_go_to_the_chosen_prometheus(name: str) -> None:
    document = DOCUMENTS[name]
    assert document["uid"] == f"ullage-{name}"
    menus = [variable["name"] for variable in document["templating"]["list"]]
    assert menus == ["datasource", *BOARDS[name].menus]
    for panel in document["panels"]:
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters)
        if letters:
            assert panel["datasource"] == {"type": "prometheus", "uid": "$datasource"}
            for target in panel["targets"]:
                assert f'{menus[1]}=~"${menus[1]}"' in target["expr"]


@pytest.mark.parametrize("name", [dialect.engine for dialect in DIALECTS])
def test_what_is_not_shown_is_named_with_its_reason(name: str) -> None:
    shown = {title for title, _ in targets(DOCUMENTS[name])}
    left_out = dict(BOARDS[name].absent)
    assert not shown & left_out.keys()
    every = {title for board in BOARDS.values() for title, _ in board.absent}
    full = {title for title, _ in targets(DOCUMENTS["vllm"])} | every
    assert shown | left_out.keys() >= full - {"KV tokens"}
    if left_out:
        text = DOCUMENTS[name]["panels"][-1]["options"]["content"]
        assert all(f"**{title}**: {why}" in text for title, why in left_out.items())


def test_a_selector_and_labels_reach_every_query() -> None:
    dialect = next(dialect for dialect in DIALECTS if dialect.engine == "vllm")
    document = json.loads(dashboard_json(board_of(dialect, Scope('team="a"', ("instance",)))))
    for _, expr in targets(document):
        assert 'team="a"' in expr
        assert "namespace" not in expr
    for variable in document["templating"]["list"][1:]:
        assert 'team="a"' in variable["query"]
    for board in (exporter_board('team="a"'), gpu_board('team="a"')):
        document = json.loads(dashboard_json(board))
        assert all('team="a"' in expr for _, expr in targets(document))
        for variable in document["templating"]["list"][1:]:
            # One selector, whatever it begins with.
            assert re.fullmatch(r"label_values\(\w*\{[^{}]*team=\"a\"[^{}]*\}, \w+\)",
                                variable["query"])  # fmt: skip
    assert exporter_rule_file('team="a"', Spans()).count('team="a"') >= len(OWN)


def test_the_exporters_names_are_its_own() -> None:
    known = {f"{PREFIX}{metric.name}" for metric in METRICS} | {f"{PREFIX}rounds_total"}
    texts = [expr for _, expr in targets(DOCUMENTS["exporter"])]
    texts.append(exporter_rule_file("", Spans()))
    words = {
        word
        for text in texts
        for word in text.replace("{", " ").replace("(", " ").replace(")", " ").split()
        if word.startswith(PREFIX)
    }
    assert words <= known
    assert len(words) > 20


# --- asked of a real Prometheus -------------------------------------------------------------------


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen two pages of every engine, and ullage's own."""
    first = {f"/{name}": (PAGES / f"{one}.prom").read_bytes() for name, (one, _) in SHOWN.items()}
    then = {f"/{name}": (PAGES / f"{two}.prom").read_bytes() for name, (_, two) in SHOWN.items()}
    first["/exporter"] = then["/exporter"] = exposition(whole(), 3)
    with page_server(first) as pages:
        names = [path[1:] for path in first]
        jobs = {name: [{"targets": [pages.target]}] for name in names}
        paths = {name: f"/{name}" for name in names}
        with prometheus(tmp_path_factory.mktemp("board"), jobs, paths=paths) as server:
            for num in (2, 4):
                seen = f"count (sum_over_time(up[5m]) >= {num}) == {len(names)}"
                server.until(lambda asked=seen: bool(server.query(asked)), 40.0, seen)
                pages.pages.update(then)
            yield server


def filled(expr: str, name: str) -> str:
    """As Grafana fills it in, at its latest: a scrape may fail on a machine that is busy."""
    text = (
        expr.replace("$__rate_interval", "2m")
        .replace("$job", name)
        .replace("$instance", ".*")
        .replace("$url", ".*")
    )
    return f"last_over_time(({text})[2m:1s])"


# Empty though the engine exports it: nothing of the kind was on the page.
EMPTY = {
    "vllm": {
        # It was recorded without the plugin.
        "KV bytes",
        "Room used in held pages",
        "Oldest request",
    },
    "ullage": {"Prefix hits"},  # no prompt came between the two pages
    # One page, shown twice: nothing is counted between the two.
    **{name: {"Prefix hits"} for name in ("sglang", "trtllm", "lmdeploy")},
    "llamacpp": {"Fullest KV cache", "KV held", "KV tokens"},  # gone from its newer releases
}


@NEEDS_PROMETHEUS
@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_shows_something(name: str, scraped: Prometheus) -> None:
    empty = set()
    for title in dict.fromkeys(title for title, _ in targets(DOCUMENTS[name])):
        found = [
            scraped.query(filled(expr, name))  # fails for what is no PromQL
            for panel, expr in targets(DOCUMENTS[name])
            if panel == title
        ]
        if not any(found):
            empty.add(title)
    assert empty == EMPTY.get(name, set())


@NEEDS_PROMETHEUS
@pytest.mark.parametrize("name", BOARDS)
def test_menus_are_filled(name: str, scraped: Prometheus) -> None:
    assert scraped.query(filled(BOARDS[name].chosen_by, name))


@NEEDS_PROMETHEUS
def test_a_panel_shows_the_number_of_the_page(scraped: Prometheus) -> None:
    """Against numbers picked from the recorded pages by hand's means: text search."""
    page = (PAGES / "vllm-0.32-after.prom").read_text()
    (line,) = [li for li in page.splitlines() if li.startswith("vllm:kv_cache_usage_perc{")]
    (expr,) = [expr for title, expr in targets(DOCUMENTS["vllm"]) if title == "KV held"]
    (row,) = scraped.query(filled(expr, "vllm"))
    assert float(row["value"][1]) == float(line.split()[-1])

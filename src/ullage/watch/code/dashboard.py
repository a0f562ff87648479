"""A board of panels → Grafana's dashboard JSON, by Grafana's own builders.

Holds the layout and the look. What is shown is `panels` and `exporter_board`.
"""

from __future__ import annotations

import json
from typing import Any

from ullage.errors import BadUsage
from ullage.watch.code.panels import Board, Panel

SOURCE = "$datasource"
WIDTH = 24
HEIGHT, STAT_HEIGHT = 8, 4


def dashboard_json(board: Board) -> str:
    """The document that Grafana imports or provisions, with a line break at its end.

    Raises:
        BadUsage: grafana-foundation-sdk is not installed.
    """
    try:
        from grafana_foundation_sdk.builders import dashboard as build
        from grafana_foundation_sdk.cog.encoder import JSONEncoder
    except ModuleNotFoundError as error:
        raise BadUsage(
            f"the Python package {error.name} is not installed",
            expected="pip install 'ullage[watch]'",
        ) from error
    made = (
        build.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["ullage", "llm"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .editable()
    )
    for variable in _variables(board):
        made = made.with_variable(variable)
    made = made.annotation(_alerts(board))
    for row in board.rows:
        made = made.with_row(build.Row(row.title))
        for panel in row.panels:
            made = made.with_panel(_panel(panel))
    if board.absent:
        made = made.with_row(build.Row("Not shown")).with_panel(_absent(board))
    document = _numbered(json.loads(json.dumps(made.build(), cls=JSONEncoder)))
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _numbered(document: dict[str, Any]) -> dict[str, Any]:
    """Panels are found by number: each has its own."""
    for number, panel in enumerate(document["panels"], 1):
        panel["id"] = number
    return document


def _source() -> Any:
    from grafana_foundation_sdk.models.dashboard import DataSourceRef

    return DataSourceRef(type_val="prometheus", uid=SOURCE)


def _variables(board: Board) -> list[Any]:
    """Which Prometheus, then a menu per label, each of what the ones before left."""
    from grafana_foundation_sdk.builders import dashboard as build
    from grafana_foundation_sdk.models.dashboard import VariableRefresh

    found: list[Any] = [
        build.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    ]
    left: list[str] = []
    for label in board.menus:
        metric = _narrowed(board.chosen_by, left)
        found.append(
            build.QueryVariable(label)
            .datasource(_source())
            .query(f"label_values({metric}, {label})")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
        left.append(f'{label}=~"${label}"')
    return found


def _narrowed(metric: str, matchers: list[str]) -> str:
    name, _, inner = metric.rstrip("}").partition("{")
    every = ",".join((*([inner] if inner else []), *matchers))
    return f"{name}{{{every}}}" if every else name


def _alerts(board: Board) -> Any:
    from grafana_foundation_sdk.builders import dashboard as build

    return (
        build.AnnotationQuery()
        .name("Alerts of ullage")
        .datasource(_source())
        .enable(True)
        .icon_color("red")
        .expr(board.alerts)
    )


def _panel(panel: Panel) -> Any:
    from grafana_foundation_sdk.builders import prometheus, stat, timeseries
    from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions
    from grafana_foundation_sdk.models.common import (
        LegendDisplayMode,
        LegendPlacement,
        StackingMode,
    )

    made: Any
    if panel.kind == "stat":
        made = stat.Panel().height(STAT_HEIGHT)
    else:
        legend = VizLegendOptions().display_mode(LegendDisplayMode.LIST)
        legend = legend.placement(LegendPlacement.BOTTOM).show_legend(True)
        made = timeseries.Panel().height(HEIGHT).fill_opacity(10).legend(legend)
        if panel.kind == "stacked":
            made = made.stacking(StackingConfig().mode(StackingMode.NORMAL))
        if panel.most is not None:
            made = made.max(panel.most)
        made = made.min(0)
    made = made.title(panel.title).unit(panel.unit).span(panel.width).datasource(_source())
    if panel.description:
        made = made.description(panel.description)
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.promql).ref_id(letter)
        made = made.with_target(target.legend_format(query.legend or "__auto"))
    return made


def _absent(board: Board) -> Any:
    from grafana_foundation_sdk.builders import text
    from grafana_foundation_sdk.models.text import TextMode

    lines = "\n".join(f"- **{what}**: {why}" for what, why in board.absent)
    return text.Panel().title("").mode(TextMode.MARKDOWN).content(lines).span(WIDTH).height(HEIGHT)

"""docs/watch.md names every field, metric, policy key and flag, and none that is not there."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from tests.watch import sights
from ullage.cli import watch, watch_code
from ullage.findings.json import finding_document
from ullage.watch.act.policy import Action, Limits, Policy, read_policy
from ullage.watch.document import GPU_FIELDS, document
from ullage.watch.exporter import METRICS, PREFIX
from ullage.watch.rule import Judged

PAGE = (Path(__file__).parents[2] / "docs" / "watch.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert found, title
    return found[1]


def names_of_rows(text: str) -> list[str]:
    """What stands in backquotes in the first cell of each row of the tables."""
    cells = re.findall(r"^\| (.*?) \|", text, re.M)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_field_of_a_replica_has_its_row():
    (replica,) = document(sights.sight())["replicas"]
    assert sorted(names_of_rows(section("The JSON document"))) == sorted(replica)


def test_every_other_field_of_the_document_is_named():
    judged = (Judged(sights.URL, sights.fired()),)
    made = document(sights.sight(judged=judged, incidents=(sights.incident(),)))
    text = section("The JSON document")
    names = {*made, *made["incidents"][0], *finding_document(sights.fired()), *GPU_FIELDS}
    names |= {"p50", "p99", "num", "over_s", "low", "high", "estimate", "num_answering"}
    for name in names:
        assert re.search(rf"\b{name}\b", text), name


def test_every_metric_has_its_row_with_its_help():
    rows = re.findall(r"^\| `(ullage_watch_\w+)` \| (\w+) \| (.*?) \|$", PAGE, re.M)
    known = [(PREFIX + metric.name, metric.type, metric.help) for metric in METRICS]
    assert rows[0][0] == f"{PREFIX}rounds_total"
    assert rows[1:] == known


def test_every_flag_is_told():
    parser, code = argparse.ArgumentParser(), argparse.ArgumentParser()
    watch.add_arguments(parser)
    watch_code.add_arguments(code)
    others = {flag for action in code._actions for flag in action.option_strings}
    for action in parser._actions:
        for flag in action.option_strings:
            if flag not in others and flag not in ("-h", "--help"):
                assert re.search(rf"`{flag}\b", PAGE), flag


def test_the_policy_that_is_shown_is_a_policy(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    path = tmp_path / "POLICY.toml"
    path.write_text(text)
    policy = read_policy(str(path))
    assert (policy.limits, policy.log) == (Limits(), Policy(()).log)
    assert len(policy.actions) == len(tomllib.loads(text)["action"])


def test_every_key_of_a_policy_has_its_row():
    rows = names_of_rows(section("Acting"))
    limits = [f"limits.{name}" for name in Limits.__dataclass_fields__]
    actions = [f"action.{name}" for name in Action.__dataclass_fields__]
    assert sorted(rows) == sorted(["log", *limits, *actions])


@pytest.mark.parametrize("link", re.findall(r"\]\(([\w/.]+\.md)\)", PAGE))
def test_links_lead_somewhere(link):
    assert (Path(__file__).parents[2] / "docs" / link).exists()

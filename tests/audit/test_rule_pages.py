"""Each rule has a page that is current, and `ullage explain` says the same."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ullage.adapters.rules.table import RULES as ADAPTER_RULES
from ullage.audit import RULES
from ullage.audit.silent_examples import SILENT
from ullage.cli.main import main
from ullage.findings import Severity
from ullage.probes.baseline.rules import RULES as BASELINE_RULES
from ullage.probes.quality.rules import RULES as QUALITY_RULES
from ullage.watch.rules.table import RULES as WATCH_RULES

ALL = (*RULES, *ADAPTER_RULES, *BASELINE_RULES, *QUALITY_RULES, *WATCH_RULES)

TOOL = Path(__file__).parents[2] / "tools" / "generate_rule_pages.py"


def test_the_pages_are_current():
    spec = importlib.util.spec_from_file_location("generate_rule_pages", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.stale() == [], "run python tools/generate_rule_pages.py"


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_every_rule_is_explained_in_sentences(rule, capsys):
    assert main(["explain", rule.id.lower()]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in (rule.title, rule.why, rule.fix, rule.source, rule.example, SILENT[rule.id]):
        assert text and " ".join(text.split()) in shown
    assert rule.why.endswith(".") and rule.fix.endswith(".")
    assert not rule.title.endswith(".")


def test_ids_are_unique_stable_in_form_and_in_order():
    ids = [rule.id for rule in RULES]
    assert ids == sorted(set(ids))
    assert all(len(i) == 4 and i[0] == "A" and i[1:].isdecimal() for i in ids)
    assert len({rule.title for rule in RULES}) == len(RULES)
    assert {rule.severity for rule in RULES} == set(Severity)


@pytest.mark.parametrize(
    ("rules", "letter"),
    [(ADAPTER_RULES, "L"), (BASELINE_RULES, "P"), (QUALITY_RULES, "Q"), (WATCH_RULES, "W")],
)
def test_rules_about_other_things_have_ids_of_their_own(rules, letter):
    ids = [rule.id for rule in rules]
    assert ids == sorted(set(ids))
    assert all(len(i) == 4 and i[0] == letter and i[1:].isdecimal() for i in ids)


def test_titles_are_unique():
    assert len({rule.title for rule in ALL}) == len(ALL)


def test_every_rule_has_an_example_on_which_it_must_not_fire():
    assert sorted(SILENT) == [rule.id for rule in ALL]
    assert not [rule.id for rule in ALL if SILENT[rule.id] == rule.example]


def test_explain_without_an_id_lists_all(capsys):
    assert main(["explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(ALL)


def test_explain_imports_nothing_that_is_heavy():
    """Of all tables, among them those of rooms that need numpy and torch to look at a model."""
    code = (
        "import sys; from ullage.cli.main import main;"
        "main(['explain']); main(['explain', 'P001']);"
        "heavy = {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules);"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("unknown", ["A999", "P999"])
def test_explain_of_an_unknown_id_is_one_sentence(unknown, capsys):
    assert main(["explain", unknown]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and unknown in said.err

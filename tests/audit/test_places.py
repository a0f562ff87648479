"""A finding points at the line of the key or flag at fault; the oracle is the file's own text."""

from __future__ import annotations

import json

import pytest
from audit_pool import OWN, config_of, write_directory
from hypothesis import given
from hypothesis import strategies as st

from ullage.anatomy import load
from ullage.audit.places import key_line, place_finder
from ullage.findings import Evidence, Finding, Severity
from ullage.findings.place import Place

KEY = st.text('ab"\\é{}[]:, \n', max_size=3)
TREES = st.dictionaries(
    KEY,
    st.recursive(
        st.integers() | st.text('ab"\\{}[],:\n', max_size=5) | st.none(),
        lambda inner: st.dictionaries(KEY, inner, max_size=4) | st.lists(inner, max_size=3),
        max_leaves=12,
    ),
    max_size=5,
)


def paths(tree: dict, above: tuple[str, ...] = ()):
    for key, value in tree.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


@given(TREES)
def test_the_line_of_every_key(tree):
    text = json.dumps(tree, indent=1)
    lines = text.split("\n")
    for path in paths(tree):
        line = key_line(text, list(path))
        depth = len(path)
        # With an indent of one, a key of this depth stands alone, that many spaces in.
        assert lines[line - 1].startswith(" " * depth + json.dumps(path[-1]) + ": ")
        above = [lines[i] for i in range(line - 1) if lines[i].startswith(" " * (depth - 1) + '"')]
        assert depth == 1 or above[-1].startswith(" " * (depth - 1) + json.dumps(path[-2]))


def test_a_key_that_is_not_there():
    assert key_line('{"a": {"b": "c"}}', ["c"]) is None
    assert key_line('{"wrapper": {"model_type": "x",\n "n": 1}}', ["n"]) == 2


def finding(*sources: str) -> Finding:
    evidence = tuple(Evidence("x", 1, "", source) for source in sources)
    return Finding("A001", "t", Severity.error, "fired", evidence, "C.", "R.")


@pytest.mark.parametrize("name", ["llama", "qwen3-next"])
def test_places_of_keys_flags_and_commands(name):
    path = OWN / f"{name}.json"
    files = load(path).files
    place_of = place_finder(files, {"--dtype": Place("run.sh", 7)}, Place("run.sh", 2))
    text = path.read_text().splitlines()
    place = place_of(finding("spec: derived", "config: hidden_size"))
    assert place.file == str(path) and '"hidden_size"' in text[place.line - 1]
    assert place_of(finding("config: hidden_size", "flag: --dtype")) == Place("run.sh", 7)
    assert place_of(finding("deployment: run.sh:9")) == Place("run.sh", 9)
    assert place_of(finding("deployment: run.sh (not given)")) == Place("run.sh", 2)
    assert place_of(finding("default: --dtype")) == Place(str(path))


def test_side_files(tmp_path):
    files = {"generation_config.json": '{\n "a": 1,\n "eos_token_id": 2\n}'}
    place = write_directory(tmp_path, config_of("llama"), files)
    place_of = place_finder(load(place).files)
    where = place_of(finding("generation_config.json: eos_token_id"))
    assert where == Place(str(place / "generation_config.json"), 3)

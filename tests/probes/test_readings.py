"""The document of a reading: what it holds, what it leaves out, what it needs to be made."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

from ullage.probes.attention.readings import AttentionReading, HeadReading, LayerReading, Spread

HEAD = HeadReading(
    head=0,
    rows=3,
    not_finite=1,
    entropy_nats=Spread(1.5, 0.25, 2.75),
    entropy_normalized=0.5,
    sink_mass=0.125,
    band_mass=0.75,
    band_entropy_nats=1.25,
    effective_context=5.5,
    max_score=9.0,
)
SUNK = replace(HEAD, head=1, entropy_with_sink_nats=Spread(1.0, 0.5, 1.5), learned_sink_mass=0.25)
DUMB = HeadReading(2, 3, 3, None, None, None, None, None, None, None)
READING = AttentionReading(
    "a model", "a source", 40, 3, (LayerReading(0, (HEAD,)), LayerReading(7, (SUNK, DUMB)))
)


def test_a_document_has_every_figure_of_every_head() -> None:
    document = json.loads(json.dumps(READING.to_json(), allow_nan=False))
    layers = document.pop("layers")
    assert document == {"model": "a model", "source": "a source", "tokens": 40, "rows": 3}
    assert [layer["layer"] for layer in layers] == [0, 7]
    assert layers[0]["heads"] == [
        {
            "head": 0,
            "rows": 3,
            "not_finite": 1,
            "entropy_nats": {"mean": 1.5, "p5": 0.25, "p95": 2.75},
            "entropy_normalized": 0.5,
            "sink_mass": 0.125,
            "band_mass": 0.75,
            "band_entropy_nats": 1.25,
            "effective_context": 5.5,
            "max_score": 9.0,
        }
    ]


def test_learned_sinks_are_spoken_of_where_there_are_some() -> None:
    sunk, dumb = READING.to_json()["layers"][1]["heads"]
    assert sunk["entropy_with_sink_nats"] == {"mean": 1.0, "p5": 0.5, "p95": 1.5}
    assert sunk["learned_sink_mass"] == 0.25
    assert "learned_sink_mass" not in dumb


def test_what_no_row_could_say_is_null_and_not_left_out() -> None:
    dumb = READING.to_json()["layers"][1]["heads"][1]
    assert {name for name, value in dumb.items() if value is None} == {
        "entropy_nats",
        "entropy_normalized",
        "sink_mass",
        "band_mass",
        "band_entropy_nats",
        "effective_context",
        "max_score",
    }


def test_heads_are_told_with_their_layers() -> None:
    assert [(layer, head.head) for layer, head in READING.heads()] == [(0, 0), (7, 1), (7, 2)]


def test_a_document_is_made_without_anything_heavy() -> None:
    code = (
        "import sys; import ullage.probes.attention.readings; "
        "print([m for m in ('torch', 'numpy', 'numba', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""The catalogue is complete, plausible and sourced; names are found as people write them."""

from __future__ import annotations

import pytest

from ullage.costs.hardware import catalogue, find_hardware, measured_machine, parse_gpus
from ullage.errors import BadUsage

CATALOGUE = catalogue()


def test_the_promised_devices_are_there():
    promised = {"A100-80", "H100-SXM", "H200", "B200", "L40S", "MI300X", "RTX-4090"}
    assert promised <= {spec.name for spec in CATALOGUE}


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.name)
def test_every_figure_is_plausible_and_has_a_source(spec):
    for field in ("memory_bytes", "bandwidth", "flops", "links"):
        assert len(spec.source(field)) > 20, f"{spec.name}: {field} has no source"
    low, high = spec.memory_bytes_seen
    assert low <= spec.memory_bytes <= high < low * 1.03
    assert 20e9 < spec.memory_bytes < 300e9
    assert 0.5e12 < spec.bandwidth_bytes_per_s < 10e12
    rates = dict(spec.flops)
    assert rates["float32"] <= rates["tf32"] <= rates["bfloat16"] == rates["float16"]
    # Halving an operand's width doubles the rate on every one of these, not more: a figure
    # quoted with sparsity would show up as four times.
    for narrow in ("fp8", "int8"):
        assert narrow not in rates or 1.99 <= rates[narrow] / rates["bfloat16"] <= 4.0
    assert spec.link_bytes_per_s() == max(dict(spec.links).values())


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "H100-SXM"),
        ("H100-SXM", "H100-SXM"),
        ("h100-80gb", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("a100", "A100-80"),
        ("A100_80GB", "A100-80"),
        ("4090", "RTX-4090"),
        ("rtx4090", "RTX-4090"),
        ("mi300x", "MI300X"),
        ("AMD Instinct MI300X", "MI300X"),
        ("l40s", "L40S"),
    ],
)
def test_names_are_found_as_people_write_them(written, name):
    assert find_hardware(written).name == name


def test_no_two_devices_answer_to_one_name():
    from ullage.costs.hardware import _key, _rows

    names = [
        _key(text)
        for name, row in _rows().items()
        for text in {_key(t): t for t in (name, row["device_name"], *row["aliases"])}.values()
    ]
    assert len(names) == len(set(names))


def test_a_count_makes_that_many_devices():
    assert parse_gpus("H100:8").count == 8
    assert (parse_gpus("H100").count, parse_gpus("H100").counted) == (1, False)


@pytest.mark.parametrize(
    "text",
    ["", "H100:", "H100:0", "H100:-1", "H100:x", "H100:9999999", "H100:2:2", "H1000", "nvidia"],
)
def test_what_is_not_a_device_is_refused_in_one_sentence(text):
    with pytest.raises(BadUsage) as caught:
        parse_gpus(text)
    assert "--gpu" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_measured_machine_says_that_it_was_measured():
    machine = measured_machine(
        "this machine",
        memory_bytes=24 * 2**30,
        bandwidth_bytes_per_s=26.5e9,
        flops=(("float32", 1e11),),
        method="median of 5 reads of 256 MiB",
    )
    assert machine.measured
    assert machine.source("bandwidth") == "measured: median of 5 reads of 256 MiB"
    assert machine.flops_per_s("fp8") is None
    assert machine.link_bytes_per_s() is None

"""The rules on GPUs in Prometheus' own hands: they say what W018 and W019 say, and Xids once.

Series are written here by the exporter's own names, not taken from ullage's tables.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.telemetry.prometheus_server import NEEDS_PROMTOOL
from tests.watch.code.promtool import Scenario, Values, level, notation, run
from tests.watch.rules.cases import NOW_S, World
from ullage.telemetry.gpus import METRICS, REASONS, throttled_because
from ullage.telemetry.snapshot import Gpu
from ullage.watch.code.gpus import ALERTS, COUNTED, gpu_rule_file
from ullage.watch.code.records import Spans
from ullage.watch.rule import judge
from ullage.watch.rules.gpus import FATAL_XIDS
from ullage.watch.rules.table import RULES

BY_ID = {rule.id: rule for rule in RULES}


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rules") / "gpus.yml"
    place.write_text(gpu_rule_file("", Spans()))
    return place


def device(
    minutes: float, gpu: str = "0", *, pod: str = "vllm-0", old: bool = True, **changed: Values
) -> dict[str, Values]:
    """A GPU that works, by DCGM's names before 4.7 or since."""
    on = (
        f'job="llm",instance="10.0.0.9:9400",Hostname="node-a",gpu="{gpu}",'
        f'UUID="GPU-{gpu}",modelName="NVIDIA H100",exported_pod="{pod}"'
    )
    names = {
        "busy": ("GPU_UTIL", 90.0, "GPU_UTIL_RATIO", 0.9),
        "clock": ("SM_CLOCK", 1755.0, "SM_CLOCK_HERTZ", 1.755e9),
        "max_clock": ("MAX_SM_CLOCK", 1980.0, "SM_MAX_CLOCK_HERTZ", 1.98e9),
        "reasons": ("CLOCKS_EVENT_REASONS", 0.0, "CLOCKS_EVENT_REASONS", 0.0),
        "xid": ("XID_ERRORS", 0.0, "XID_ERROR", 0.0),
        "temperature": ("GPU_TEMP", 60.0, "GPU_TEMP_CELSIUS", 60.0),
        "used": ("FB_USED", 70_000.0, "FB_USED_BYTES", 7.3e10),
    }
    series = {}
    for short, (before, usual, since, base) in names.items():
        name, value = (before, usual) if old else (since, base)
        values = changed.pop(short, level((value, minutes)))
        series[f"DCGM_FI_DEV_{name}{{{on}}}"] = values
    assert not changed, changed
    return series


def on_off(usual: float, faulty: float) -> Values:
    return level((usual, 6), (faulty, 8), (usual, 8))


def seen(name: str) -> dict[float, list[str]]:
    return {5.5: [], 13.5: [name], 21.5: []}


NONE: dict[float, list[str]] = {5.5: [], 13.5: [], 21.5: []}
HELD, LOW, ERROR = "UllageGpuHeldDown", "UllageGpuClockLow", "UllageGpuError"
NOT_KNOWN = 9223372036854775794.0  # DCGM's 64-bit "not supported"


def of_one(pod: str, *values: tuple[float | None, float]) -> dict[str, Values]:
    """A GPU whose Xid is told with the pod that has it."""
    return {
        name: series
        for name, series in device(90, pod=pod, xid=level(*values)).items()
        if "XID" in name
    }


SCENARIOS: dict[str, Scenario] = {
    "nothing": Scenario({**device(22), **device(22, "1", old=False)}, NONE),
    **{
        f"held down by {name}": Scenario(device(22, reasons=on_off(0x4, 0x4 | bit)), seen(HELD))
        for bit, name in REASONS.items()
        if name in ("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown",
                    "hw_slowdown")
    },
    **{
        f"meant: {name}": Scenario(device(22, reasons=on_off(0x0, bit)), NONE)
        for bit, name in ({0x1: "idle"} | dict(REASONS)).items()
        if name not in ("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown",
                        "hw_slowdown")
    },
    "coming to rest": Scenario(
        device(22, reasons=on_off(0x0, 0x8), busy=on_off(90, 5)), NONE
    ),
    "reasons that are not known": Scenario(device(22, reasons=on_off(0x0, NOT_KNOWN)),
                                           {5.5: [], 13.5: ["UllageGpuNotTold"], 21.5: []}),
    "a slow clock": Scenario(device(22, clock=on_off(1755, 900)), seen(LOW)),
    "a slow clock, by the new names": Scenario(
        device(22, old=False, clock=on_off(1.755e9, 9e8)), seen(LOW)
    ),
    "an idle clock": Scenario(device(22, clock=on_off(1755, 345), busy=on_off(90, 2)), NONE),
    "a power cap": Scenario(device(22, clock=on_off(1755, 1200)), NONE),
    "an Xid": Scenario(
        device(90, xid=level((0, 6), (79, 84))), {5.5: [], 6.5: [ERROR], 60: [ERROR], 75: []}
    ),
    "an Xid, by the new name": Scenario(
        device(90, old=False, xid=level((0, 6), (79, 84))), {5.5: [], 6.5: [ERROR], 75: []}
    ),
    "an Xid that an application's hides": Scenario(
        device(90, xid=level((0, 6), (79, 1), (13, 83))), {5.5: [], 6.5: [ERROR], 30: [ERROR]}
    ),
    "an application's own": Scenario(device(22, xid=on_off(0, 13)), NONE),
    "an old Xid": Scenario(device(22, xid=level((79, 22))), {0.5: [], **NONE}),
    "an old Xid when its exporter starts anew": Scenario(
        device(22, xid=level((79, 6), (None, 3), (79, 13))), NONE
    ),
    "an Xid while its exporter is away": Scenario(
        device(22, xid=level((0, 6), (None, 3), (79, 13))), {5.5: [], 9.5: [ERROR]}
    ),
    "an Xid that ends its pod": Scenario(
        {**device(90, pod="x", xid=[None] * 360),
         **of_one("vllm-0", (0, 6), (None, 84)), **of_one("vllm-1", (None, 6), (79, 84))},
        {5.5: [], 6.5: [ERROR]},
    ),
    "an old Xid on a GPU that another pod gets": Scenario(
        {**device(22, pod="x", xid=[None] * 88),
         **of_one("vllm-0", (79, 6), (None, 84)), **of_one("vllm-1", (None, 6), (79, 84))},
        {5.5: [], 6.5: [], 13.5: []},
    ),
    "the exporter's own count": Scenario(
        {
            **device(22),
            'DCGM_EXP_XID_ERRORS_COUNT{job="llm",instance="10.0.0.9:9400",Hostname="node-a",'
            'gpu="0",UUID="GPU-0",modelName="NVIDIA H100",xid="94",window_size_in_ms="300000"}':
                level((None, 6), (1, 5), (None, 11)),
        },
        {5.5: [], 7: [ERROR], 20: [ERROR]},
    ),
    "the exporter's own count of an application's": Scenario(
        {
            **device(22),
            'DCGM_EXP_XID_ERRORS_COUNT{job="llm",instance="10.0.0.9:9400",Hostname="node-a",'
            'gpu="0",UUID="GPU-0",modelName="NVIDIA H100",xid="31",window_size_in_ms="300000"}':
                level((None, 6), (1, 5), (None, 11)),
        },
        NONE,
    ),
}  # fmt: skip


@NEEDS_PROMTOOL
def test_promtool_takes_the_file(rules: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "chosen.yml"
    chosen.write_text(gpu_rule_file('team="a\\"b"', Spans(1.0)))
    done = subprocess.run(
        ["promtool", "check", "rules", str(rules), str(chosen)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for record in yaml.safe_load(chosen.read_text())["groups"][0]["rules"]:
        for name in (*METRICS, COUNTED):
            assert not re.search(rf"\b{name}(?!\w|{{.*?team=)", record["expr"])


def fired(rules: Path, scenarios: Mapping[str, Scenario], by: str = "alertname") -> str:
    """ "" where exactly these alerts fire at those times; each scenario is a cluster of its own."""
    series, tests = {}, []
    for what, scenario in scenarios.items():
        cluster = f"cluster={json.dumps(what)}"
        for name, values in scenario.series.items():
            series[name.replace('job="llm"', f'job="llm",{cluster}')] = notation(values)
        for minute, names in scenario.firing.items():
            samples = [{"labels": f'{{{by}="{name}"}}', "value": 1} for name in sorted(names)]
            expr = f'group by ({by}) (ALERTS{{alertstate="firing",{cluster}}})'
            tests.append(
                {"expr": expr, "eval_time": f"{round(minute * 60)}s", "exp_samples": samples}
            )
    return run(rules, series, tests)


@NEEDS_PROMTOOL
def test_alerts_fire_in_their_faults_alone(rules: Path) -> None:
    assert fired(rules, SCENARIOS) == ""


@NEEDS_PROMTOOL
def test_they_say_what_the_rules_say(rules: Path) -> None:
    """W018 of what is held now, W019 of a code that has just come."""
    scenarios = {}
    for mask, busy, clock in itertools.product(
        (0, 1, *REASONS, 0x24, 0x44, 0x10D), (90.0, 50.0, 49.0), (1755.0, 990.0, 900.0)
    ):
        gpu = Gpu("0", busy_ratio=busy / 100, sm_clock_hz=clock * 1e6, max_sm_clock_hz=1.98e9,
                  throttled_because=throttled_because(mask))  # fmt: skip
        says = judge(BY_ID["W018"], World(gpus=(gpu,)).subject()).finding.state == "fired"
        usual = {"reasons": mask, "busy": busy, "clock": clock}
        series = device(5, **{name: level((value, 5)) for name, value in usual.items()})
        scenarios[f"{mask} {busy} {clock}"] = Scenario(series, {4.5: ["W018"] * says})
    for code in (0, 8, 13, 31, 43, 45, 63, *FATAL_XIDS):
        gpu = Gpu("0", xid_errors=float(code), xid_s=NOW_S)
        says = judge(BY_ID["W019"], World(gpus=(gpu,)).subject()).finding.state == "fired"
        series = device(5, xid=level((0, 2), (code, 3)))
        scenarios[f"Xid {code}"] = Scenario(series, {4.5: ["W019"] * says})
    assert fired(rules, scenarios, by="rule") == ""


@NEEDS_PROMTOOL
def test_a_file_for_no_gpu_says_so(rules: Path) -> None:
    firing = 'ALERTS{alertstate="firing"}'
    labels = (
        'ALERTS{alertname="UllageNoGpuSeen",alertstate="firing",rule="W011",severity="critical",'
        'ullage_engine="dcgm"}'
    )
    late = {name: notation([None] * 40 + values[40:]) for name, values in device(13).items()}
    tests: list[dict[str, object]] = [
        {"expr": firing, "eval_time": "8m", "exp_samples": [{"labels": labels, "value": 1}]},
        {"expr": firing, "eval_time": "12m", "exp_samples": []},
    ]
    assert run(rules, late, tests) == ""


def test_every_alert_is_seen_to_fire() -> None:
    firing = [names for one in SCENARIOS.values() for names in one.firing.values()]
    told = {name for names in firing for name in names}
    assert told | {"UllageNoGpuSeen"} == {alert.name for alert in ALERTS}

"""A DCGM exporter's page is read in base units, and what it does not know is no number."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.telemetry.dcgm import USUAL, dcgm_page, labels_of, page_of_each, uuid_of
from ullage.telemetry.gpus import METRICS, Device, devices_on, throttled_because
from ullage.telemetry.snapshot import Gpu

PUBLISHED = Path(__file__).parent / "pages" / "published" / "gpus"
MIB = 1 << 20
# Written off nvml.h's nvmlClocksEventReasons and nvmlClocksThrottleReasons.
NVML_H = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
    "board_limit": 0x200,
    "reliability": 0x400,
}
BLANK_BASES = (0x7FFFFFF0, 2**47, 0x7FFFFFFFFFFFFFF0)  # DCGM_INT32_, _FP64_ and _INT64_BLANK


def read(name: str) -> dict[str, Device]:
    return {one.gpu.index: one for one in devices_on((PUBLISHED / name).read_bytes())}


def only(body: bytes) -> Device:
    (found,) = devices_on(body)
    return found


# --- what is there --------------------------------------------------------------------------------


def test_the_default_counters_in_kubernetes() -> None:
    found = read("dcgm-exporter-3.3.prom")
    assert list(found) == ["0", "1", "2", "3"]
    assert found["0"].gpu == Gpu(
        "0",
        "NVIDIA H100 80GB HBM3",
        used_bytes=75226 * MIB,
        total_bytes=(75226 + 5721) * MIB,
        busy_ratio=0.97,
        sm_clock_hz=1.755e9,
        power_watts=611.384,
        temperature_celsius=62.0,
        xid_errors=0.0,
        uuid=uuid_of(0),
    )
    place = found["0"].place
    assert (place.hosts, place.namespace, place.pod) == (("gpu-1",), "llm", "vllm-0")
    assert found["1"].gpu.xid_errors == 31.0  # with labels of its own: err_code, err_msg
    assert (found["3"].place.namespace, found["3"].place.pod) == ("", "")


def test_mig_instances_are_devices_of_their_own() -> None:
    found = read("dcgm-exporter-4.8-mig.prom")
    assert list(found) == ["0/1", "0/2", "1"]
    one = found["0/1"].gpu
    assert (one.mig_profile, one.uuid) == ("3g.40gb", found["0/2"].gpu.uuid)
    assert one.key != found["0/2"].gpu.key
    assert (one.used_bytes, one.total_bytes) == (30011 * MIB, (30011 + 9985) * MIB)
    # The exporter says 0% of instances (its issue 216): what counts is the engine's ratio.
    assert one.busy_ratio == 0.71
    assert one.power_watts is None, "the whole GPU's power is not the instance's"
    assert found["0/1"].place.hosts == ("gpu-2",), "hostname, since 4.8.3"


def test_the_names_in_base_units_since_4_9() -> None:
    found = read("dcgm-exporter-4.9.prom")
    one, two = found["0"].gpu, found["1"].gpu
    assert (one.used_bytes, one.total_bytes) == (139_375_083_520, 150_754_820_096)
    # Above 0x7ffffff0, which is a blank only of what is told in 32 bits.
    assert (one.sm_clock_hz, one.max_sm_clock_hz) == (2.52e9, 2.82e9)
    assert (one.busy_ratio, one.power_watts, one.temperature_celsius) == (0.97, 598.25, 66.0)
    assert (one.throttled_because, one.xid_errors) == (("sw_power_cap",), None)
    assert two.throttled_because == ("hw_slowdown", "hw_thermal_slowdown")
    assert two.xid_errors == 79.0


def test_a_page_with_both_names_is_read_by_the_exact_one() -> None:
    page = dcgm_page(labels_of(), DCGM_FI_DEV_FB_USED_BYTES=75226 * MIB + 4096)
    assert only(page).gpu.used_bytes == 75226 * MIB + 4096


def test_the_total_is_told_or_the_sum_of_its_parts_or_not_known() -> None:
    parts = 75226 + 5721 + 612
    assert only(dcgm_page(labels_of())).gpu.total_bytes == parts * MIB
    assert only(dcgm_page(labels_of(), DCGM_FI_DEV_FB_TOTAL=81559)).gpu.total_bytes == 81559 * MIB
    less = {name: value for name, value in USUAL.items() if name != "DCGM_FI_DEV_FB_FREE"}
    gpu = only(dcgm_page(labels_of(), values=less)).gpu
    assert (gpu.used_bytes, gpu.total_bytes) == (75226 * MIB, None)


def test_a_total_below_what_is_used_is_none() -> None:
    gpu = only(dcgm_page(labels_of(), DCGM_FI_DEV_FB_TOTAL=1000)).gpu
    assert (gpu.used_bytes, gpu.total_bytes) == (75226 * MIB, None)


def test_what_pods_hold_of_a_gpu_that_they_share_makes_no_total() -> None:
    values = {n: v for n, v in USUAL.items() if n != "DCGM_FI_DEV_FB_USED"}
    page = page_of_each(
        (labels_of(0, pod=f"llm/vllm-{n}"), values | {"DCGM_FI_DEV_FB_USED": used})
        for n, used in enumerate((30_000, 45_000))
    )
    one, two = devices_on(page)
    assert (one.gpu.used_bytes, two.gpu.used_bytes) == (30_000 * MIB, 45_000 * MIB)
    assert (one.gpu.total_bytes, two.gpu.total_bytes) == (None, None)


def test_a_percentage_by_the_name_of_a_ratio_is_not_read() -> None:
    """DCGM 4.6's headers call field 203, in per cent, GPU_UTIL_RATIO."""
    values = {"DCGM_FI_DEV_GPU_UTIL_RATIO": 1.0}
    idle, busy = labels_of(0), labels_of(1)
    assert [d.gpu.busy_ratio for d in devices_on(dcgm_page(idle, busy, values=values))] == [1, 1]
    page = page_of_each([(idle, values), (busy, {"DCGM_FI_DEV_GPU_UTIL_RATIO": 97.0})])
    assert devices_on(page) == ()
    more = {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.5}
    page = page_of_each([(idle, values | more), (busy, {"DCGM_FI_DEV_GPU_UTIL_RATIO": 97} | more)])
    assert [device.gpu.busy_ratio for device in devices_on(page)] == [0.5, 0.5]


@pytest.mark.parametrize("own", [{"namespace", "pod"}, {"namespace"}, {"pod"}, set()])
def test_labels_that_prometheus_has_of_its_own_do_not_hide_the_workloads(own: set[str]) -> None:
    """It renames those that both have, and only those."""
    labels = {"instance": "10.1.0.7:9400", "cluster": "eu", **labels_of()}
    for name, target, workload in (("namespace", "gpu", "llm"), ("pod", "dcgm-x", "vllm-0")):
        labels[name] = target if name in own else workload
        if name in own:
            labels[f"exported_{name}"] = workload
    place = only(dcgm_page(labels)).place
    assert (place.namespace, place.pod, place.cluster) == ("llm", "vllm-0", "eu")
    assert place.hosts == ("gpu-1", "10.1.0.7")


def test_two_numbers_for_one_thing_are_none() -> None:
    page = dcgm_page({**labels_of(), "err_code": "79"}, DCGM_FI_DEV_XID_ERRORS=79)
    page += dcgm_page({**labels_of(), "err_code": "31"}, DCGM_FI_DEV_XID_ERRORS=31)
    assert only(page).gpu.xid_errors is None
    assert only(page).gpu.busy_ratio == 0.97


# --- what is not known ----------------------------------------------------------------------------


@pytest.mark.parametrize("metric", [m for m in METRICS if m in USUAL])
@given(base=st.sampled_from(BLANK_BASES), more=st.integers(0, 15))
def test_a_blank_is_never_a_number(metric: str, base: int, more: int) -> None:
    """DCGM's blanks of 32 and 64 bits and of floating point, each for several reasons."""
    usual = only(dcgm_page(labels_of())).gpu
    gpu = only(dcgm_page(labels_of(), **{metric: base + more})).gpu
    for field in Gpu.__slots__:
        value = getattr(gpu, field)
        if value != getattr(usual, field):
            # Not known, or from what is left: a total without what is reserved, another ratio.
            left = {"total_bytes": usual.total_bytes - 612 * MIB, "busy_ratio": 0.962}
            assert value is None or value == left[field], (field, value)


@pytest.mark.parametrize("metric", ["DCGM_FI_DEV_FB_USED_BYTES", "DCGM_FI_DEV_SM_CLOCK_HERTZ"])
@given(base=st.sampled_from(BLANK_BASES[1:]), more=st.integers(0, 15))
def test_nor_in_base_units(metric: str, base: int, more: int) -> None:
    page = dcgm_page(labels_of(), values={metric: base + more, "DCGM_FI_DEV_GPU_TEMP": 60})
    gpu = only(page).gpu
    assert (gpu.used_bytes, gpu.sm_clock_hz) == (None, None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 0x7FFFFFF2, 2**63])
def test_a_number_that_cannot_be_is_none(value: float) -> None:
    """The GPU is there all the same; only a temperature may be below zero."""
    values = {name: value for name in USUAL if name != "DCGM_FI_DEV_GPU_TEMP"}
    gpu = only(dcgm_page(labels_of(), values=values)).gpu
    assert gpu == Gpu("0", "NVIDIA H100 80GB HBM3", uuid=uuid_of(0))
    cold = only(dcgm_page(labels_of(), values={"DCGM_FI_DEV_GPU_TEMP": value})).gpu
    assert cold.temperature_celsius == (-1.0 if value == -1.0 else None)


# --- reasons --------------------------------------------------------------------------------------


@given(st.sets(st.sampled_from(sorted(NVML_H))))
def test_a_bitmask_is_its_reasons_without_idleness(reasons: set[str]) -> None:
    bits = float(sum(NVML_H[name] for name in reasons))
    told = throttled_because(bits)
    assert told is not None and len(told) == len(set(told))
    assert set(told) == reasons - {"gpu_idle"}


@given(st.integers(0, 2**53 - 1))
def test_no_bit_is_lost_not_even_an_unknown_one(bits: int) -> None:
    told = throttled_because(float(bits))
    assert told is not None and len(told) == (bits & ~1).bit_count()


@pytest.mark.parametrize("bits", [None, -1.0, 0.5, 2.0**53, 2.0**60])
def test_what_is_no_bitmask_has_no_reasons(bits: float | None) -> None:
    assert throttled_because(bits) is None


def test_no_reason_differs_from_no_word_of_reasons() -> None:
    assert only(dcgm_page(labels_of())).gpu.throttled_because is None
    page = dcgm_page(labels_of(), DCGM_FI_DEV_CLOCKS_EVENT_REASONS=1)
    assert only(page).gpu.throttled_because == ()
    page = dcgm_page(labels_of(), DCGM_FI_DEV_CLOCK_THROTTLE_REASONS=0x20)
    assert only(page).gpu.throttled_because == ("sw_thermal_slowdown",)


# --- rude pages -----------------------------------------------------------------------------------


@given(st.integers(0, 2000), st.binary(max_size=40), st.integers(0, 2000))
def test_a_page_that_is_cut_or_damaged_is_read_as_far_as_it_goes(
    at: int, noise: bytes, cut: int
) -> None:
    whole = dcgm_page(labels_of(0), labels_of(1))
    damaged = whole[:at] + noise + whole[at:]
    for body in (damaged, damaged[:cut]):
        for device in devices_on(body):
            gpu = device.gpu
            assert gpu.busy_ratio is None or 0 <= gpu.busy_ratio <= 1
            assert gpu.total_bytes is None or gpu.used_bytes is None \
                or gpu.used_bytes <= gpu.total_bytes  # fmt: skip


@given(st.binary(max_size=400))
def test_bytes_of_anybody_raise_nothing(body: bytes) -> None:
    assert devices_on(b"DCGM_FI_DEV_GPU_UTIL" + body) is not None


def test_a_line_that_does_not_end_is_left_out() -> None:
    page = dcgm_page(labels_of(), values={"DCGM_FI_DEV_GPU_TEMP": 60, "DCGM_FI_DEV_GPU_UTIL": 97})
    gpu = only(page[:-2]).gpu  # …} 9
    assert (gpu.temperature_celsius, gpu.busy_ratio) == (60.0, None)


def test_other_exporters_series_are_no_gpus() -> None:
    page = b'DCGM_FI_DEV_GPU_UTIL{nvswitch="3",Hostname="gpu-1"} 3\nnode_load1 0.3\n'
    assert devices_on(page) == ()

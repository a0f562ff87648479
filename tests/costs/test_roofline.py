"""The roofline is the larger of two quotients, and says which; collectives follow the ring."""

from __future__ import annotations

import pytest

from ullage.costs.hardware import find_hardware, measured_machine
from ullage.costs.roofline import ElementBytes, operator_bytes, roofline
from ullage.costs.step import Operator
from ullage.errors import BadUsage

BF16 = ElementBytes(weight=2, activation=2, cache=2)
A100 = find_hardware("A100")


def test_a_matrix_vector_product_is_bound_by_memory_and_a_wide_one_by_arithmetic():
    narrow = Operator("q", "projection", 2.0 * 4096 * 4096, 4096 * 4096, 2 * 4096)
    wide = Operator("q", "projection", 2.0 * 8192 * 4096 * 4096, 4096 * 4096, 8192 * 2 * 4096)
    memory, compute = roofline([narrow, wide], A100, BF16, "bfloat16")
    assert (memory.bound, compute.bound) == ("memory", "compute")
    assert memory.seconds == pytest.approx((4096 * 4096 + 2 * 4096) * 2 / 2.039e12)
    assert compute.seconds == pytest.approx(2 * 8192 * 4096 * 4096 / 312e12)


def test_decoding_a_70b_alone_is_its_weights_over_the_bandwidth():
    """140 GB of weights on a device of 2.039 TB/s cannot take less than 69 ms a token."""
    weights = Operator("all", "projection", 2.0 * 70e9, 70e9)
    (time,) = roofline([weights], A100, BF16, "bfloat16")
    assert time.seconds == pytest.approx(0.0687, rel=1e-3)


def test_counts_multiply_and_each_kind_of_byte_has_its_own_width():
    operator = Operator("x", "attention", 1.0, 100, 10, 1000, count=3)
    element = ElementBytes(weight=0.5, activation=2, cache=1)
    assert operator_bytes(operator, element) == 50 + 20 + 1000
    (time,) = roofline([operator], A100, element, "bfloat16")
    assert time.bytes == 3 * 1070
    assert time.seconds == pytest.approx(3 * 1070 / 2.039e12)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_an_all_reduce_sends_its_payload_twice_but_for_one_share(ranks):
    reduce = Operator("all_reduce", "link", 0.0, link_elements=1e6, count=2)
    (time,) = roofline([reduce], A100, BF16, "bfloat16", ranks)
    assert time.bound == "link"
    assert time.seconds == pytest.approx(2 * 2e6 * 2 * (ranks - 1) / ranks / 300e9)


def test_what_a_device_cannot_do_is_refused_not_guessed():
    with pytest.raises(BadUsage, match="fp8"):
        roofline([], A100, BF16, "fp8")
    alone = measured_machine(
        "this machine",
        memory_bytes=2**30,
        bandwidth_bytes_per_s=1e10,
        flops=(("float32", 1e11),),
        method="test",
    )
    with pytest.raises(BadUsage, match="no link"):
        roofline([Operator("r", "link", 0.0, link_elements=1.0)], alone, BF16, "float32", 2)

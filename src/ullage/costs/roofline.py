"""The roofline: the least time that each operator of a step can take on a device.

Holds arithmetic on Operators and a HardwareSpec; no latency, no launch cost, perfect overlap
inside an operator and none between operators.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ullage.costs.hardware import HardwareSpec
from ullage.costs.step import Operator
from ullage.errors import BadUsage


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes of one stored element: weights (scales included, so maybe a fraction), others."""

    weight: float
    activation: float
    cache: float


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """The least seconds that all `count` layers of one operator can take, and what bounds them."""

    operator: Operator
    seconds: float
    bound: Literal["memory", "compute", "link"]
    bytes: float


def operator_bytes(operator: Operator, element: ElementBytes) -> float:
    """Bytes that one operator moves between memory and the units, in one layer."""
    return (
        operator.weight_elements * element.weight
        + operator.activation_elements * element.activation
        + operator.cache_elements * element.cache
    )


def roofline(
    operators: Iterable[Operator],
    hardware: HardwareSpec,
    element: ElementBytes,
    compute_dtype: str,
    tensor_ranks: int = 1,
) -> tuple[OperatorTime, ...]:
    """The least time of each operator: max(bytes / bandwidth, FLOPs / peak) (Williams et al. 2009).

    Collectives take their ring traffic over the fastest link, without latency. Raises BadUsage
    when the device has no rate for `compute_dtype`, or no link where one is needed.
    """
    peak = hardware.flops_per_s(compute_dtype)
    if peak is None:
        known = ", ".join(name for name, _ in hardware.flops)
        raise BadUsage(
            f"{hardware.name} has no rate for {compute_dtype} arithmetic",
            field="compute dtype",
            expected=f"one of {known}",
        )
    times = []
    for operator in operators:
        if operator.kind == "link":
            times.append(_link_time(operator, hardware, element, tensor_ranks))
            continue
        moved = operator_bytes(operator, element)
        memory_s, compute_s = moved / hardware.bandwidth_bytes_per_s, operator.flops / peak
        times.append(
            OperatorTime(
                operator,
                seconds=operator.count * max(memory_s, compute_s),
                bound="memory" if memory_s >= compute_s else "compute",
                bytes=operator.count * moved,
            )
        )
    return tuple(times)


def _link_time(
    operator: Operator, hardware: HardwareSpec, element: ElementBytes, ranks: int
) -> OperatorTime:
    rate = hardware.link_bytes_per_s()
    if rate is None:
        raise BadUsage(f"{hardware.name} has no link between devices", field="--gpu")
    sent = operator.link_elements * element.activation * 2 * (ranks - 1) / ranks
    return OperatorTime(operator, operator.count * sent / rate, "link", operator.count * sent)

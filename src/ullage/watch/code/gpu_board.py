"""The board of GPUs, as NVIDIA's DCGM exporter tells of them.

Holds titles, units and queries. How a field is read is `gpus`', how it is drawn `dashboard`'s.
"""

from __future__ import annotations

from ullage.telemetry.gpus import REASONS
from ullage.watch.code.expressions import Scope
from ullage.watch.code.gpus import ENGINE, SLOWED, bits_of, device, reasons
from ullage.watch.code.panels import CHOSEN, Board, Panel, Query, Row

WHO = "{{Hostname}}{{hostname}} {{gpu}} {{GPU_I_ID}}"
SUPPLY = (*bits_of("thermal", "brake", "power_cap"), SLOWED)
"""The reasons that are shown: heat, a failing supply, and the power cap that is no fault."""


def gpu_board(matchers: str = "") -> Board:
    """Every GPU that a DCGM exporter tells of."""
    scope = Scope(",".join(part for part in (CHOSEN, matchers) if part))
    chosen_by = Scope(matchers).select("", '__name__=~"DCGM_FI_DEV_GPU_TEMP(_CELSIUS)?"')
    return Board(
        uid=f"ullage-{ENGINE}",
        title="ullage: GPUs",
        description="What NVIDIA's DCGM exporter tells. Names are published ones.",
        rows=(_fleet(scope), _devices(scope), _faults(scope)),
        absent=(),
        chosen_by=chosen_by,
        menus=("job", "instance"),
        alerts=f'ALERTS{{alertstate="firing",ullage_engine="{ENGINE}"}}',
    )


def _stat(title: str, unit: str, promql: str) -> Panel:
    return Panel(title, unit, (Query(promql, ""),), kind="stat", width=4)


def _fleet(scope: Scope) -> Row:
    heat = device("temperature_celsius", scope)
    return Row(
        "Fleet",
        (
            _stat("GPUs", "short", f"count ({heat})"),
            _stat("Busy", "percentunit", f"avg ({device('busy_ratio', scope)})"),
            _stat("Memory held", "bytes", f"sum ({device('used_bytes', scope)})"),
            _stat("Memory free", "bytes", f"sum ({device('free_bytes', scope)})"),
            _stat("Power", "watt", f"sum ({device('power_watts', scope)})"),
            _stat("Hottest", "celsius", f"max ({heat})"),
        ),
    )


def _devices(scope: Scope) -> Row:
    clock = device("sm_clock_hz", scope)
    return Row(
        "Devices",
        (
            Panel(
                "Busy by device",
                "percentunit",
                (Query(device("busy_ratio", scope), WHO),),
                "Share of time in which any kernel ran: busy is not fast.",
                most=1.0,
            ),
            Panel(
                "Memory",
                "bytes",
                (
                    Query(device("used_bytes", scope), f"held {WHO}"),
                    Query(device("free_bytes", scope), f"free {WHO}"),
                ),
                "Engines take theirs at the start: this does not tell how full the KV cache is.",
            ),
            Panel("Temperature", "celsius", (Query(device("temperature_celsius", scope), WHO),)),
            Panel("Power by device", "watt", (Query(device("power_watts", scope), WHO),)),
            Panel("SM clock", "hertz", (Query(clock, WHO),)),
            Panel(
                "SM clock, of the highest",
                "percentunit",
                (Query(f"({clock}) / ({device('max_sm_clock_hz', scope)} > 0)", WHO),),
                "Needs DCGM_FI_DEV_MAX_SM_CLOCK among the exporter's counters (W018).",
                most=1.0,
            ),
        ),
    )


def _faults(scope: Scope) -> Row:
    held = f"({device('reasons', scope)})"
    return Row(
        "Faults",
        (
            Panel(
                "Devices held down, by reason",
                "short",
                tuple(Query(f"sum ({reasons([bit], held)})", REASONS[bit]) for bit in SUPPLY),
                "sw_power_cap is how these devices are meant to run; heat and the power brake are "
                "not (W018). Needs DCGM_FI_DEV_CLOCKS_EVENT_REASONS among the counters.",
                kind="stacked",
                width=12,
            ),
            Panel(
                "Last Xid error",
                "none",
                (Query(device("xid_errors", scope), WHO),),
                "The code is told for ever; only a change is news (W019).",
                width=12,
            ),
        ),
    )

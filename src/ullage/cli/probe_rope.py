"""`ullage probe rope MODEL`: the rotary tables that engines build, against exact ones.

Holds flags, the table and the JSON document; the measuring is `ullage.probes.rope.rope`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ullage.anatomy import load
from ullage.cli.flags import add_model_argument, located, positive_integer
from ullage.errors import BadUsage

if TYPE_CHECKING:
    from ullage.probes.rope.ranks import RankReading
    from ullage.probes.rope.rope import RopeReading, RopeTable, TableReading

DTYPES = ("float32", "bfloat16", "float16")
MAX_POSITIONS = 1 << 26
SHOWN_DISTANCES = (1, 256, 4096)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage probe rope`."""
    add_model_argument(parser)
    parser.add_argument(
        "--max-model-len",
        type=positive_integer,
        metavar="TOKENS",
        help="the longest sequence, whose last position is looked at (default: the model's own)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, action="append", help="repeatable (default: all three)"
    )
    parser.add_argument(
        "--bound",
        type=_radians,
        default=0.01,
        metavar="RADIANS",
        help="angle error whose first position is told (default: 0.01)",
    )
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu, cuda, cuda:1, …")
    parser.add_argument(
        "--ranks",
        action="store_true",
        help="compare with the other ranks of this job, which runs the same command (torchrun)",
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """0; 1 when the ranks differ, or a table follows from another formula than the configuration.

    Raises BadInput for a model or flags that are wrong, Unreachable when the ranks do not meet.
    """
    try:
        import ullage.engine  # noqa: F401 - before torch, see there
        from ullage.probes.rope.ranks import compare_ranks, join_job, leave_job
        from ullage.probes.rope.rope import fingerprint, probe_rope, turnings
    except ModuleNotFoundError as error:
        if (error.name or "ullage").startswith("ullage"):
            raise  # our own mistake, not a missing extra
        raise BadUsage(
            f"the Python package {error.name} is not installed",
            expected="pip install 'ullage[engine]'",
        ) from error
    if (args.max_model_len or 0) > MAX_POSITIONS:
        raise BadUsage(
            f"{args.max_model_len:,}", file="--max-model-len", expected=f"up to {MAX_POSITIONS:,}"
        )
    device = _device(args.device)
    model = load(located(args.model)[0])
    spec, rank = model.anatomy.spec, 0
    ranks: tuple[RankReading, ...] | None = None
    if args.ranks:
        limit = args.max_model_len or spec.max_positions
        found = turnings(spec, limit)
        rank = join_job()
        try:
            ranks = compare_ranks(found, fingerprint(spec, found), limit, device, args.bound)
        finally:
            leave_job()
    failed = ranks is not None and not all(one.agrees for one in ranks)
    if rank == 0:  # the others say by their exit code what rank 0 says in words
        reading = probe_rope(
            model,
            num_positions=args.max_model_len,
            dtypes=tuple(args.dtype or DTYPES),
            device=device,
            bound_rad=args.bound,
        )
        failed = failed or not _formulas_match(reading)
        if args.output == "json":
            print(json.dumps(document(args.model, device, reading, ranks), allow_nan=False))
        else:
            print("\n".join(_lines(args.model, reading, ranks)))
    return int(failed)


def _radians(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 3.15:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}; expected radians above 0, at most π")
    return value


def _device(name: str) -> str:
    import torch

    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0][:120]
        raise BadUsage(
            f"{name[:40]}: {reason}", file="--device", expected="a device here"
        ) from None
    return name


def _formulas_match(reading: RopeReading) -> bool:
    return all(one.formula_matches for table in reading.tables for one in table.readings)


def document(
    model: str, device: str, reading: RopeReading, ranks: tuple[RankReading, ...] | None
) -> dict[str, object]:
    """The JSON document of one model."""
    return {
        "model": model,
        "device": device,
        "max_model_len": reading.num_positions,
        "positions_checked": reading.positions_checked,
        "bound_rad": reading.bound_rad,
        "rope_fingerprint": reading.fingerprint,
        "formulas_match": _formulas_match(reading),
        "notes": list(reading.notes),
        "tables": [asdict(table) for table in reading.tables],
        "ranks": None if ranks is None else [asdict(rank) for rank in ranks],
    }


def _lines(model: str, reading: RopeReading, ranks: tuple[RankReading, ...] | None) -> list[str]:
    lines = [f"{model}: {reading.num_positions:,} positions, fingerprint {reading.fingerprint}"]
    lines += [f"note: {note}" for note in reading.notes]
    for table in reading.tables:
        lines += _table_lines(table, reading)
    for one in ranks or ():
        word = "agrees" if one.agrees else "DIFFERS"
        off = "other pairs" if one.angle_difference_rad is None else (
            f"{one.angle_difference_rad:.2g} rad at most")  # fmt: skip
        bits = "same bits" if one.same_bits else "other bits"
        lines.append(
            f"rank {one.rank} on {one.host} ({one.device}) {word} with rank 0: "
            f"{one.fingerprint}, {off}, {bits}"
        )
    return lines


def _table_lines(table: RopeTable, reading: RopeReading) -> list[str]:
    factor = "" if table.attention_factor == 1 else f", times {table.attention_factor:.4g}"
    last = reading.num_positions - 1
    lines = [
        "",
        f"{len(table.layers)} layers from {table.layers[0]}: {table.kind} rope, theta "
        f"{table.theta:,.0f}, {table.rotary_dim} of {table.head_dim} dimensions{factor}",
        f"  {'':<27}{'angle error':>12}{f'> {reading.bound_rad:g} rad':>12}{'row equals':>12}"
        "   a score of unit q and k moves by at most, at distance",
        f"  {'built by':<18}{'dtype':<9}{f'at {last:,}':>12}{'from':>12}{'the last at':>12}   "
        + "".join(f"{distance:>10,}" for distance in SHOWN_DISTANCES),
    ]
    lines += [_reading_line(one) for one in table.readings]
    lines += [f"  {one.name}: not built, {one.reason}" for one in table.not_built]
    return lines


def _reading_line(one: TableReading) -> str:
    def position(value: int | None) -> str:
        return "never" if value is None else f"{value:,}"

    moved = {shift.distance: shift.worst for shift in one.score_shifts}
    error = "not finite" if one.angle_error_rad is None else f"{one.angle_error_rad:.2g}"
    shown = "".join(
        f"{'' if (worst := moved.get(distance)) is None else f'{worst:.2g}':>10}"
        for distance in SHOWN_DISTANCES
    )
    mark = "" if one.formula_matches else "   ANOTHER FORMULA"
    return (
        f"  {one.built_by:<18}{one.dtype:<9}{error:>12}{position(one.first_beyond_bound):>12}"
        f"{position(one.first_repeated):>12}   {shown}{mark}"
    )

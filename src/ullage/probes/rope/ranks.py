"""Rotary tables of the processes of one job, held against each other over torch.distributed.

Holds the gathering and the comparison; who starts the processes (torchrun, a training job) is not
its business. Over gloo, so that it needs no GPU; each rank builds on its own device.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed

from ullage.errors import BadUsage, Unreachable
from ullage.probes.rope.builders import Doubles, stored_in_dtype
from ullage.probes.rope.rope import Turning

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
JOIN_S = 120
_LAST = 64
"""So many of the last positions are compared in value, with the powers of two before them."""


@dataclass(frozen=True, slots=True)
class RankReading:
    """One rank beside rank 0. `same_bits`: its float32 tables are equal to the last bit.

    `angle_difference_rad` is the largest over the compared positions, None where the ranks turn
    another number of pairs. `agrees`: the fingerprints are equal, and no angle is off by more than
    the bound.
    """

    rank: int
    host: str
    device: str
    fingerprint: str
    same_bits: bool
    angle_difference_rad: float | None
    agrees: bool


def join_job() -> int:
    """Joins the job that the environment names; returns this process' rank.

    Raises BadUsage without such an environment, Unreachable when the others do not come.
    """
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        raise BadUsage(
            f"{', '.join(missing)} not set",
            file="--ranks",
            expected="a job's environment: torchrun --nproc-per-node N --no-python ullage probe …",
        )
    try:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=JOIN_S))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise Unreachable(f"the ranks do not meet at {address}: {error}") from None
    return distributed.get_rank()


def leave_job() -> None:
    """Ends what `join_job` began."""
    distributed.destroy_process_group()


def compare_ranks(
    found: Sequence[Turning], fingerprint: str, num_positions: int, device: str, bound_rad: float
) -> tuple[RankReading, ...]:
    """Every rank's tables beside rank 0's; every rank of the job calls this and gets all of it."""
    own = _own(found, fingerprint, num_positions, device)
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, own)
    return tuple(_beside(rank, one, every[0], bound_rad) for rank, one in enumerate(every))


def _own(
    found: Sequence[Turning], fingerprint: str, num_positions: int, device: str
) -> dict[str, Any]:
    last = np.arange(max(num_positions - _LAST, 0), num_positions)
    powers = 2 ** np.arange(num_positions.bit_length())
    positions_N: Doubles = np.union1d(last, powers[powers < num_positions]).astype(np.float64)
    tables, digest = [], hashlib.sha256()
    for turning in found:
        cos, sin = stored_in_dtype(turning.angles, "float32", device).build(positions_N)
        tables.append((cos, sin))
        digest.update(cos.tobytes() + sin.tobytes())
    named = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return {
        "host": os.uname().nodename,
        "device": named,
        "fingerprint": fingerprint,
        "digest": digest.hexdigest(),
        "tables": tables,
    }


def _beside(rank: int, own: dict[str, Any], first: dict[str, Any], bound: float) -> RankReading:
    difference: float | None = 0.0
    shapes = [[cos.shape for cos, _ in one["tables"]] for one in (own, first)]
    if shapes[0] != shapes[1]:
        difference = None
    else:
        for (cos, sin), (other_cos, other_sin) in zip(own["tables"], first["tables"], strict=True):
            across, along = sin * other_cos - cos * other_sin, cos * other_cos + sin * other_sin
            off = float(np.abs(np.arctan2(across, along)).max())
            difference = max(difference or 0.0, off)
    agrees = own["fingerprint"] == first["fingerprint"]
    return RankReading(
        rank=rank,
        host=own["host"],
        device=own["device"],
        fingerprint=own["fingerprint"],
        same_bits=own["digest"] == first["digest"],
        angle_difference_rad=difference,
        agrees=agrees and difference is not None and difference <= bound,
    )

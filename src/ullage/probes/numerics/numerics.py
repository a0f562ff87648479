"""What `ullage probe numerics` finds: faults, departures, norms as executed, attention kernels.

Holds the values and their JSON document; no torch. Finding them is `trace` (NaN and Inf),
`apart` (departures), `norms` and `kernels`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Place:
    """A module: its path in the model, its layer if it is in one, its kind and its class.

    `kind` is q, k, v, qkv, o, attention, mlp, norm, rope, embedding, layer, model or other.
    """

    path: str
    layer: int | None
    kind: str
    class_name: str


@dataclass(frozen=True, slots=True)
class Fault:
    """The first module that makes NaN or Inf of finite numbers.

    `num_bad` of `num_elements` of what it gives; `operator` is the first in it whose output is not
    finite though its inputs are; `parameters` are those of its own that hold NaN or Inf already.
    `later` counts the modules that made some anew after it.
    """

    direction: Direction
    place: Place
    what: Literal["NaN", "Inf"]
    num_bad: int
    num_elements: int
    operator: str | None
    parameters: tuple[str, ...]
    later: int


@dataclass(frozen=True, slots=True)
class Departure:
    """A module off its reference by `off` of the reference's norm, where rounding explains
    `allowed`; what it is charged with is not found in the modules within it."""

    direction: Direction
    place: Place
    off: float
    allowed: float


@dataclass(frozen=True, slots=True)
class NormReading:
    """One norm, as it was seen to compute.

    `eps_executed` is solved from its outputs (None: below what the dtype shows); `divisor` is "n"
    or "n-1", what its variance divides by (None: neither, or it has no weight that says);
    `reduces_in` is the dtype of the sum that was executed, "fused" where one operator does it all.
    `one_row` tells whether a row on its own gives the bits that it gives among others.
    """

    place: Place
    eps_configured: float | None
    eps_executed: float | None
    divisor: Literal["n", "n-1"] | None
    reduces_in: str
    operators: tuple[str, ...]
    one_row: Literal["same", "close", "other", "not finite"]
    eps_fits: bool


@dataclass(frozen=True, slots=True)
class KernelReading:
    """One attention kernel at one head size against the sum written out in float64."""

    kernel: str
    head_dim: int
    rows: int
    off: float | None
    allowed: float
    refused: str | None = None

    @property
    def departs(self) -> bool:
        """Also where it is not finite: `off` is None then."""
        return self.refused is None and (self.off is None or self.off > self.allowed)


@dataclass(frozen=True, slots=True)
class NumericsReading:
    """All of it, of one model in one dtype and on one prompt.

    `first` is the first fault forward, else the first departure, and so on backward. `not_judged`
    has modules that could not be run on their own, with the reason.
    """

    model: str
    dtype: str
    reference_dtype: str
    device: str
    tokens: int
    modules: int
    faults: tuple[Fault, ...]
    departures: tuple[Departure, ...]
    norms: tuple[NormReading, ...]
    kernels: tuple[KernelReading, ...]
    not_finite_parameters: tuple[str, ...]
    not_judged: tuple[tuple[str, str], ...]

    @property
    def first(self) -> Fault | Departure | None:
        """What to look at first: forward before backward, NaN before what is merely off."""
        every: tuple[Fault | Departure, ...] = (*self.faults, *self.departures)
        order = sorted(every, key=lambda one: one.direction == "backward")
        return order[0] if order else None

    @property
    def sound(self) -> bool:
        """Nothing at fault."""
        return (
            self.first is None
            and not self.not_finite_parameters
            and all(one.eps_fits and one.one_row in ("same", "close") for one in self.norms)
            and not any(one.departs for one in self.kernels)
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON document."""
        kernels = [{**asdict(one), "departs": one.departs} for one in self.kernels]
        first = None if self.first is None else asdict(self.first)
        return {
            "sound": self.sound,
            "first": first,
            **asdict(self),
            "kernels": kernels,
            "not_judged": dict(self.not_judged),
        }

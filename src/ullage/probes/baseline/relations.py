"""What must hold between the activations of one row, whatever the text: residuals of every part.

Each part's output is held against what the `sketch` says of its input. Holds the arithmetic, in
numpy over all layers at once; how large a residual may be is `baseline`'s and `sequential`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ullage.engine.kernels.compiling import available
from ullage.engine.model.layer import ACTIVATIONS
from ullage.engine.taps import PLACES, Taps
from ullage.probes.baseline.relation_sums import (
    TINY,
    Numbers,
    Part,
    applied,
    by_group,
    length,
    norm_part,
    of_unattended,
    part_of,
    rotated,
    rounded,
    sizes,
    unread,
)
from ullage.probes.baseline.sketch import AdapterSketch, Doubles, Floats, Form, Sketch, signs

if TYPE_CHECKING:
    from ullage.probes.baseline.relations_compiled import CompiledRelations

_FLOAT32_ROUNDING = 2.0**-24
_TAME = 1e15

KINDS: Mapping[str, str] = {
    "embedding": "embedding",
    "mixer_norm": "norm",
    "q": "q",
    "k": "k",
    "v": "v",
    "head_norm": "norm",
    "rope": "rope",
    "attention": "attention",
    "o": "o",
    "mlp_norm": "norm",
    "gate": "mlp",
    "up": "mlp",
    "activation": "mlp",
    "down": "mlp",
    "final_norm": "norm",
    "lm_head": "embedding",
}
"""In the order in which a row passes them."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing that is judged: a part of a layer (None: outside of the layers), perhaps a head."""

    part: str
    layer: int | None
    head: int | None = None

    @property
    def kind(self) -> str:
        return KINDS[self.part]


def cells(form: Form) -> tuple[Cell, ...]:
    """Every cell, in the order of `Residuals`' arrays."""
    heads = {"q": form.heads, "k": form.kv_heads, "v": form.kv_heads, "attention": form.heads}
    found: list[Cell] = []
    for part in KINDS:
        if part in ("embedding", "final_norm", "lm_head"):
            found.append(Cell(part, None))
            continue
        for layer in range(form.layers):
            if part in heads:
                found += [Cell(part, layer, head) for head in range(heads[part])]
            else:
                found.append(Cell(part, layer))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Residuals:
    """float64 [cells]. `made` is what a part gave, summed as the sketch sums; `said` what it says.

    `residual` is their difference (of norms the largest of any channel, of vectors its length);
    `size` what it is measured in, `floor` what rounding of the residual stream alone may make of
    it. `adapted` is what an adapter adds to `said` (0: nothing). NaN in `size`: not looked at.
    `channels` int64 [cells]: where a norm's largest difference is, else −1.
    """

    residual: Doubles
    size: Doubles
    floor: Doubles
    made: Doubles
    said: Doubles
    adapted: Doubles
    channels: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """One tapped row: by place [layers, width], float32, and what it is a row of.

    `kept_LW` are the same as they lie beside each other, places at their `offsets`.
    `compiled`: by the compiled step, between whose layers float32 flows, whatever the dtype.
    `attended` is attention itself [layers, heads, head_dim], computed again from the cache, in the
    layers `attended_L` (None: in all); None where it was not.
    """

    places: Mapping[str, Floats]
    kept_LW: Floats
    offsets: NDArray[np.int64]
    logits_V: Floats
    token_id: int
    position: int
    adapter: str | None = None
    attended: Floats | None = None
    attended_L: NDArray[np.bool_] | None = None
    compiled: bool = False

    @property
    def unattended_L(self) -> NDArray[np.bool_]:
        """The layers whose attention was not computed again."""
        if self.attended is None or self.attended_L is None:
            return np.full(len(self.places["mixed"]), self.attended is None)
        return ~self.attended_L


def row_of(
    taps: Taps, number: int, logits_V: torch.Tensor, token_id: int, position: int
) -> Row:  # fmt: skip
    """The tapped row `number`; an adapter and attention come with `dataclasses.replace`."""
    places = {place: taps.at(place)[:, number] for place in PLACES}
    kept = taps.kept_LRW[:, number]
    numbers = (taps.offsets, logits_V.numpy(), token_id, position)
    return Row(places, kept, *numbers, compiled=taps.compiled)


CANCELLED = 0.1
"""A head's output is measured in its own length, and at least so much of the layer's rms."""


class Relations:
    """A sketch, made ready to have rows held against it."""

    def __init__(self, sketch: Sketch, rounding: float) -> None:
        """`rounding`: half a step of what flows between layers in torch, 2⁻²⁴ of float32."""
        self.sketch, self.form, self.rounding = sketch, sketch.form, rounding
        form = sketch.form
        self.cells = cells(form)
        self.signs_hidden = signs(form.hidden, "hidden")
        self.signs_inner = signs(form.inner, "inner")
        self.signs_vocab = signs(form.vocab, "vocab")
        self.signs_heads = signs((form.heads + 2 * form.kv_heads) * form.head_dim, "heads")
        self.squares = {
            name: by_group(getattr(sketch, name))
            for name in ("heads_LHI", "o_LI", "gate_LI", "up_LI", "down_LI", "head_E")
        }

        windows = [float("inf") if one is None else one for one in form.windows]
        self._reach_L1 = np.array(windows, np.float64)[:, None]
        self._compiled: CompiledRelations | None = None
        if available():
            from ullage.probes.baseline.relations_compiled import CompiledRelations

            self._compiled = CompiledRelations(self)

    def rounding_of(self, row: Row) -> float:
        """Half a step of what flows between the layers of this row."""
        return _FLOAT32_ROUNDING if row.compiled else self.rounding

    def of(self, row: Row) -> Residuals:
        """All residuals of one row; in machine code where there is numba, but for adapters."""
        if not _is_tame(row):
            with np.errstate(over="ignore", invalid="ignore"):
                return self.in_numpy(_in_float64(row))
        if self._compiled is not None and row.adapter is None:
            return self._compiled.of(row)
        return self.in_numpy(row)

    def in_numpy(self, row: Row) -> Residuals:
        """The same by numpy alone."""
        order = {part: at for at, part in enumerate(KINDS)}
        found = sorted(self._parts(row), key=lambda one: order[one.name])
        assert [one.name for one in found] == list(KINDS)
        columns = ("residual", "size", "floor", "made", "said", "adapted", "channels")
        return Residuals(
            **{
                name: np.concatenate([getattr(one, name).ravel() for one in found])
                for name in columns
            }
        )

    def _parts(self, row: Row) -> Iterator[Part]:
        at = row.places
        form, sketch = self.form, self.sketch
        adapter = sketch.adapters.get(row.adapter) if row.adapter is not None else None
        unknown = row.adapter is not None and adapter is None
        x_LE, middle_LE = at["x"], at["middle"]
        rounding = self.rounding_of(row)
        stream_L = rounding * np.linalg.norm(middle_LE, axis=1)
        yield self._embedding(row)
        yield norm_part(
            "mixer_norm", form, x_LE[:-1], at["normed"][:-1], sketch.mixer_norm_LE,
            sketch.mixer_norm_bias_LE,
        )  # fmt: skip
        yield from self._heads(at, adapter, unknown)
        yield from self._turn(row)
        yield self._attention(row)
        made: Numbers = (middle_LE - x_LE[:-1]) @ self.signs_hidden
        yield self.product("o", at["mixed"], made, stream_L, adapter, unknown)
        yield norm_part(
            "mlp_norm", form, middle_LE, at["mlp_normed"], sketch.mlp_norm_LE,
            sketch.mlp_norm_bias_LE,
        )  # fmt: skip
        if form.gated:
            made = at["gate"] @ self.signs_inner
            yield self.product("gate", at["mlp_normed"], made, 0.0, adapter, unknown)
        else:
            yield unread("gate", (form.layers,))
        made = at["up"] @ self.signs_inner
        yield self.product("up", at["mlp_normed"], made, 0.0, adapter, unknown)
        yield self.activation(at)
        last_L = rounding * np.linalg.norm(x_LE[1:], axis=1)
        made = (x_LE[1:] - middle_LE) @ self.signs_hidden
        yield self.product("down", at["hidden"], made, stream_L + last_L, adapter, unknown)
        yield norm_part(
            "final_norm", form, x_LE[-1:], at["normed"][-1:], sketch.final_norm_E[None],
            sketch.final_norm_bias_E[None],
        )  # fmt: skip
        yield self._head(row)

    def embedded(self, row: Row) -> float:
        said = float(self.sketch.embedding_V[row.token_id]) * self.form.embedding_scale
        if len(self.sketch.positions_N):
            said += float(self.sketch.positions_N[row.position + self.form.first_position])
        return said

    def _embedding(self, row: Row) -> Part:
        x_E = row.places["x"][0]
        said = self.embedded(row)
        size = float(np.linalg.norm(x_E))
        floor = self.rounding_of(row) * size
        return part_of("embedding", float(x_E @ self.signs_hidden), said, size, floor)

    def _heads(
        self, at: Mapping[str, Numbers], adapter: AdapterSketch | None, unknown: bool
    ) -> Iterator[Part]:
        form, normed_LE = self.form, at["normed"][:-1]
        made_LH = (at["qkv"] * self.signs_heads).reshape(form.layers, -1, form.head_dim).sum(-1)
        said_LH = applied(self.sketch.heads_LHI, self._taken(normed_LE))
        said_LH = said_LH + self.sketch.heads_bias_LH
        adapted_LH = np.zeros_like(said_LH)
        if adapter is not None:
            adapted_LH = applied(adapter.heads_LHI, normed_LE)
        size_LH = sizes(self.squares["heads_LHI"], normed_LE)
        if unknown:
            size_LH = np.full_like(size_LH, np.nan)
        first = 0
        for part, count in (("q", form.heads), ("k", form.kv_heads), ("v", form.kv_heads)):
            own = slice(first, first + count)
            first += count
            yield part_of(
                part, made_LH[:, own], said_LH[:, own] + adapted_LH[:, own], size_LH[:, own],
                adapted=adapted_LH[:, own],
            )  # fmt: skip

    def product(
        self, part: str, x_LI: Numbers, made_L: Numbers, floor: Numbers | float,
        adapter: AdapterSketch | None, unknown: bool,
    ) -> Part:  # fmt: skip
        name = f"{part}_LI"
        said_L = applied(getattr(self.sketch, name), self._taken(x_LI))
        said_L = said_L + getattr(self.sketch, f"{part}_bias_L")
        adapted_L = np.zeros_like(said_L)
        if adapter is not None:
            adapted_L = applied(getattr(adapter, name), x_LI)
        size_L = sizes(self.squares[name], x_LI)
        if unknown:
            size_L = np.full_like(size_L, np.nan)
        return part_of(part, made_L, said_L + adapted_L, size_L, floor, adapted_L)

    def _taken(self, x_LI: Numbers) -> Numbers:
        """What a product takes for its input: of int8 weights what that is rounded to."""
        return rounded(x_LI) if self.form.rounds_inputs else x_LI

    def _turn(self, row: Row) -> Iterator[Part]:
        """Queries and keys after their norms and the rotation, against those computed anew."""
        form = self.form
        count = form.heads + form.kv_heads
        shape = (form.layers, -1, form.head_dim)
        before = row.places["qkv"].astype(np.float64).reshape(shape)[:, :count]
        after = row.places["turned"].astype(np.float64).reshape(shape)[:, :count]
        wanted = self._normed_heads(before)
        lengths = np.linalg.norm(after, axis=(1, 2))
        if self.sketch.q_norm_LD.shape[-1] == 0:
            yield unread("head_norm", (form.layers,))
        else:
            # A rotation leaves the length of every head as it was.
            made, said = (np.linalg.norm(one, axis=2) for one in (after, self._factors(wanted)))
            yield part_of("head_norm", length(made - said), 0.0, length(made))
        for number, turning in enumerate(self.sketch.turnings):
            layers = [at for at, of in enumerate(form.rope_of) if of == number]
            angles = row.position * turning.frequencies
            cos, sin = np.cos(angles) * turning.factor, np.sin(angles) * turning.factor
            wanted[layers] = rotated(wanted[layers], cos, sin, turning.interleaved)
        off = np.sqrt(((after - wanted) ** 2).sum(axis=(1, 2)))
        yield part_of("rope", off, 0.0, lengths)

    def _normed_heads(self, heads_LCD: Doubles) -> Doubles:
        form, sketch = self.form, self.sketch
        found = heads_LCD.copy()
        if sketch.q_norm_LD.shape[-1] == 0:
            return found
        rms = np.sqrt((found**2).mean(-1, keepdims=True) + form.norm_eps)
        found /= rms
        found[:, : form.heads] *= sketch.q_norm_LD[:, None]
        found[:, form.heads :] *= sketch.k_norm_LD[:, None]
        return found

    def _factors(self, heads_LCD: Doubles) -> Doubles:
        """Times what the cos and sin of a layer's turning are times."""
        form, found = self.form, heads_LCD.copy()
        for layer, number in enumerate(form.rope_of):
            if number is not None:
                turning = self.sketch.turnings[number]
                found[layer, :, : 2 * len(turning.frequencies)] *= turning.factor
        return found

    def _attention(self, row: Row) -> Part:
        form = self.form
        mixed = row.places["mixed"].reshape(form.layers, form.heads, form.head_dim)
        attended = np.zeros_like(mixed) if row.attended is None else row.attended
        off = np.linalg.norm(mixed - attended, axis=-1)
        # Of a head whose values nearly cancel the length is small and its rounding is not.
        squares = (attended.astype(np.float64) ** 2).sum(-1)
        least = CANCELLED**2 * squares.mean(-1, keepdims=True)
        size = np.sqrt(squares + least) + TINY
        floor, out = self.attention_floor(row, size), row.unattended_L
        off[out], size[out], floor[out] = of_unattended(mixed[out]), np.nan, 0.0
        return part_of("attention", off, 0.0, size, floor)

    def attention_floor(self, row: Row, size_LH: Numbers) -> Numbers:
        """A sum over n keys in float32 is off by some √n · 2⁻²⁴: prompts of a baseline are short,
        and over two thousand keys SmolLM2's heads are off by 2√n · 2⁻²⁴ of their output at most."""
        return _FLOAT32_ROUNDING * np.sqrt(np.minimum(self._reach_L1, row.position + 1)) * size_LH

    def activation(self, at: Mapping[str, Numbers]) -> Part:
        up_LF, hidden_LF = at["up"], at["hidden"]
        activation = ACTIVATIONS[self.form.activation]
        if self.form.gated:
            wanted = activation(torch.from_numpy(at["gate"].copy())).numpy() * up_LF
        else:
            wanted = activation(torch.from_numpy(up_LF.copy())).numpy()
        off = np.linalg.norm(hidden_LF - wanted, axis=-1)
        return part_of("activation", off, 0.0, np.linalg.norm(wanted, axis=-1) + TINY)

    def _head(self, row: Row) -> Part:
        if self.form.logit_cap is not None:
            return unread("lm_head", (1,))
        normed = row.places["normed"][-1]
        said = float(self.sketch.head_E @ self._taken(normed)) + self.sketch.head_bias
        size = float(sizes(self.squares["head_E"], normed))
        scale = self.form.logit_scale
        return part_of(
            "lm_head", float(row.logits_V @ self.signs_vocab), said * scale, size * abs(scale)
        )


def _is_tame(row: Row) -> bool:
    """Whether the residual is finite, with squares that no sum of them makes infinite."""
    return all(float(np.abs(row.places[place]).max()) < _TAME for place in ("x", "middle"))


def _in_float64(row: Row) -> Row:
    """The same, in which squares of every float32 number are finite."""
    places: Mapping[str, Numbers] = {n: v.astype(np.float64) for n, v in row.places.items()}
    return replace(row, places=places, logits_V=row.logits_V.astype(np.float64))

"""`relations` in machine code: the call of `kernels.residuals`, and what that leaves to numpy.

Holds no arithmetic of its own but the angles of a position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ullage.probes.baseline.relation_sums import of_unattended
from ullage.probes.baseline.relations import KINDS, Residuals, Row
from ullage.probes.baseline.sketch import Doubles

if TYPE_CHECKING:
    from ullage.probes.baseline.relation_sums import Part
    from ullage.probes.baseline.relations import Relations

_COLUMNS = ("residual", "size", "floor", "made", "said", "adapted")


class CompiledRelations:
    """`Relations` by `kernels.residuals`: the same sums, of rows that no adapter changes."""

    def __init__(self, of: Relations) -> None:
        from ullage.engine.kernels import residuals as kernel

        self._of, self._kernel = of, kernel
        form, sketch = of.form, of.sketch
        at = {part: number for number, part in reversed(list(enumerate(c.part for c in of.cells)))}
        self._starts = np.array([at[part] for part in KINDS], np.int64)
        turnings = sketch.turnings
        self._pairs = max([len(one.frequencies) for one in turnings], default=0)
        self._silu = form.gated and form.activation in ("silu", "swish")
        self._turning_L = np.array([-1 if n is None else n for n in form.rope_of], np.int64)
        self._factors = np.array([one.factor for one in turnings] or [1.0])
        self._interleaved = np.array([int(one.interleaved) for one in turnings] or [0], np.int64)

    def of(self, row: Row) -> Residuals:
        """All residuals of one row."""
        of, form, sketch, squares = self._of, self._of.form, self._of.sketch, self._of.squares
        found = np.empty((6, len(of.cells)))
        channels = np.empty(len(of.cells), np.int64)
        cos, sin = self._angles(row.position)
        attended, left_out = row.attended, row.unattended_L
        if attended is None:
            attended = np.zeros((form.layers, form.heads, form.head_dim), np.float32)
        self._kernel.residuals(
            np.ascontiguousarray(row.kept_LW), row.offsets, self._starts, form.heads,
            form.kv_heads, form.head_dim, form.inner, form.norm_eps, form.norm_kind == "layer",
            self._silu, form.rounds_inputs, of.rounding_of(row), of.signs_hidden, of.signs_inner,
            of.signs_heads, of.signs_vocab,
            sketch.heads_LHI, sketch.heads_bias_LH, squares["heads_LHI"],
            sketch.o_LI, sketch.o_bias_L, squares["o_LI"],
            sketch.gate_LI, sketch.gate_bias_L, squares["gate_LI"],
            sketch.up_LI, sketch.up_bias_L, squares["up_LI"],
            sketch.down_LI, sketch.down_bias_L, squares["down_LI"],
            sketch.mixer_norm_LE, sketch.mixer_norm_bias_LE, sketch.mlp_norm_LE,
            sketch.mlp_norm_bias_LE, sketch.final_norm_E, sketch.final_norm_bias_E,
            sketch.q_norm_LD, sketch.k_norm_LD, sketch.head_E, sketch.head_bias,
            squares["head_E"], form.logit_scale, row.logits_V, of.embedded(row),
            self._turning_L, cos, sin, self._factors, self._interleaved,
            np.ascontiguousarray(attended), found, channels,
        )  # fmt: skip
        residual, size, floor, made, said, adapted = found
        result = Residuals(residual, size, floor, made, said, adapted, channels)
        own = self._cells_of("attention")
        floor[own] = of.attention_floor(row, size[own].reshape(form.layers, -1)).ravel()
        if left_out.any():
            unread = np.repeat(left_out, form.heads)
            mixed = row.places["mixed"][left_out].reshape(-1, form.heads, form.head_dim)
            told = of_unattended(mixed).ravel()
            for column, value in ((residual, told), (made, told), (size, np.nan), (floor, 0.0)):
                column[own][unread] = value
        if form.logit_cap is not None:
            self._forget(result, "lm_head")
        if not self._silu:
            self._take_over(result, row)
        return result

    def _angles(self, position: int) -> tuple[Doubles, Doubles]:
        """cos and sin [turnings, pairs]; shorter ones are filled with a turn by nothing."""
        turnings = self._of.sketch.turnings
        cos = np.ones((max(len(turnings), 1), self._pairs))
        sin = np.zeros_like(cos)
        for number, one in enumerate(turnings):
            angles, own = position * one.frequencies, slice(len(one.frequencies))
            cos[number, own] = np.cos(angles) * one.factor
            sin[number, own] = np.sin(angles) * one.factor
        return cos, sin

    def _cells_of(self, part: str) -> slice:
        number = list(KINDS).index(part)
        ends = [*self._starts.tolist()[1:], len(self._of.cells)]
        return slice(int(self._starts[number]), ends[number])

    def _forget(self, found: Residuals, part: str) -> None:
        own = self._cells_of(part)
        found.residual[own], found.size[own] = 0.0, np.nan
        found.made[own] = found.said[own] = 0.0

    def _take_over(self, found: Residuals, row: Row) -> None:
        """Activations other than SiLU behind a gate, by numpy."""
        self._take(found, self._of.activation(row.places))
        if self._of.form.gated:
            made = row.places["gate"] @ self._of.signs_inner
            normed = row.places["mlp_normed"]
            self._take(found, self._of.product("gate", normed, made, 0.0, None, unknown=False))

    def _take(self, found: Residuals, part: Part) -> None:
        own = self._cells_of(part.name)
        for name in _COLUMNS:
            getattr(found, name)[own] = getattr(part, name)

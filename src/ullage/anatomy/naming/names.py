"""The names of a model's tensors: a row of the naming table with all that it inherits.

Holds the resolving only. What a row can say is `row.py`, the rows are `rows.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ullage.anatomy.naming.row import ExpertLayout, Extra, Row
from ullage.anatomy.naming.rows import ALIASES, ROWS


@dataclass(frozen=True, slots=True)
class Naming:
    """A row with everything inherited and every prefix filled in; {i} and {e} remain."""

    key: str
    known: bool
    paths: dict[str, str]
    experts: ExpertLayout
    transposed: bool
    parallel_norms: int
    first_norm: bool
    key_bias: bool
    router_bias_row: bool
    router_held: str | None
    sequence_parallel: bool
    qk_norm_cut: bool
    idle_kv: bool
    embed_extra: int | str
    relative_everywhere: bool
    towers_whole: bool
    hyper_mixed: bool
    parts: tuple[tuple[str, str], ...]
    extras: tuple[Extra, ...]
    encoder: str | None
    own_head: bool
    judges: tuple[Extra, ...]
    mtp: str | None
    mtp_from_end: bool


def naming_for(*keys: str) -> Naming:
    """The naming of the first key that has a row; Llama's, marked not `known`, when none has."""
    for key in keys:
        row_key = ALIASES.get(key, key)
        if row_key in ROWS:
            return _resolve(row_key, known=True)
    return _resolve("llama", known=False)


def _resolve(key: str, *, known: bool) -> Naming:
    row = _inherit(key)
    paths: dict[str, str] = {}

    def fill(slot: str) -> str:
        if slot not in paths:
            text = row.paths[slot]
            while "{" in (rest := text.replace("{i}", "").replace("{e}", "")):
                inner = rest[rest.index("{") + 1 : rest.index("}")]
                text = text.replace("{" + inner + "}", fill(inner))
            paths[slot] = text
        return paths[slot]

    for slot in row.paths:
        fill(slot)
    return Naming(
        key=key,
        known=known and not row.unnamed,
        paths=paths,
        experts=row.experts or "each",
        transposed=bool(row.transposed),
        parallel_norms=row.parallel_norms or 1,
        first_norm=row.first_norm is not False,
        key_bias=row.key_bias is not False,
        router_bias_row=bool(row.router_bias_row),
        router_held=row.router_held,
        sequence_parallel=bool(row.sequence_parallel),
        qk_norm_cut=bool(row.qk_norm_cut),
        idle_kv=bool(row.idle_kv),
        embed_extra=row.embed_extra or 0,
        relative_everywhere=bool(row.relative_everywhere),
        towers_whole=bool(row.towers_whole),
        hyper_mixed=row.hyper_mixed is not False,
        parts=row.parts or (),
        extras=_rooted(row.extras, paths),
        encoder=row.encoder,
        own_head=bool(row.own_head),
        judges=_rooted(row.judges or (), paths),
        mtp=row.mtp,
        mtp_from_end=bool(row.mtp_from_end),
    )


def _rooted(extras: tuple[Extra, ...], paths: dict[str, str]) -> tuple[Extra, ...]:
    return tuple(replace(e, path=e.path.replace("{root}", paths["root"])) for e in extras)


def _inherit(key: str) -> Row:
    """The row with what it leaves open (None) taken from its bases; paths and extras add up."""
    row = ROWS[key]
    if row.base is None:
        return row
    base = _inherit(row.base)
    unsaid = {f.name: getattr(base, f.name) for f in fields(row) if getattr(row, f.name) is None}
    return replace(row, **unsaid, paths=base.paths | row.paths, extras=base.extras + row.extras)

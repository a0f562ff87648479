"""Fields of a spec against tables of what is run, and the sentence for what is not.

The tables are `model.support`'s and `encoder.support`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.anatomy.spec import Tower, Unknown
from ullage.errors import UnsupportedModel


def require(part: object, fields: Mapping[str, tuple[object, ...]], where: str) -> None:
    """Raise UnsupportedModel for the first field whose value its row does not list."""
    for field, accepted in fields.items():
        found = getattr(part, field)
        if found not in accepted:
            raise refusal(where + field, found, accepted)


def refusal(field: str, found: object, accepted: tuple[object, ...]) -> UnsupportedModel:
    """The sentence: the field, what was found, what would be run."""
    return UnsupportedModel(
        f"{_shown(found)[:120]} is not run by the embedded engine",
        field=field,
        expected=" or ".join(_shown(value) for value in accepted),
    )


def _shown(value: object) -> str:
    """A value of the specification in words: of its own parts, their names."""
    if isinstance(value, str):
        return value
    if isinstance(value, Unknown):
        return f"{value.field} {value.found}"
    if isinstance(value, Tower):
        return f"the {value.modality} tower"
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value)) or "none"
    return repr(value)

"""POLICY.toml → Policy: when what is done, and how often at most. Every key is checked.

Holds the values and their reading. When a condition holds is `conditions.py`'s, whether an action
is due `decide.py`'s.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ullage.errors import BadInput
from ullage.watch.act.conditions import Condition, parse_condition

MAX_BYTES = 256 << 10
MAX_ACTIONS = 100
HOUR_S = 3600.0
DEFAULT_LOG = "ullage-act.jsonl"
Do = Literal["cancel_oldest", "drain"]
DOES: tuple[Do, ...] = ("cancel_oldest", "drain")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is done at most. Attempts that failed count: an engine that fails is not hammered.

    `min_pause_s`: between two actions on one replica. `min_answering`: how many other replicas
    must answer, and not be drained, for one to be drained.
    """

    per_replica_per_hour: int = 6
    per_hour: int = 20
    min_pause_s: float = 60.0
    min_answering: int = 1


@dataclass(frozen=True, slots=True)
class Action:
    """`do`, when all of `when` has held for `for_s` seconds. `percent` is cancel_oldest's."""

    name: str
    when: tuple[Condition, ...]
    for_s: float
    do: Do
    percent: float | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """Actions, the first that is due goes first; `log` is the file that tells what was done."""

    actions: tuple[Action, ...]
    limits: Limits = Limits()
    log: str = DEFAULT_LOG


def read_policy(path: str) -> Policy:
    """The policy in the file.

    Raises:
        BadInput: it cannot be read, is not TOML, or says something that is not understood: a
            policy is never followed in part.
    """
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a usable path"
        raise BadInput(f"cannot be read ({reason})", file=path, expected="a policy") from error
    if len(data) > MAX_BYTES:
        raise BadInput(f"more than {MAX_BYTES:,} bytes", file=path, expected="a policy")
    try:
        found = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not TOML: {error}", file=path, expected="a policy") from error
    return _Reader(path).policy(found)


class _Reader:
    """Reads tables of one file; every error names the file and the field."""

    def __init__(self, path: str) -> None:
        self._path = path

    def policy(self, found: Mapping[str, Any]) -> Policy:
        self._only(found, ("action", "limits", "log"), "")
        tables = found.get("action")
        if (
            not isinstance(tables, list)
            or not tables
            or not all(isinstance(table, dict) for table in tables)
        ):
            raise self._bad("action", "no action", "at least one [[action]]")
        if len(tables) > MAX_ACTIONS:
            raise self._bad("action", f"{len(tables)} actions", f"at most {MAX_ACTIONS}")
        actions = tuple(self._action(table, number) for number, table in enumerate(tables))
        names = [action.name for action in actions]
        for name in names:
            if names.count(name) > 1:
                raise self._bad("action", f"the name {name!r} twice", "each name once")
        return Policy(actions, self._limits(found.get("limits", {})), self._log(found))

    def _action(self, table: Mapping[str, Any], number: int) -> Action:
        at = f"action[{number}]"
        self._only(table, ("name", "when", "for_s", "do", "percent"), at)
        do = table.get("do")
        if do not in DOES:
            raise self._bad(f"{at}.do", _shown(do), " or ".join(DOES))
        when = table.get("when")
        texts = when if isinstance(when, list) and when else [when]
        conditions = tuple(self._condition(text, f"{at}.when") for text in texts)
        for_s = self._number(table, "for_s", at, None, lambda v: 0 <= v <= HOUR_S, "0 to 3600")
        name = table.get("name", f"{do} #{number + 1}")
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise self._bad(f"{at}.name", _shown(name), "some text")
        if do == "drain":
            if "percent" in table:
                raise self._bad(f"{at}.percent", _shown(table["percent"]), "none with drain")
            return Action(name, conditions, for_s, do)
        percent = self._number(
            table, "percent", at, None, lambda v: 0 < v <= 100, "above 0, at most 100"
        )
        return Action(name, conditions, for_s, do, percent)

    def _condition(self, text: Any, at: str) -> Condition:
        try:
            return parse_condition(text)
        except ValueError as error:
            raise self._bad(at, _shown(text), str(error)) from None

    def _limits(self, table: Any) -> Limits:
        if not isinstance(table, dict):
            raise self._bad("limits", _shown(table), "a table")
        self._only(table, tuple(Limits.__dataclass_fields__), "limits")
        usual = Limits()
        return Limits(
            self._whole(table, "per_replica_per_hour", usual.per_replica_per_hour, 1),
            self._whole(table, "per_hour", usual.per_hour, 1),
            self._number(
                table, "min_pause_s", "limits", usual.min_pause_s, lambda v: v >= 1, "1 or more"
            ),
            self._whole(table, "min_answering", usual.min_answering, 0),
        )

    def _log(self, found: Mapping[str, Any]) -> str:
        log = found.get("log", DEFAULT_LOG)
        if not isinstance(log, str) or not log.strip() or "\0" in log:
            raise self._bad("log", _shown(log), "the path of a file")
        return log

    def _whole(self, table: Mapping[str, Any], name: str, usual: int, least: int) -> int:
        value = self._number(
            table, name, "limits", usual,
            lambda v: v >= least and v == int(v), f"a whole number from {least}",
        )  # fmt: skip
        return int(value)

    def _number(
        self,
        table: Mapping[str, Any],
        name: str,
        at: str,
        usual: float | None,
        allowed: Callable[[float], bool],
        expected: str,
    ) -> float:
        value = table.get(name, usual)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not allowed(value):
            raise self._bad(f"{at}.{name}", _shown(value), expected)
        return float(value)

    def _only(self, table: Mapping[str, Any], names: tuple[str, ...], at: str) -> None:
        for name in table:
            if name not in names:
                place = f"{at}.{name}" if at else name
                raise self._bad(place, "not a key that is known", ", ".join(names))

    def _bad(self, field: str, found: str, expected: str) -> BadInput:
        return BadInput(found, file=self._path, field=field, expected=expected)


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]

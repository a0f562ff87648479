"""Instant queries to a server that speaks Prometheus' HTTP API, and what its answers may be.

Holds one question and its answer, and who may ask. What is asked, and what the series mean, is
`promql`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx2

from ullage.errors import BadUsage, Unreachable
from ullage.telemetry.bounded import fetch
from ullage.telemetry.wire import UNAUTHORIZED, in_words

Series = tuple[Mapping[str, str], str]
"""(labels, `__name__` among them, value as it was written), of one instant."""


class QueryFailed(Unreachable):
    """The server did not answer, or with an error; `str()` says which."""


class TooLarge(QueryFailed):
    """The answer has more bytes than are read."""


@dataclass(frozen=True, slots=True)
class Access:
    """What is sent with every question so that the server answers. Empty: nothing."""

    bearer_token: str = field(default="", repr=False)
    user: str = ""
    password: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def sent(self) -> dict[str, str]:
        """The headers. A token goes before a user."""
        found = dict(self.headers)
        if self.bearer_token:
            found["Authorization"] = f"Bearer {self.bearer_token}"
        return found

    def basic(self) -> tuple[str, str] | None:
        return (self.user, self.password) if self.user and not self.bearer_token else None


def access_from(environ: Mapping[str, str], headers: Sequence[str] = (), token: str = "") -> Access:
    """Access by the environment (ULLAGE_PROMETHEUS_TOKEN, or _USER and _PASSWORD) and by
    `NAME: VALUE` headers, such as `X-Scope-OrgID: team`. A `token` goes before the environment's.

    Raises:
        BadUsage: a header without a colon, or with characters that no header may have.
    """
    named: dict[str, str] = {}
    for header in headers:
        name, colon, value = header.partition(":")
        fine = header.isascii() and header.isprintable() and name.strip() and " " not in name
        if not colon or not fine:
            raise BadUsage(
                repr(header[:40]), field="--prometheus-header", expected="'NAME: VALUE' in ASCII"
            )
        named[name.strip()] = value.strip()
    token = token or environ.get("ULLAGE_PROMETHEUS_TOKEN", "").strip()
    user = environ.get("ULLAGE_PROMETHEUS_USER", "")
    password = environ.get("ULLAGE_PROMETHEUS_PASSWORD", "")
    for name, value in (("TOKEN", token), ("USER", user), ("PASSWORD", password)):
        if not value.isprintable():
            raise BadUsage(
                "holds a control character", field=f"ULLAGE_PROMETHEUS_{name}", expected="one line"
            )
    return Access(token, user, password, named)


def base_of(url: str) -> tuple[str, tuple[str, str] | None]:
    """(the URL without a user and without `/` at its end, (user, password) where it has them).

    Raises:
        BadUsage: not an http or https URL with a host.
    """
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise BadUsage(
            repr(url[:80]), field="--prometheus", expected="http://HOST:PORT, with a path or not"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    base = f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}"
    if parts.username is None:
        return base, None
    return base, (unquote(parts.username), unquote(parts.password or ""))


class PrometheusApi:
    """One server, by its base URL. Inside one event loop; `aclose()` when done."""

    def __init__(self, url: str, access: Access, *, within_s: float = 10.0) -> None:
        self.base, login = base_of(url)
        self._within_s = within_s
        self._client = httpx2.AsyncClient(
            base_url=self.base,
            headers=access.sent(),
            auth=access.basic() or (None if access.bearer_token else login),
            timeout=within_s,
            trust_env=False,
        )
        self._method = "POST"

    async def aclose(self) -> None:
        await self._client.aclose()

    async def query(
        self, promql: str, time_s: float | None
    ) -> tuple[tuple[Series, ...], tuple[str, ...]]:
        """(series, warnings) of an instant query at `time_s`, or now by the server's clock.

        Raises:
            QueryFailed: no answer, an error, or something that is not Prometheus' answer.
            TooLarge: more bytes than are read.
        """
        asked = {"query": promql, **({} if time_s is None else {"time": f"{time_s:.3f}"})}
        status, body = await self._ask(asked)
        if status == 405 and self._method == "POST":
            # Some proxies let only GET through.
            self._method = "GET"
            status, body = await self._ask(asked)
        return answer_of(status, body)

    async def _ask(self, asked: Mapping[str, str]) -> tuple[int, bytes]:
        send = {"data": asked} if self._method == "POST" else {"params": asked}
        try:
            return await fetch(
                self._client, self._method, "/api/v1/query", within_s=self._within_s, **send
            )
        except httpx2.RemoteProtocolError as error:
            if "larger than" in str(error):
                raise TooLarge(str(error)) from error
            raise QueryFailed(self._told(error)) from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise QueryFailed(self._told(error)) from error

    def _told(self, error: Exception) -> str:
        return _line(in_words(error, urlsplit(self.base).hostname or ""))


def answer_of(status: int, body: bytes) -> tuple[tuple[Series, ...], tuple[str, ...]]:
    """(series, warnings) of the answer to an instant query. Raises QueryFailed."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if status in UNAUTHORIZED:
        raise QueryFailed(
            f"HTTP {status}: it wants another login (--api-key, or ULLAGE_PROMETHEUS_USER and "
            "ULLAGE_PROMETHEUS_PASSWORD)"
        )
    if not isinstance(document, dict):
        raise QueryFailed(f"HTTP {status}, not an answer of Prometheus' API")
    if document.get("status") != "success":
        reason = str(document.get("error") or document.get("errorType") or "no reason given")
        raise QueryFailed(f"HTTP {status}: {_line(reason)}")
    data = document.get("data")
    rows = data.get("result") if isinstance(data, dict) else None
    if not isinstance(data, dict) or data.get("resultType") != "vector" or type(rows) is not list:
        raise QueryFailed("the answer is not a vector")
    warnings = document.get("warnings")
    told = tuple(_line(str(w)) for w in warnings) if isinstance(warnings, list) else ()
    return tuple(series for row in rows if (series := _series(row)) is not None), told


def _series(row: Any) -> Series | None:
    """None of a native histogram, or of what is not a series."""
    try:
        labels, (_, text) = row["metric"], row["value"]
        float(text)
    except (KeyError, TypeError, ValueError):
        return None
    return (labels, text) if isinstance(labels, dict) and isinstance(text, str) else None


def _line(text: str) -> str:
    """One printable line of at most 200 characters."""
    return "".join(c if c.isprintable() else " " for c in text[:200]).strip()

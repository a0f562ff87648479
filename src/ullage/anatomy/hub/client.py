"""Requests to a hub: small files whole, others by ranges; each failure becomes one sentence.

Holds HTTP only: time limits, redirects (the token never follows to another host), statuses, and
the check that an answer is what was asked for. Which files are asked for is `files.py`.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import IO, Any
from urllib.parse import quote, urlsplit

from ullage import __version__
from ullage.anatomy.hub.ids import HubId
from ullage.errors import BadUsage, UllageError, Unreachable

SILENCE_S = 10.0
"""How long a server may say nothing."""
REQUEST_S = 60.0
"""How long one answer may take in all."""
MAX_LISTING_BYTES = 16 << 20
_PIECE_BYTES = 1 << 16
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class HubClient:
    """One repository at one revision of one hub."""

    def __init__(self, endpoint: str, wanted: HubId) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadUsage(
                repr(endpoint[:100]), file="HF_ENDPOINT", expected="an address such as https://HOST"
            )
        self.endpoint = endpoint
        self.wanted = wanted
        self.revision = wanted.revision
        self.token = _token(parts.scheme == "https" or parts.hostname in _LOOPBACK)
        self.opener = urllib.request.build_opener(_Redirects)

    def list_files(self) -> list[str]:
        """Names of the repository's files. Later requests ask for the commit that was listed."""
        repository = f"{self.wanted.organisation}/{self.wanted.name}"
        url = f"{self.endpoint}/api/models/{repository}/revision/{quote(self.revision, safe='')}"
        with self._open(url) as answer:
            raw = self._read(answer, MAX_LISTING_BYTES + 1)
        if len(raw) > MAX_LISTING_BYTES:
            raise self._strange(f"lists more than {MAX_LISTING_BYTES} bytes of file names")
        try:
            listing = json.loads(raw)
            names = [str(item["rfilename"]) for item in listing["siblings"]]
            commit = listing.get("sha")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._strange("answers with something that is no list of files") from None
        if isinstance(commit, str) and commit.isalnum() and len(commit) <= 64:
            self.revision = commit
        return names

    def whole(self, file: str, max_bytes: int) -> bytes:
        """A small file. Raises BadUsage when it has more than `max_bytes`."""
        with self._open(self._url(file)) as answer:
            raw = self._read(answer, max_bytes + 1)
        if len(raw) > max_bytes:
            raise BadUsage(f"{file} has more than {max_bytes} bytes", file=str(self.wanted))
        return raw

    def part(self, file: str, first: int, last: int) -> tuple[bytes, int]:
        """Bytes `first` to `last` (both included, less at the file's end) and the file's size."""
        with self._open(self._url(file), {"Range": f"bytes={first}-{last}"}) as answer:
            begin, end, total = self._content_range(answer, file)
            if begin != first or end != min(last, total - 1) or end < begin:
                raise self._strange(
                    f"answers bytes {begin}-{end} of {total} of {file} when asked for "
                    f"{first}-{last}"
                )
            raw = self._read(answer, end - begin + 1)
        if len(raw) != end - begin + 1:
            raise self._strange(f"breaks off {file} after {len(raw)} of {end - begin + 1} bytes")
        return raw, total

    def _url(self, file: str) -> str:
        repository = f"{self.wanted.organisation}/{self.wanted.name}"
        return f"{self.endpoint}/{repository}/resolve/{quote(self.revision, safe='')}/{quote(file)}"

    def _content_range(self, answer: Any, file: str) -> tuple[int, int, int]:
        if answer.status != 206:
            raise self._strange(f"sends all of {file} when asked for a part")
        text = str(answer.headers.get("Content-Range", ""))
        unit, _, rest = text.partition(" ")
        place, _, total = rest.partition("/")
        begin, _, end = place.partition("-")
        if unit != "bytes" or not all(n.isascii() and n.isdecimal() for n in (begin, end, total)):
            raise self._strange(f"answers with the range {text[:60]!r}")
        if max(map(len, (begin, end, total))) > 18:
            raise self._strange(f"answers with the range {text[:60]!r}")
        return int(begin), int(end), int(total)

    def _open(self, url: str, headers: dict[str, str] | None = None) -> IO[bytes]:
        # The scheme was checked; redirects are by _Redirects.
        request = urllib.request.Request(url, headers=headers or {})  # noqa: S310
        request.add_header("User-Agent", f"ullage/{__version__}")
        request.add_header("Accept-Encoding", "identity")
        if self.token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        try:
            answer: IO[bytes] = self.opener.open(request, timeout=SILENCE_S)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error.code, error.headers.get("X-Error-Code", "")) from None
        except (OSError, HTTPException, ValueError) as error:
            raise self._unreachable(error) from None
        return answer

    def _read(self, answer: IO[bytes], max_bytes: int) -> bytes:
        """At most `max_bytes`, in at most REQUEST_S seconds."""
        deadline = time.monotonic() + REQUEST_S
        pieces, left = [], max_bytes
        try:
            while left > 0:
                # read1: what has come, so that a server that drips does not outwait the deadline.
                piece = answer.read1(min(left, _PIECE_BYTES))  # type: ignore[attr-defined]
                if not piece:
                    break
                pieces.append(piece)
                left -= len(piece)
                if time.monotonic() > deadline:
                    raise self._strange(f"takes more than {REQUEST_S:.0f} s for one answer")
        except (OSError, HTTPException, ValueError) as error:
            raise self._unreachable(error) from None
        return b"".join(pieces)

    def _unreachable(self, error: Exception) -> Unreachable:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            said: object = f"no answer within {SILENCE_S:.0f} s"
        else:
            said = getattr(reason, "strerror", None) or reason or type(error).__name__
        text = "".join(c if c.isprintable() else " " for c in str(said))[:200]
        return Unreachable(f"{self.wanted}: the hub at {self.endpoint} cannot be asked: {text}")

    def _strange(self, what: str) -> Unreachable:
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in what)
        return Unreachable(f"{self.wanted}: the hub at {self.endpoint} {text}")

    def _refusal(self, status: int, code: str) -> UllageError:
        """The sentence for a status that is no success."""
        place, revision = str(self.wanted), self.wanted.revision
        token = "HF_TOKEN is not accepted for it" if self.token else "HF_TOKEN is not set"
        if code == "GatedRepo":
            return BadUsage(
                f"the model is gated and {token}",
                file=place,
                expected="an account that accepted its conditions, its token in HF_TOKEN",
            )
        if code == "RevisionNotFound":
            return BadUsage(f"the hub has the model, but no revision {revision!r}", file=place)
        if status == 401:
            return BadUsage(f"the hub has no such model, or it is private and {token}", file=place)
        if status == 403:
            return BadUsage(f"the hub forbids access, and {token}", file=place)
        if status in (404, 410):
            return BadUsage(f"the hub has no such model, file or revision {revision!r}", file=place)
        if status == 429:
            return Unreachable(f"{place}: the hub asks to come back later (429, too many requests)")
        return Unreachable(f"{place}: the hub at {self.endpoint} answers with status {status}")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http(s) only, never from https down, and keeps the token at home."""

    max_redirections = 5

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if after.scheme not in ("http", "https") or (before.scheme, after.scheme) == (
            "https",
            "http",
        ):
            raise urllib.error.URLError(f"it redirects to {after.scheme}, which is not followed")
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        same = (before.scheme, before.netloc) == (after.scheme, after.netloc)
        token = req.unredirected_hdrs.get("Authorization")
        if made is not None and same and token is not None:
            made.add_unredirected_header("Authorization", token)
        return made


def _token(is_private_channel: bool) -> str | None:
    """HF_TOKEN; never sent in the clear to another machine."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        return None
    if not token.isascii() or not token.isprintable():
        raise BadUsage("holds characters that no token has", file="HF_TOKEN")
    return token if is_private_channel else None

"""The API key, checked as vLLM checks it: any of several bearer tokens, in constant time.

vLLM's own check looks only at paths that begin with /v1, /v2, /inference or /cohere.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable

OWN_KEY = "ULLAGE_VLLM_API_KEY"
"""The plugin's key, for a vLLM that was given none."""


def expected(args_api_key: Iterable[str] | None, vllm_api_key: str | None) -> tuple[str, ...]:
    """--api-key before VLLM_API_KEY, as in vLLM; the plugin's own only where vLLM has none."""
    listed = list(args_api_key) if args_api_key else [vllm_api_key]
    given = tuple(key for key in listed if key)
    own = os.environ.get(OWN_KEY)
    return given or ((own,) if own else ())


class Keys:
    """Bearer tokens that are let in. With none, nobody is."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._digests = [_digest(token.encode()) for token in tokens]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, authorization: bytes | None) -> bool:
        """Whether a header `Authorization` holds one of the tokens."""
        scheme, _, token = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest, admitted = _digest(token), False
        for known in self._digests:
            admitted |= hmac.compare_digest(digest, known)
        return admitted


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()

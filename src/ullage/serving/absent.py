"""Routes that another kind of model would serve: they answer with a sentence, not just a 404."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ullage.serving.http import NotFound

GENERATING = ("/v1/completions", "/v1/chat/completions")
EMBEDDING = ("/v1/embeddings",)


def not_served(paths: Sequence[str], sentence: str) -> list[Route]:
    """Routes that refuse a POST to `paths` with `sentence`."""

    async def refuse(_: Request) -> Response:
        raise NotFound(sentence)

    return [Route(path, refuse, methods=["POST"]) for path in paths]

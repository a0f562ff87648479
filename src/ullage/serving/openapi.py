"""The OpenAPI document of a server, made of the table of operations that the server is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus

from ullage import __version__
from ullage.serving import schemas
from ullage.serving.fields import Json, schema_of
from ullage.serving.operations import Operation

ERROR = {"$ref": "#/components/schemas/Error"}
RETRY = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "required": True}}


def document(operations: Iterable[Operation], with_key: bool) -> Json:
    """The document; `with_key`: guarded routes ask for a bearer token."""
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.verb.lower()] = _describe(
            operation, with_key and operation.guarded
        )
    components: Json = {"schemas": {"Error": schemas.ERROR}}
    if with_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ullage", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _describe(operation: Operation, guarded: bool) -> Json:
    described: Json = {"operationId": operation.name, "summary": operation.text}
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
        for name in _path_names(operation.path)
    ]
    parameters += [
        {
            "name": field.name,
            "in": "query",
            "required": field.required,
            "schema": field.kind.schema(),
            "description": field.text,
        }
        for field in operation.query
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of(operation.body)}},
        }
    described["responses"] = _responses(operation, guarded)
    if guarded:
        described["security"] = [{"key": []}]
    return described


def _responses(operation: Operation, guarded: bool) -> Json:
    responses = {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "content": _content(media),
        }
        for status, media in operation.answers.items()
    }
    for status in (*operation.refusals, *((401,) if guarded else ())):
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": ERROR}},
            **({"headers": RETRY} if status in (429, 503) else {}),
        }
    return responses


def _content(media: Mapping[str, Json]) -> Json:
    return {name: {"schema": schema} for name, schema in media.items()}


def _path_names(path: str) -> list[str]:
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]

"""What a server says of itself beside its metrics: which routes to ask, and answers → Told.

Holds the table of routes and the readers of their JSON. Asking is `scrape.py`'s. Every answer is
untrusted: what has another shape than expected tells nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from ullage.telemetry.reading import Told

MODELS = "/v1/models"
MAX_SETTINGS = 256
MAX_CHARS = 200
MAX_MODELS = 1000
# The last word of a setting's name that gives away what must not be shown
# (SGLang answers its own key among its arguments).
SECRET_WORDS = ("key", "keyfile", "password", "secret", "token", "credentials")

# Dialect → routes that tell, in the order of their weight: of what two tell, the first counts.
# vLLM 0.32 entrypoints/serve/instrumentator/basic.py; SGLang 0.5 srt/entrypoints/http_server.py;
# TGI 3 /info; llama.cpp tools/server/README.md /props. Triton's metrics have a port of their own,
# where nothing else is answered.
ROUTES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("/version", MODELS),
    "ullage": ("/version", MODELS),
    "sglang": (MODELS, "/get_server_info"),
    "trtllm": ("/version", MODELS),
    "tgi": ("/info", MODELS),
    "lmdeploy": (MODELS,),
    "llamacpp": (MODELS, "/props"),
    "triton": (),
    "": ("/version", MODELS),
}

Json = Mapping[str, object]


def routes_of(engine: str) -> tuple[str, ...]:
    """What to ask a server whose page is of this dialect ("": of none that is known)."""
    return ROUTES.get(engine, ROUTES[""])


def told_by(route: str, body: bytes) -> Told:
    """What the answer of this route tells."""
    answer = _object(body)
    return READERS[route](answer) if answer is not None else Told()


def joined(tellings: Iterable[Told]) -> Told:
    """All that is told; of what two tell, the first counts."""
    return reduce(_joined, tellings, Told())


def _joined(one: Told, two: Told) -> Told:
    """`one`, and of what it does not say what `two` says."""
    return replace(
        one,
        engine=one.engine or two.engine,
        version=one.version or two.version,
        models=one.models or two.models,
        adapters=one.adapters or two.adapters,
        max_model_len=one.max_model_len if one.max_model_len is not None else two.max_model_len,
        settings={**two.settings, **one.settings},
        started_s=one.started_s if one.started_s is not None else two.started_s,
        refused=one.refused or two.refused,
    )


# --- one route each -------------------------------------------------------------------------------


def _version(answer: Json) -> Told:
    return Told(version=_text(answer.get("version")))


def _models(answer: Json) -> Told:
    """OpenAI's list. vLLM and SGLang list adapters too, each with the model that it belongs to as
    `parent`, and say in `root` where the weights are from."""
    entries = [entry for entry in _list(answer.get("data")) if isinstance(entry, dict)]
    bases = [entry for entry in entries if not _text(entry.get("parent"))]
    lengths = {_count(entry.get("max_model_len")) for entry in bases} - {None}
    roots = {root for entry in bases if (root := _text(entry.get("root")))}
    return Told(
        models=_names(bases),
        adapters=_names([entry for entry in entries if _text(entry.get("parent"))]),
        max_model_len=lengths.pop() if len(lengths) == 1 else None,
        settings={"model_root": ", ".join(sorted(roots))[:MAX_CHARS]} if roots else {},
    )


def _sglang(answer: Json) -> Told:
    """Its arguments, flat; what changes as it runs lies deeper (`internal_states`)."""
    return Told(
        engine="sglang" if "model_path" in answer and "mem_fraction_static" in answer else "",
        version=_text(answer.get("version")),
        models=tuple(filter(None, (_text(answer.get("served_model_name")),))),
        max_model_len=_count(answer.get("context_length")),
        settings=_settings(answer, but=("version",)),
    )


def _tgi(answer: Json) -> Told:
    return Told(
        engine="tgi" if "model_id" in answer and "max_concurrent_requests" in answer else "",
        version=_text(answer.get("version")),
        models=tuple(filter(None, (_text(answer.get("model_id")),))),
        max_model_len=_count(answer.get("max_total_tokens")),
        settings=_settings(answer, but=("version", "model_id")),
    )


def _llamacpp(answer: Json) -> Told:
    defaults = answer.get("default_generation_settings")
    each = defaults.get("n_ctx") if isinstance(defaults, dict) else None
    wanted = ("total_slots", "model_path", "model_alias", "modalities")
    return Told(
        engine="llamacpp" if "total_slots" in answer and "build_info" in answer else "",
        version=_text(answer.get("build_info")),
        max_model_len=_count(each),
        settings=_settings({name: answer[name] for name in wanted if name in answer}),
    )


READERS: Mapping[str, Callable[[Json], Told]] = {
    "/version": _version,
    MODELS: _models,
    "/get_server_info": _sglang,
    "/info": _tgi,
    "/props": _llamacpp,
}
assert {route for routes in ROUTES.values() for route in routes} == set(READERS)


# --- untrusted JSON -------------------------------------------------------------------------------


def _object(body: bytes) -> Json | None:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _list(value: object) -> Sequence[object]:
    return value[:MAX_MODELS] if isinstance(value, list) else ()


def _names(entries: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
    return tuple(sorted({name for entry in entries if (name := _text(entry.get("id")))}))


def _text(value: object) -> str:
    """A short text without what a terminal or a log would act on; "" of anything else."""
    if not isinstance(value, str):
        return ""
    return "".join(char for char in value[:MAX_CHARS] if char.isprintable())


def _count(value: object) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 < value < 1 << 53 else None  # type: ignore[operator,return-value]


def _settings(answer: Json, *, but: Sequence[str] = ()) -> dict[str, str]:
    """Scalars by name, as their JSON; without secrets."""
    found: dict[str, str] = {}
    for given, value in answer.items():
        name = _text(given)
        if name in but or name.rpartition("_")[2].lower() in SECRET_WORDS:
            continue
        if isinstance(value, str):
            found[name] = _text(value)
        elif isinstance(value, bool | int | float):
            found[name] = json.dumps(value)
        if len(found) == MAX_SETTINGS:
            break
    return found

"""JSON Schemas of the answers, written by hand: tests hold the answers to them.

What requests look like is `protocol`; there the parser itself is the source.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def record(required: Json, optional: Json | None = None) -> Json:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def listed(item: Json) -> Json:
    return {"type": "array", "items": item}


def nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
LOGPROB: Json = {"type": "number", "maximum": 0}
FINISH: Json = {"enum": ["stop", "length", None]}

USAGE = record(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": record({"cached_tokens": COUNT}),
    }
)
COMPLETION_LOGPROBS = record(
    {
        "tokens": listed(TEXT),
        "token_logprobs": listed(nullable(LOGPROB)),
        "top_logprobs": listed(nullable({"type": "object", "additionalProperties": LOGPROB})),
        "text_offset": listed(COUNT),
    }
)
_TOKEN: Json = {"token": TEXT, "logprob": LOGPROB, "bytes": listed(COUNT)}
CHAT_LOGPROBS = record(
    {"content": listed(record({**_TOKEN, "top_logprobs": listed(record(_TOKEN))}))}
)


def _answer(kind: str, choice: Json, logprobs: Json) -> Json:
    body = {"index": COUNT, "finish_reason": FINISH, "logprobs": nullable(logprobs), **choice}
    return record(
        {
            "id": TEXT,
            "object": {"const": kind},
            "created": COUNT,
            "model": TEXT,
            "choices": listed(record(body)),
            "usage": USAGE,
        }
    )


COMPLETION = _answer("text_completion", {"text": TEXT}, COMPLETION_LOGPROBS)
CHAT = _answer(
    "chat.completion",
    {"message": record({"role": {"const": "assistant"}, "content": TEXT})},
    CHAT_LOGPROBS,
)
MODEL = record(
    {
        "id": TEXT,
        "object": {"const": "model"},
        "created": COUNT,
        "owned_by": TEXT,
        "root": TEXT,
        "parent": nullable(TEXT),
        "max_model_len": COUNT,
    }
)
MODELS = record({"object": {"const": "list"}, "data": listed(MODEL)})
TOKENS = record(
    {"count": COUNT, "max_model_len": COUNT, "tokens": listed(COUNT)},
    {"token_strs": listed(TEXT)},
)
PROMPT = record({"prompt": TEXT})
VERSION = record({"version": TEXT})
DRAINING = record({"draining": {"const": True}, "in_flight": COUNT})
NUMBER: Json = {"type": "number"}
_SHARE: Json = nullable({"type": "number", "minimum": 0})
_SPREAD = nullable(record({"mean": NUMBER, "p5": NUMBER, "p95": NUMBER}))
_USUAL = nullable(record({"mean": NUMBER, "spread": NUMBER}))
_MEANS = (
    *("entropy_normalized", "sink_mass", "band_mass", "band_entropy_nats", "effective_context"),
)
_LAYERS = listed(
    record(
        {
            "layer": COUNT,
            "heads": listed(
                record(
                    {
                        "head": COUNT,
                        "rows": COUNT,
                        "not_finite": COUNT,
                        "entropy_nats": _SPREAD,
                        "max_score": nullable(NUMBER),
                        **dict.fromkeys(_MEANS, _SHARE),
                    },
                    {
                        "usual_entropy_normalized": _USUAL,
                        "outside": nullable({"type": "boolean"}),
                    },
                )
            ),
        }
    )
)
ENTROPY = record(
    {
        "model": TEXT,
        "source": TEXT,
        "every": COUNT,
        "steps": COUNT,
        "rows": COUNT,
        "rows_kept": COUNT,
        "seconds": {"type": "number", "minimum": 0},
        "failure": nullable(TEXT),
        "baseline": nullable({"type": "object"}),
        "findings": nullable(listed({"type": "object"})),
        "layers": _LAYERS,
    }
)
ATTENTION = record(
    {"model": TEXT, "source": TEXT, "tokens": COUNT, "rows": COUNT, "layers": _LAYERS},
    {
        "weights": record(
            {
                "layer": COUNT,
                "head": COUNT,
                "row": COUNT,
                "first_key": COUNT,
                "positions": listed(COUNT),
                "values": listed({"type": "number", "minimum": 0, "maximum": 1}),
                "left_out": COUNT,
                "left_out_mass": {"type": "number", "minimum": 0},
            }
        )
    },
)
ERROR = record(
    {"error": record({"message": TEXT, "type": TEXT, "param": nullable(TEXT), "code": COUNT})}
)

"""The heads of classifiers: what each kind of model has above its last layer, per task.

Data only. A `sequence` head judges a whole text (rewards too), a `token` head each token, a
`question` head the span of an answer. Facts: the modules of transformers 5.24.
"""

from __future__ import annotations

from ullage.anatomy.naming.row import Extra, Scope


def linear(
    scope: Scope, path: str, rows: int | str, columns: int | str, role: str, *, bias: bool = True
) -> tuple[Extra, ...]:
    """A matrix of a family's own, with its bias (whose size is 0 where the matrix's is)."""
    weight = Extra(scope, f"{path}.weight", (rows, columns), role, linear=True)
    return (weight, Extra(scope, f"{path}.bias", (rows,), "bias")) if bias else (weight,)


def layer_norm(scope: Scope, path: str, width: int | str) -> tuple[Extra, ...]:
    """A layer norm of a family's own."""
    return tuple(Extra(scope, f"{path}.{leaf}", (width,)) for leaf in ("weight", "bias"))


def _labels(scope: Scope, path: str, *, bias: bool = True) -> tuple[Extra, ...]:
    return linear(scope, path, "L", "H", "lm_head", bias=bias)


def _square(scope: Scope, path: str) -> tuple[Extra, ...]:
    return linear(scope, path, "H", "H", "lm_head")


_SCORE = _labels("sequence", "score", bias=False)
_TOKENS = _labels("token", "classifier")
_SPAN = _labels("question", "qa_outputs")
_REWARD = (*_square("reward", "score.0"), *_labels("reward", "score.2"))

SCORED = (*_SCORE, *_labels("token", "score"), *_SPAN, *_REWARD)
SCORED_CLASSIFIED = (*_SCORE, *_TOKENS, *_SPAN)
# InternLM-2's reward models (their own code, and vLLM 0.32 internlm2.py)
VALUED = (*SCORED_CLASSIFIED, *_labels("reward", "v_head", bias=False))
CLASSIFIED = (*_labels("sequence", "classifier"), *_TOKENS, *_SPAN)
POOLED = (*_square("sequence", "{root}.pooler.dense"), *CLASSIFIED)
POOLED_APART = (*_square("sequence", "pooler.dense"), *CLASSIFIED)
POOLED_PLAIN = (*_square("sequence", "{root}.pooler"), *CLASSIFIED)
PREPARED = (*_square("sequence", "pre_classifier"), *CLASSIFIED)
DENSE = (
    *_square("sequence", "classifier.dense"),
    *_labels("sequence", "classifier.out_proj"),
    *_TOKENS,
    *_SPAN,
)
MODERN = tuple(
    extra
    for scope in ("sequence", "token", "question")
    for extra in (
        Extra(scope, "head.dense.weight", ("H", "H"), "lm_head", linear=True),
        Extra(scope, "head.norm.weight", ("H",)),
        *_labels(scope, "classifier"),
    )
)
MODERN_PLAIN = (*MODERN[:2], *_labels("sequence", "classifier", bias=False))
BART_CLASSIFIED = (
    *_square("sequence", "classification_head.dense"),
    *_labels("sequence", "classification_head.out_proj"),
    *_SPAN,
)
# the encoder alone, and a decoder beside it, with a projection of their own
PROJECTED = (*_labels("sequence", "score.out_proj"), *_labels("token", "score.out_proj"))
EUROBERT = (*_square("sequence", "dense"), *_labels("sequence", "classifier"), *_TOKENS)
ESMC = (*DENSE[:4], *_labels("token", "score"))
BIG_BIRD = (
    *_square("sequence", "{root}.pooler"),
    *_square("token", "{root}.pooler"),
    *DENSE[:6],
    *linear("question", "qa_classifier.intermediate.dense", "intermediate_size", "H", "lm_head"),
    *linear("question", "qa_classifier.output.dense", "H", "intermediate_size", "lm_head"),
    *layer_norm("question", "qa_classifier.output.LayerNorm", "H"),
    *_labels("question", "qa_classifier.qa_outputs"),
)
NONE: tuple[Extra, ...] = ()

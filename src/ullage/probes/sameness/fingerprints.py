"""Taking a model's fingerprint: its files, its values and answers on the embedded engine, a server.

Holds the taking. What cannot be taken of a model is said in `absent`, with the reason.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage import __version__
from ullage.anatomy import Model, load
from ullage.deep.scan import scan_checkpoint
from ullage.engine.engine import Engine
from ullage.engine.linear import FloatLinear
from ullage.engine.model.decoder import Decoder
from ullage.engine.model.weights import Weights
from ullage.engine.options import EngineOptions
from ullage.engine.possible import require_possible
from ullage.engine.text.loading import load_tokenizer
from ullage.errors import BadInput, BadUsage, UllageError
from ullage.probes.rope.rope import fingerprint as rope_mark
from ullage.probes.rope.rope import turnings
from ullage.probes.sameness.answers import embedded_answers, metrics_info, served_answers
from ullage.probes.sameness.distances import noise_of
from ullage.probes.sameness.marks import AnswerMark, Fingerprint, Noise, StoredMark, ValueMark
from ullage.probes.sameness.values import streamed_marks, value_marks

if TYPE_CHECKING:
    from ullage.anatomy.spec import ModelSpec

MEMORY_MARGIN = 1.2
"""Weights, one matrix more while it is read, and the prompts' activations."""
MAX_MODEL_LEN = 512
"""Longer than any prompt. Which angles longrope takes depends on it: see `_limit`."""
# The precisions that the embedded engine has beside float32, the finer one first.
ROUGHER: Mapping[str, Mapping[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16", "enforce_eager": True},
    "int8": {"quantization": "int8", "enforce_eager": True},
}
_REMOTE = (
    ("stored", "weights' bytes cannot be seen from outside a server"),
    ("values", "weights cannot be seen from outside a server"),
    ("noise", "a server answers in one precision, and does not say what another would change"),
    ("settings", "a server does not show its configuration"),
    ("tokenizer", "a server does not show its tokenizer"),
)


def of_model(
    path: Path, lora: str | None = None, *, answers: bool = True, noise: bool = True
) -> Fingerprint:
    """The fingerprint of what lies at `path`; `noise` runs it in every precision.

    With an adapter only the answers are taken, which are the base's and the adapter's together.
    Raises BadInput where it is no model, or where the adapter cannot be applied.
    """
    model = load(path)
    spec = model.anatomy.spec
    absent: dict[str, str] = {}
    values: tuple[ValueMark, ...] = ()
    marks: tuple[AnswerMark, ...] = ()
    moved: tuple[Noise, ...] = ()
    try:
        values, marks = _run(model, lora, answers, absent)
        if marks and noise:
            moved = _noise(path, lora, marks, absent)
    except BadInput as error:
        if lora is not None:
            raise
        for part in ("values", "answers", "noise"):
            absent[part] = f"the embedded engine does not run it: {error}"
    stored = _stored(model, absent)
    if lora is not None:
        stored, values = (), ()
        absent["stored"] = absent["values"] = "an adapter is not merged: its answers are compared"
    return Fingerprint(
        source=str(path) if lora is None else f"{path} with {lora}",
        by=f"ullage {__version__}, embedded engine",
        precision="float32",
        stored=stored,
        values=values,
        answers=marks,
        noise=moved,
        settings=settings_of(spec),
        rope=rope_of(spec, absent),
        tokenizer=_tokenizer(model, absent),
        absent=tuple(absent.items()),
    )


def of_server(url: str, model: str | None, api_key: str | None) -> Fingerprint:
    """What a server tells: answers, and the rope fingerprint where it is ullage's own."""
    name, answers = served_answers(url, model, api_key)
    info = metrics_info(url, api_key)
    absent = dict(_REMOTE)
    rope = info.get("rope_fingerprint") or None
    if rope is None:
        absent["rope"] = "this server does not export the fingerprint of its angles"
    return Fingerprint(
        source=f"{url}#{name}",
        by="served by ullage" if info else "served",
        precision=_served_precision(info),
        stored=(),
        values=(),
        answers=answers,
        noise=(),
        settings=(),
        rope=rope,
        tokenizer=None,
        absent=tuple(absent.items()),
    )


def _served_precision(info: Mapping[str, str]) -> str | None:
    """What ullage's own server computes in; no other one tells."""
    if not info:
        return None
    if info.get("quantization", "none") != "none":
        return info["quantization"]
    return "bfloat16" if info.get("dtype") == "bfloat16" else "float32"


# --- on the embedded engine ----------------------------------------------------------------------


def _run(
    model: Model, lora: str | None, answers: bool, absent: dict[str, str]
) -> tuple[tuple[ValueMark, ...], tuple[AnswerMark, ...]]:
    spec = model.anatomy.spec
    options = EngineOptions(enforce_eager=True, **_options(spec, lora))
    limit = require_possible(spec, options)
    short = memory_short(model)
    if lora is not None and short is not None:
        raise BadUsage(short, file=model.files.path)
    if not answers or short is not None:
        absent["answers"] = absent["noise"] = short or "not asked for"
        return streamed_marks(spec, Weights(model)), ()
    decoder = Decoder(spec, Weights(model), FloatLinear, limit)
    values = value_marks(decoder)
    try:
        engine = Engine(decoder, load_tokenizer(model), options, limit)
        return values, _answers(engine, lora)
    except BadInput as error:
        if lora is not None:
            raise
        absent["answers"] = absent["noise"] = str(error)
        return values, ()


def memory_short(model: Model) -> str | None:
    """Why the weights in float32 would not fit beside what else runs here; None: they do."""
    index = model.checkpoint
    needed = 4 * sum(tensor.num_elements for tensor in index.tensors) if index is not None else 0
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:  # not Linux: the system decides
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
    free = int(found[1]) << 10 if found else needed * 2
    if needed * MEMORY_MARGIN <= free:
        return None
    return f"its weights take {needed / 1e9:.1f} GB in float32, {free / 1e9:.1f} GB are free here"


def _noise(
    path: Path, lora: str | None, exact: tuple[AnswerMark, ...], absent: dict[str, str]
) -> tuple[Noise, ...]:
    """The same weights read again, in each of the rougher precisions."""
    found = []
    for precision, settings in ROUGHER.items():
        try:
            options = EngineOptions(**settings, **_options(load(path).anatomy.spec, lora))
            noise = noise_of(precision, exact, _answers(Engine.load(path, options), lora))
        except UllageError as error:
            absent[f"noise.{precision}"] = str(error)
            continue
        if noise is not None:
            found.append(noise)
    return tuple(found)


def _options(spec: ModelSpec, lora: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"max_model_len": _limit(spec)}
    if lora is not None:
        found |= {"enable_lora": True, "max_lora_rank": 1 << 16}
    return found


def _answers(engine: Engine, lora: str | None) -> tuple[AnswerMark, ...]:
    return embedded_answers(engine, None if lora is None else engine.load_lora("probed", lora))


def _limit(spec: ModelSpec) -> int:
    """Enough for the prompts; under longrope above the original length, as servers start it."""
    lengths = [MAX_MODEL_LEN]
    for turning in turnings(spec, MAX_MODEL_LEN) if spec.positions.kind == "rope" else ():
        original = turning.rope.original_max_positions
        if turning.rope.scaling == "longrope" and original is not None:
            lengths.append(original + 1)
    return min(max(lengths), spec.max_positions or MAX_MODEL_LEN)


# --- without running it --------------------------------------------------------------------------


def _stored(model: Model, absent: dict[str, str]) -> tuple[StoredMark, ...]:
    index = model.checkpoint
    if index is None or not index.has_headers:
        absent["stored"] = "there are no safetensors or GGUF files"
        return ()
    scan = scan_checkpoint(index)
    return tuple(
        StoredMark(one.name, one.dtype, one.shape, f"{one.sum64:016x}") for one in scan.tensors
    )


def rope_of(spec: ModelSpec, absent: dict[str, str]) -> str | None:
    """The fingerprint of the angles at the model's own longest length, or why there is none."""
    if spec.max_positions <= 0:
        absent["rope"] = "the configuration names no longest length"
        return None
    try:
        found = turnings(spec, spec.max_positions)
    except BadInput as error:
        absent["rope"] = str(error)
        return None
    if not found:
        absent["rope"] = f"no layer rotates ({spec.positions.kind} positions)"
        return None
    return rope_mark(spec, found)


def _tokenizer(model: Model, absent: dict[str, str]) -> str | None:
    """The sha256 of tokenizer.json, which lies beside the weights."""
    file = model.files.path / "tokenizer.json"
    if not file.is_file():
        absent["tokenizer"] = "there is no tokenizer.json"
        return None
    return hashlib.sha256(file.read_bytes()).hexdigest()


def settings_of(spec: ModelSpec) -> tuple[tuple[str, str], ...]:
    """What is computed with the weights, flat: the same in a GGUF file and in safetensors."""
    first = spec.layers[0] if spec.layers else None
    found: dict[str, object] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "norm": f"{spec.norm.kind} {spec.norm.place}",
        "norm_eps": f"{spec.norm.eps:.6g}",
        "embedding_scale": f"{spec.embedding_scale:.6g}",
        "logit_soft_cap": spec.logit_soft_cap,
        "positions": spec.positions.kind,
        **{f"numerics.{key}": value for key, value in spec.numerics},
    }
    if first is not None:
        mixer, mlp = asdict(first.mixer), asdict(first.feed_forward)
        for key in ("num_heads", "num_kv_heads", "head_dim", "scale", "soft_cap", "sinks"):
            if key in mixer:
                found[key] = mixer[key]
        found["activation"] = mlp.get("activation")
        found["windows"] = sorted(
            {str(getattr(layer.mixer, "window", None)) for layer in spec.layers}
        )
    return tuple((key, str(value)) for key, value in found.items())

"""What rules look at: `Subject`, a model together with where it is to run.

Holds the data and the small readings that many rules share (which layers have which mixer, where a
key stands, where a flag came from). It judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ullage.anatomy import Model
from ullage.anatomy.spec import (
    Anatomy,
    Attention,
    CompressedAttention,
    Dense,
    Experts,
    FeedForward,
    LatentAttention,
    Mixer,
    ModelSpec,
    Parallel,
    Rope,
)
from ullage.costs.deployment import Deployment
from ullage.costs.hardware import Gpus
from ullage.findings.finding import Evidence

if TYPE_CHECKING:
    from ullage.anatomy.compare import Comparison
    from ullage.anatomy.files.pickles import PickleImports
    from ullage.deep.readings import DeepScan
    from ullage.launch.launch import Launch
    from ullage.launch.overridden import Replaced
    from ullage.planning.ledger import Ledger

NESTED_TEXT_KEYS = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model",
    "thinker_config",
)
"""Where multi-modal configurations keep the part that describes the language model."""

KNOWN_ENGINE = ("vllm", "0.32")
"""The engine and version whose decisions the engine rules reproduce."""

Layers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, its deployment and what is known of the hardware. Make one with `subject_of`.

    `text` is the part of `config` that describes the language model and `prefix` its dotted place.
    `mixers` and `feed_forwards` pair each distinct part with the layers that have it.
    `comparison` sets the headers against the spec, None without headers.
    `brackets` are the same subject with the specs that bracket what is not understood, empty when
    everything is: a verdict only stands when it holds for them too.
    `deep` is what reading every tensor found, None unless asked for. `pickles` list what pickled
    files of the directory would import, None where they were not looked at.
    `launch` is the command of a deployment file, None without one. `replaced` says which keys of
    the configuration it replaces (they are replaced in `model`), None where it replaces none.
    `gpus` None: no hardware was named. `ledger` None: none could be made; `no_ledger` says why.
    """

    model: Model
    deployment: Deployment
    gpus: Gpus | None
    ledger: Ledger | None
    no_ledger: str
    text: Mapping[str, object]
    prefix: str
    mixers: tuple[tuple[Mixer, Layers], ...]
    feed_forwards: tuple[tuple[FeedForward | Dense, Layers], ...]
    comparison: Comparison | None = None
    brackets: tuple[Subject, ...] = ()
    deep: DeepScan | None = None
    pickles: tuple[PickleImports, ...] | None = None
    launch: Launch | None = None
    replaced: Replaced | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.model.anatomy.spec

    @property
    def config(self) -> Mapping[str, object]:
        """The configuration as written; empty when the model came from headers alone."""
        return self.model.files.config or {}

    @property
    def tensor_parallel(self) -> int:
        return self.deployment.parallel.tensor

    @property
    def served_length(self) -> int | None:
        """Tokens that the engine is asked to serve, or what the model allows; None if unknown."""
        wanted = self.deployment.max_model_len
        if wanted is not None and wanted > 0:
            return wanted
        return self.spec.max_positions or None

    def length_source(self) -> str:
        """Where `served_length` is said: the flag, else the configuration."""
        if self.deployment.max_model_len is not None and self.deployment.max_model_len > 0:
            return "flag: --max-model-len"
        return self.where("max_position_embeddings")

    def missing_engine_rules(self) -> tuple[str, ...]:
        """Empty when the engine's decisions are known here, else the name of what is missing."""
        name, version = KNOWN_ENGINE
        engine = self.deployment
        if engine.engine == name and _same_version(engine.engine_version, version):
            return ()
        return (f"rules of {engine.engine} {engine.engine_version} (known: {name} {version})",)

    def where(self, *keys: str) -> str:
        """The source of a value read from the first of `keys` that the configuration has.

        A key that it lacks has the source that the anatomy noted for it, a default as a rule. The
        configuration of a GGUF file was made from its header, whose keys are the source then.
        """
        if self.model.files.kind == "gguf":
            return self._noted(*keys) or "header: of the GGUF file"
        for key in keys:
            if key in self.text:
                return self._said(f"{self.prefix}{key}")
        for key in keys:
            if key in self.config:
                return self._said(key)
        return self._noted(*keys) or "spec: derived from the configuration"

    def _said(self, key: str) -> str:
        """The configuration's key, or the flag that replaced it."""
        if self.replaced is not None and key in self.replaced.written:
            return f"flag: {self.replaced.flag}"
        return f"config: {key}"

    def _noted(self, *keys: str) -> str | None:
        for source in self.model.anatomy.sources:
            if source.field.rsplit(".", 1)[-1] in keys:
                return source.source
        return None

    def attentions(self) -> Iterator[tuple[Attention, Layers]]:
        """Distinct softmax attentions, those beside another mixer included."""
        for mixer, layers in self.mixers:
            if isinstance(mixer, Attention):
                yield mixer, layers
            elif isinstance(mixer, Parallel):
                for part in mixer.parts:
                    if isinstance(part, Attention):
                        yield part, layers

    def ropes(self) -> Iterator[tuple[Rope, Mixer, Layers]]:
        """Distinct rotary embeddings with the mixer that uses them."""
        for attention, layers in self.attentions():
            if attention.rope is not None:
                yield attention.rope, attention, layers
        for mixer, layers in self.mixers:
            if isinstance(mixer, LatentAttention | CompressedAttention) and mixer.rope is not None:
                yield mixer.rope, mixer, layers

    def experts(self) -> Iterator[tuple[Experts, Layers]]:
        for part, layers in self.feed_forwards:
            if isinstance(part, Experts):
                yield part, layers

    def fact(
        self, name: str, value: int | float | str | bool | None, *keys: str, unit: str = ""
    ) -> Evidence:
        """A fact of the model; its source is the first of `keys` (or `name`) in the config."""
        where = self.where(*(keys or (name,)))
        if value is None and not where.startswith("config"):
            where = "config: absent"
        return Evidence(name, value, unit, where)

    def parallel_fact(self) -> Evidence:
        return self.flag("--tensor-parallel-size", self.tensor_parallel, "ranks")

    def platform_fact(self) -> Evidence:
        return self.flag("--platform", self.deployment.platform)

    def flag(self, flag: str, value: int | float | str | bool | None, unit: str = "") -> Evidence:
        """A fact of the deployment, named by its flag."""
        name = flag.lstrip("-").replace("-", "_")
        if name in _PARALLEL_FIELDS:
            default = getattr(_DEFAULT.parallel, _PARALLEL_FIELDS[name])
        else:
            default = getattr(_DEFAULT, name)
        return Evidence(name, value, unit, f"{'default' if value == default else 'flag'}: {flag}")


_DEFAULT = Deployment()
_PARALLEL_FIELDS = {
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "data_parallel_size": "data",
    "enable_expert_parallel": "expert",
}


def subject_of(
    model: Model,
    deployment: Deployment = _DEFAULT,
    *,
    gpus: Gpus | None = None,
    ledger: Ledger | None = None,
    no_ledger: str = "",
    deep: DeepScan | None = None,
    pickles: tuple[PickleImports, ...] | None = None,
    launch: Launch | None = None,
    replaced: Replaced | None = None,
) -> Subject:
    """The Subject of one model on one deployment."""
    anatomy, checkpoint = model.anatomy, model.checkpoint
    comparison = None
    if checkpoint is not None and checkpoint.has_headers:
        from ullage.anatomy.compare import compare  # costs start-up, and needs headers

        comparison = compare(anatomy.spec, checkpoint)
    brackets = tuple(
        _with_spec(replace(model, anatomy=Anatomy(spec, spec, spec, anatomy.sources)), deployment,
                   gpus, ledger, no_ledger, comparison)
        for spec in (anatomy.low, anatomy.high)
        if spec is not anatomy.spec
    )  # fmt: skip
    subject = _with_spec(model, deployment, gpus, ledger, no_ledger, comparison)
    if deep is not None or pickles is not None or launch is not None:
        subject, *others = (
            replace(each, deep=deep, pickles=pickles, launch=launch, replaced=replaced)
            for each in (subject, *brackets)
        )
        brackets = tuple(others)
    return replace(subject, brackets=brackets) if brackets else subject


def _with_spec(
    model: Model,
    deployment: Deployment,
    gpus: Gpus | None,
    ledger: Ledger | None,
    no_ledger: str,
    comparison: Comparison | None,
) -> Subject:
    text, prefix = _text_part(model.files.config or {})
    mixers: dict[Mixer, list[int]] = {}
    feed_forwards: dict[FeedForward | Dense, list[int]] = {}
    for layer in model.anatomy.spec.layers:
        mixers.setdefault(layer.mixer, []).append(layer.index)
        feed_forwards.setdefault(layer.feed_forward, []).append(layer.index)
        if layer.parallel_dense is not None:
            feed_forwards.setdefault(layer.parallel_dense, []).append(layer.index)
    return Subject(
        model,
        deployment,
        gpus,
        ledger,
        no_ledger,
        text,
        prefix,
        tuple((mixer, tuple(layers)) for mixer, layers in mixers.items()),
        tuple((part, tuple(layers)) for part, layers in feed_forwards.items()),
        comparison,
    )


def _text_part(config: Mapping[str, object]) -> tuple[Mapping[str, object], str]:
    prefix = ""
    for _ in range(3):
        for key in NESTED_TEXT_KEYS:
            inner = config.get(key)
            if isinstance(inner, Mapping):
                config, prefix = inner, f"{prefix}{key}."
                break
        else:
            break
    return config, prefix


def _same_version(given: str, known: str) -> bool:
    return given == known or given.startswith(f"{known}.")


def span(layers: Layers) -> str:
    """Layers in words: `layer 3`, or `12 layers (0, 4, 8, …)`."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    shown = ", ".join(str(i) for i in layers[:3])
    return f"{len(layers)} layers ({shown}{', …' if len(layers) > 3 else ''})"


def at_rank(size: int, ranks: int) -> int | None:
    """`size` cut into `ranks` equal parts, or None when it cannot be."""
    return size // ranks if size % ranks == 0 else None


def unit_count(number: int, singular: str) -> str:
    return f"{number:,} {singular}" if number == 1 else f"{number:,} {singular}s"

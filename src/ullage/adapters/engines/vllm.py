"""What vLLM 0.32 makes of an adapter, in its own order: `judge`.

Holds the order, the limits and what stops the server at its start, each with its place in vLLM's
source. Where modules are put is `vllm_slots.py`; the served tree is `served.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ullage.adapters.base import BaseTree
from ullage.adapters.effect import meant_scale
from ullage.adapters.engines.peft_tree import record_of
from ullage.adapters.engines.served import (
    Architecture,
    ServedTree,
    architecture,
    served_tree,
)
from ullage.adapters.engines.slots import slot_bytes
from ullage.adapters.engines.table import release
from ullage.adapters.engines.vllm_config import Refused, check_configuration
from ullage.adapters.engines.vllm_keys import expected_names, read_keys
from ullage.adapters.engines.vllm_slots import (
    BY_LIBRARY,
    applied_modules,
    key_of,
    targeted,
    validate,
    why_not_wrapped,
)
from ullage.adapters.verdict import EngineAnswer, ModuleVerdict, ServeOptions, State
from ullage.anatomy.adapters.adapter import Adapter, AdapterConfig, AdapterModule, Matrix
from ullage.errors import BadUsage

SOURCE = (
    "vllm 0.32.0: lora/worker_manager.py, lora/peft_helper.py, lora/lora_model.py, lora/utils.py, "
    "lora/model_manager.py, lora/layers/"
)
VERIFIED = ("0.32",)
"""Versions that `make test-vllm` asks."""

# config/lora.py: MaxLoRARanks and the defaults of LoRAConfig.
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_MAX_LORA_RANK = 16
DEFAULT_MAX_LORAS = 1
# layers/logits_processor.py: the widest head that LoRA is built for.
MAX_HEAD_ROWS = 258048


def judge(adapter: Adapter, tree: BaseTree, options: ServeOptions) -> EngineAnswer:
    """What becomes of every module of `adapter` when vLLM serves it on this base model.

    Raises BadUsage for limits that vLLM itself does not take.
    """
    limits = _limits(options)
    counted = _counted(adapter)
    cost = None
    try:
        found = _architecture(tree)
        served = served_tree(tree, _layout(found, options), pooling=_pools(tree.spec.architecture))
        cost = slot_bytes(
            served, tree.spec, options, limits[0],
            lambda module: why_not_wrapped(module, served, options) is None,
        )  # fmt: skip
        _start(served, tree, options)
        check_configuration(adapter, limits[0])
        load = read_keys(adapter, _as_read(adapter.config, options), served)
        validate(load, served, options)
        modules = applied_modules(counted, load, served, tree, options, limits[0])
    except Refused as refusal:
        message = str(refusal)
        modules = tuple(_refused(module) for _, module in counted)
        return _answer(adapter, tree, options, limits, modules, message=message, cost=cost)
    return _answer(
        adapter, tree, options, limits, modules, cost=cost, supported=expected_names(served)
    )


def _answer(
    adapter: Adapter,
    tree: BaseTree,
    options: ServeOptions,
    limits: tuple[int, int],
    modules: tuple[ModuleVerdict, ...],
    *,
    message: str | None = None,
    cost: int | None = None,
    supported: Iterable[str] = (),
) -> EngineAnswer:
    version = options.version or VERIFIED[-1]
    return EngineAnswer(
        modules=modules,
        basis="verified" if version in VERIFIED and _asked(tree) else "source",
        unsure=_unsure_base(tree) or _unsure(adapter.config, options),
        notes=_notes(options),
        source=SOURCE,
        version=version,
        message=message,
        slot_bytes=cost,
        limits=(("--max-lora-rank", limits[0]), ("--max-loras", limits[1])),
        supported=tuple(sorted(supported)),
    )


def _release(options: ServeOptions) -> tuple[int, int]:
    return release(options.version or VERIFIED[-1]) or (0, 0)


def _as_read(config: AdapterConfig, options: ServeOptions) -> AdapterConfig:
    """The configuration without what an older version does not look at.

    rsLoRA is read since 0.7.0 (vllm#6909, merged in the last days of 2024; vllm#10798 before it).
    """
    return replace(config, use_rslora=False) if _release(options) < (0, 7) else config


def _unsure(config: AdapterConfig, options: ServeOptions) -> str | None:
    """What decides and is not known of an older version: 0.32 reads patterns, since when is not
    known here."""
    patterns = config.rank_pattern or config.alpha_pattern
    if _release(options) < _release(ServeOptions()) and patterns:
        return f"whether vLLM {options.version} reads rank_pattern and alpha_pattern"
    return None


def _unsure_base(tree: BaseTree) -> str | None:
    """A base that only code of its own can run, which vLLM may or may not take (registry.py,
    _try_resolve_transformers): not its own class, nor one of the transformers library."""
    name = tree.spec.architecture
    if _record(tree) is not None or any(record_of(n) for n in (name, _generating(name)) if n):
        return None
    return (
        f"whether vLLM {VERIFIED[-1]} runs {name}, which is no class of its own and none that is "
        "known here of the transformers library"
    )


def _notes(options: ServeOptions) -> tuple[str, ...]:
    if options.version in (None, *VERIFIED):
        return ()
    return (
        f"judged by the rules of vLLM {VERIFIED[-1]} and what is known to differ in "
        f"{options.version}: names of multimodal models may differ too",
    )


def _asked(tree: BaseTree) -> bool:
    """Whether models of this kind run in the tests' vLLM: on a CPU it serves no adapters of
    mixtures of experts ("Old-style modular kernel not supported."), nor kinds not built there."""
    experts = any(m.kind in ("expert", "fused_expert") for m in tree.modules.values())
    found = _record(tree)
    return not experts and found is not None and found.built


def _limits(options: ServeOptions) -> tuple[int, int]:
    rank = options.max_lora_rank if options.max_lora_rank is not None else DEFAULT_MAX_LORA_RANK
    if rank not in MAX_RANKS:
        raise BadUsage(
            str(rank), file="--max-lora-rank",
            expected=f"one of {', '.join(map(str, MAX_RANKS))}, which vLLM takes",
        )  # fmt: skip
    return rank, options.max_loras if options.max_loras is not None else DEFAULT_MAX_LORAS


def _counted(adapter: Adapter) -> list[tuple[int, AdapterModule]]:
    """The adapter's modules with their numbers; copies of the base's weights change nothing."""
    return [
        (number, module)
        for number, module in enumerate(adapter.modules)
        if any(t.key.matrix is not Matrix.BASE for t in module.tensors)
    ]


def _refused(module: AdapterModule) -> ModuleVerdict:
    # The message may name every key: it stands once, in the answer.
    detail = "the engine refuses the adapter"
    return ModuleVerdict(
        key_of(module), module.module, None, meant_scale(module), None, State.REFUSED, detail
    )


# --- when the server starts ----------------------------------------------------------------------


def _architecture(tree: BaseTree) -> Architecture:
    """The base's record. Sequence classifiers are served as their generating class
    (registry.py, _normalize_arch); other unknown classes by way of the transformers library."""
    found = _record(tree)
    if found is not None:
        return found
    # registry.py, _try_resolve_transformers: served with the library's own modules and names.
    return Architecture(
        name=tree.spec.architecture, built=False, supports_lora=True,
        class_name=BY_LIBRARY, embedding_modules=("embed_tokens", "lm_head"),
        skip_prefixes=(), is_3d=True, non_gated=False, tower_lora=False, packed={}, renames=None,
        language_model=None, connector=(), tower=(), supported=(), modules={}, aliases={},
    )  # fmt: skip


def _record(tree: BaseTree) -> Architecture | None:
    name = tree.spec.architecture
    for tried in (name, _generating(name)):
        found = architecture(tried) if tried else None
        if found is not None:
            return found
    return None


def _generating(name: str) -> str | None:
    for ending in ("ForSequenceClassification", "ForTokenClassification", "ForRewardModeling"):
        if name.endswith(ending):
            return name.removesuffix(ending) + "ForCausalLM"
    return f"{name.removesuffix('Model')}ForCausalLM" if name.endswith("Model") else None


def _pools(name: str) -> bool:
    return not name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))


def _layout(found: Architecture, options: ServeOptions) -> Architecture:
    """The layout in which experts' adapters are read. With --enable-mixed-moe-lora-format it is the
    request's, else the model's (utils.py, process_packed_modules_mapping; model_manager.py,
    _convert_3d_to_2d_moe_lora)."""
    if not options.enable_mixed_moe_lora_format or options.is_3d_lora_weight == found.is_3d:
        return found
    each = tuple(f"experts.{{e}}.{name}_proj" for name in ("gate", "down", "up"))
    packed = {"experts": each, **found.packed}
    return replace(found, is_3d=options.is_3d_lora_weight, packed=packed)


def _start(served: ServedTree, tree: BaseTree, options: ServeOptions) -> None:
    found = served.architecture
    if not found.supports_lora:
        # v1/worker/lora_model_runner_mixin.py, load_lora_model
        raise Refused(f"{found.class_name} does not support LoRA yet.")
    head = next((m for m in served.modules.values() if m.kind.kind == "ParallelLMHead"), None)
    wide = tree.spec.vocab_size > MAX_HEAD_ROWS and "lm_head" in found.embedding_modules
    if wide and head is not None and targeted(head, served, options):
        raise Refused(f"When using LoRA, vocab size must be <= {MAX_HEAD_ROWS}")

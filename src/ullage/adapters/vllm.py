"""What vLLM 0.32 makes of an adapter, in its own order: `judge`.

Holds the rules of loading (configuration, names, shapes, scales), each with its place in vLLM's
source. The served module tree is `served.py`; what the slots cost is `slots.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ullage.adapters.adapter import Adapter, AdapterModule, AdapterTensor, Matrix
from ullage.adapters.base import BaseTree
from ullage.adapters.effect import meant_scale
from ullage.adapters.scale import expected_scale
from ullage.adapters.served import (
    Architecture,
    ServedModule,
    ServedTree,
    architecture,
    part_of,
    served_tree,
)
from ullage.adapters.slots import slot_bytes
from ullage.adapters.verdict import EngineAnswer, ModuleVerdict, ServeOptions, State
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
_PREFIX = "base_model.model."
_BASE_WEIGHTS = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
_SAVABLE = ("classifier", "score")
# peft_helper.py, _init_is_supported: inits that leave the base model's weights alone.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


class _Refused(Exception):
    """vLLM refuses; the text is what it prints."""


@dataclass(slots=True)
class _Pair:
    """One entry of vLLM's `loras`: A and B as they were last set, and the scale that it multiplies
    B with. `owner` is the number of the adapter module that set it last."""

    a: AdapterTensor | None = None
    b: AdapterTensor | None = None
    scale: float = 1.0
    owner: int = -1


@dataclass(slots=True)
class _Load:
    """What loading has made so far: pairs by (renamed) module name, names by adapter module."""

    pairs: dict[str, _Pair] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    saved: dict[str, list[AdapterTensor]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)


def judge(adapter: Adapter, tree: BaseTree, options: ServeOptions) -> EngineAnswer:
    """What becomes of every module of `adapter` when vLLM serves it on this base model.

    Raises BadUsage for limits that vLLM itself does not take.
    """
    limits = _limits(options)
    counted = _counted(adapter)
    try:
        found = _architecture(tree)
        served = served_tree(tree, _layout(found, options), pooling=_pools(tree.spec.architecture))
        cost = slot_bytes(
            served, tree.spec, options, limits[0],
            lambda module: _wrapped(module, served, options) is None,
        )  # fmt: skip
        _start(served, tree, options)
        _configuration(adapter, limits[0])
        load = _read(adapter, served)
        _validate(load, served, options)
        modules = _applied(counted, load, served, tree, options, limits[0])
    except _Refused as refusal:
        message = str(refusal)
        modules = tuple(_refused(module, message) for _, module in counted)
        return _answer(tree, options, limits, modules, message=message)
    return _answer(tree, options, limits, modules, cost=cost, supported=_expected(served))


def _answer(
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
        source=SOURCE,
        version=version,
        message=message,
        slot_bytes=cost,
        limits=(("--max-lora-rank", limits[0]), ("--max-loras", limits[1])),
        supported=tuple(sorted(supported)),
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


def _refused(module: AdapterModule, message: str) -> ModuleVerdict:
    return ModuleVerdict(
        key_of(module), module.module, None, meant_scale(module), None, State.REFUSED, message
    )


def key_of(module: AdapterModule) -> str:
    """The key that stands for a module: its A matrix, or its first tensor without one."""
    tensor = module.a if module.a is not None else module.tensors[0]
    return tensor.key.text


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
        class_name="TransformersForCausalLM", embedding_modules=("embed_tokens", "lm_head"),
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
    """With --enable-mixed-moe-lora-format stacked experts are served one by one
    (utils.py, process_packed_modules_mapping)."""
    if not (found.is_3d and options.enable_mixed_moe_lora_format):
        return found
    each = tuple(f"experts.{{e}}.{name}_proj" for name in ("gate", "down", "up"))
    return replace(found, is_3d=False, packed={**found.packed, "experts": each})


def _start(served: ServedTree, tree: BaseTree, options: ServeOptions) -> None:
    found = served.architecture
    if not found.supports_lora:
        # v1/worker/lora_model_runner_mixin.py, load_lora_model
        raise _Refused(f"{found.class_name} does not support LoRA yet.")
    head = next((m for m in served.modules.values() if m.kind.kind == "ParallelLMHead"), None)
    wide = tree.spec.vocab_size > MAX_HEAD_ROWS and "lm_head" in found.embedding_modules
    if wide and head is not None and _targeted(head, served, options):
        raise _Refused(f"When using LoRA, vocab size must be <= {MAX_HEAD_ROWS}")


# --- the adapter's configuration -----------------------------------------------------------------


def _configuration(adapter: Adapter, max_rank: int) -> None:
    """peft_helper.py: from_dict, __post_init__ and validate_legal, in that order."""
    raw = adapter.config.raw or {}
    name = Path(adapter.config.file or "").name
    if name != "adapter_config.json":
        # worker_manager.py turns FileNotFoundError into exceptions.LoRAAdapterNotFoundError.
        raise _Refused(f"Loading lora adapter failed: No adapter found for {_path(adapter)}")
    missing = [f for f in ("r", "lora_alpha", "target_modules") if f not in raw]
    if missing:
        raise _Refused(f"Missing required configuration fields: {_set(missing)}")
    rank, alpha = raw["r"], raw["lora_alpha"]
    if not isinstance(rank, int | float):
        kind = type(rank).__name__
        raise _Refused(f"'<=' not supported between instances of '{kind}' and 'int'")
    if rank <= 0:
        raise _Refused(f"LoRA rank `r` must be a positive integer, got {rank}.")
    ranks = _mapping(raw.get("rank_pattern"))
    for key, value in ranks.items():
        if not isinstance(value, int) or value <= 0:
            raise _Refused(
                f"LoRA rank for `{key}` in `rank_pattern` must be a positive integer, got {value}."
            )
    if not isinstance(alpha, int | float):
        kinds = f"'{type(alpha).__name__}' and '{'float' if raw.get('use_rslora') else 'int'}'"
        raise _Refused(f"unsupported operand type(s) for /: {kinds}")
    errors = _features(raw)
    highest = max([rank, *(value for value in ranks.values() if isinstance(value, int))])
    if highest > max_rank:
        errors.append(f"LoRA rank {highest} is greater than max_lora_rank {max_rank}.")
    if raw.get("bias", "none") != "none":
        errors.append("Adapter bias is not supported.")
    if errors:
        raise _Refused(" ".join(errors))


def _features(raw: Mapping[str, object]) -> list[str]:
    """peft_helper.py, _validate_features."""
    errors = []
    saved = raw.get("modules_to_save") or []
    unsupported = [m for m in saved if m not in _SAVABLE] if isinstance(saved, list) else []
    if unsupported:
        errors.append(
            "vLLM only supports modules_to_save being either None "
            'or ["classifier", "score"] for classification models. '
            f"Unsupported modules_to_save: {unsupported}"
        )
    if raw.get("use_dora"):
        errors.append("vLLM does not yet support DoRA.")
    if raw.get("lora_bias"):
        errors.append("vLLM does not support LoRA bias (lora_bias).")
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        errors.append(
            f"vLLM does not support init_lora_weights={init!r}."
            " Inits such as PiSSA, OLoRA, CorDA and LoftQ modify the base model"
            " weights when PEFT loads the adapter. Convert it to a regular LoRA"
            " adapter with PEFT's path_initial_model_for_weight_conversion, or"
            " set init_lora_weights to true if the served base model already"
            " contains the modified weights."
        )
    for key, message in _UNSUPPORTED:
        if raw.get(key):
            errors.append(message)
    return errors


_UNSUPPORTED = (
    ("alora_invocation_tokens", "vLLM does not support Activated LoRA (aLoRA)."),
    ("layer_replication", "vLLM does not support layer_replication."),
    ("use_bdlora", "vLLM does not support block-diagonal LoRA (BD-LoRA)."),
    ("use_qalora", "vLLM does not support QALoRA."),
)


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _set(names: Iterable[str]) -> str:
    """A set as Python prints it; its order there is chance, here it is the alphabet."""
    return "{" + ", ".join(repr(name) for name in sorted(names)) + "}"


def _path(adapter: Adapter) -> str:
    return str(Path(adapter.path).absolute())


# --- its keys ------------------------------------------------------------------------------------


def _read(adapter: Adapter, served: ServedTree) -> _Load:
    """lora_model.py: from_local_checkpoint (the check of all keys), then from_lora_tensors."""
    names = {Path(file).name for file in adapter.files}
    if not names & {"adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"}:
        raise _Refused(f"{_path(adapter)} doesn't contain tensors")
    owners = {id(t): n for n, module in enumerate(adapter.modules) for t in module.tensors}
    _check_keys(adapter, served)
    load = _Load()
    saved_names = adapter.config.modules_to_save
    for tensor in adapter.tensors:
        text = tensor.key.text
        owner = owners.get(id(tensor), -1)
        if text.endswith(_BASE_WEIGHTS):
            continue
        if _skipped(text, served):
            load.skipped.add(owner)
            continue
        name, is_a = _parse(served.rename(text))
        load.names[owner] = name
        if name in saved_names:
            load.saved.setdefault(name, []).append(tensor)
            continue
        pair = load.pairs.get(name)
        if pair is None:
            scale = expected_scale(adapter.config, _pattern_name(_parse(text)[0]))[1]
            pair = load.pairs[name] = _Pair(scale=1.0 if scale is None else scale)
        elif pair.owner not in (owner, -1):
            load.lost.add(pair.owner)
        pair.owner = owner
        if is_a:
            _vocabulary(tensor, served)
            pair.a = tensor
        else:
            pair.b = tensor
    _saved_modules(load)
    return load


def _check_keys(adapter: Adapter, served: ServedTree) -> None:
    expected = _expected(served)
    templates = {name for name in expected if "{e}" in name}
    saved = adapter.config.modules_to_save
    unexpected = []
    for tensor in adapter.tensors:
        text = tensor.key.text
        if "base_layer" in text or _skipped(text, served):
            continue
        name, _ = _parse(served.rename(text))
        if ".experts" in name:
            suffix = name[name.index(".experts") + 1 :]
            if suffix not in expected and not _expert(suffix, templates, served):
                unexpected.append(name)
        else:
            leaf = name.rpartition(".")[2]
            if leaf not in expected and leaf not in saved:
                unexpected.append(name)
    if unexpected:
        raise _Refused(
            f"While loading {_path(adapter)}, expected target modules in "
            f"{_set(_written_out(expected, served))} but received {unexpected}. "
            "Please verify that the loaded LoRA module is correct"
        )


def _skipped(text: str, served: ServedTree) -> bool:
    """lora_model.py, _should_skip_module."""
    return any(
        f".{prefix}" in text or text.startswith(prefix)
        for prefix in served.architecture.skip_prefixes
    )


def _parse(name: str) -> tuple[str, bool]:
    """lora/utils.py, parse_fine_tuned_lora_name, of a name that is renamed already."""
    start = 2 if name.startswith(_PREFIX) else 0
    parts = name.split(".")
    if parts[-1] in ("weight", "bias") and len(parts) >= 2:
        if parts[-2] in ("lora_A", "lora_B") and parts[-1] == "weight":
            return ".".join(parts[start:-2]), parts[-2] == "lora_A"
        if parts[-2] in _SAVABLE:
            return parts[-2], False
    if parts[-1] in ("lora_embedding_A", "lora_embedding_B"):
        return ".".join(parts[start:-1]), parts[-1] == "lora_embedding_A"
    raise _Refused(f"{name} is unsupported LoRA weight")


def _pattern_name(name: str) -> str:
    """The name that patterns are matched with (peft_helper.py, get_rank_and_scaling)."""
    if name.endswith(".experts.base_layer"):
        return name.removesuffix(".base_layer") + ".gate_up_proj"
    return f"{name}.down_proj" if name.endswith(".experts") else name


def _expected(served: ServedTree) -> set[str]:
    """worker_manager.py, _load_adapter: last path components (experts: from `experts` on)."""
    found = served.architecture
    supported = set(found.embedding_modules)
    for module in served.modules.values():
        if module.suffix == "{i}":  # numbered modules of a tower: their numbers were recorded
            supported |= {name for name in found.supported if name.isdecimal()}
        elif not _is_vocabulary(module):
            supported.add(module.suffix)
    expected: set[str] = set()
    for name in supported:
        expected.update(found.packed.get(name) or (name,))
    if "experts" in supported:
        expected.add("experts")
    return expected


def _is_vocabulary(module: ServedModule) -> bool:
    return module.kind.kind in ("ParallelLMHead", "VocabParallelEmbedding")


def _expert(suffix: str, templates: set[str], served: ServedTree) -> bool:
    parts = suffix.split(".")
    if len(parts) < 3 or not parts[1].isdecimal():
        return False
    template = ".".join((parts[0], "{e}", *parts[2:]))
    return template in templates and int(parts[1]) < _num_experts(served)


def _num_experts(served: ServedTree) -> int:
    return max(
        (
            part.base.num_experts
            for module in served.modules.values()
            for part in module.parts
            if part.base is not None
        ),
        default=0,
    )


def _written_out(names: set[str], served: ServedTree) -> list[str]:
    number = _num_experts(served)
    written: list[str] = []
    for name in names:
        each = range(number) if "{e}" in name else ()
        written += [name.replace("{e}", str(e)) for e in each] or [name]
    return written


def _vocabulary(tensor: AdapterTensor, served: ServedTree) -> None:
    rows = _vocab_size(served)
    if "lora_embedding_A" in tensor.key.text and rows is not None and tensor.shape[1:] != (rows,):
        size = tensor.shape[1] if len(tensor.shape) > 1 else 0
        raise _Refused(
            f"The embedding LoRA size({size}) must be consistent"
            f" with the base model's vocabulary size({rows})."
        )


def _vocab_size(served: ServedTree) -> int | None:
    for module in served.modules.values():
        base = module.parts[0].base
        if base is not None and base.kind == "embedding" and base.role == "embed":
            return base.in_features
    return None


def _saved_modules(load: _Load) -> None:
    for name, tensors in load.saved.items():
        if not any(t.key.text.endswith("weight") for t in tensors):
            raise _Refused(f"Full module {name!r} is missing weight.")
    if len(load.saved) > 1:
        raise _Refused(
            "Only one full classification module is supported per "
            f"adapter, received {sorted(load.saved)}."
        )


# --- what it is put into -------------------------------------------------------------------------


def _validate(load: _Load, served: ServedTree, options: ServeOptions) -> None:
    """model_manager.py: _validate_moe_lora_format, _validate_modules_to_save, _add_adapter."""
    if not (options.enable_mixed_moe_lora_format and options.is_3d_lora_weight):
        for module in served.modules.values():
            pair = load.pairs.get(module.path)
            if module.kind.kind != "MoERunner" or served.architecture.is_3d:
                continue
            if pair is not None and pair.a is not None:
                raise _Refused(
                    "LoRA adapter 1 contains fused 3D MoE weights "
                    f"for {module.path!r}, but the model uses a 2D MoE LoRA "
                    "wrapper. Start the engine with "
                    "enable_mixed_moe_lora_format=True "
                    "(--enable-mixed-moe-lora-format) and set "
                    "is_3d_lora_weight=True on the LoRA request."
                )
    for name in load.saved:
        if not served.pooling:
            raise _Refused(
                f"Cannot load full module {name!r}: the model does "
                "not expose a unique ClassificationHeadWithLoRA."
            )
    for pair in load.pairs.values():
        if pair.b is None and pair.scale != 1:
            # lora_weights.py, optimize: the scale is folded into a B that is not there.
            raise _Refused("unsupported operand type(s) for *=: 'NoneType' and 'float'")
    if not load.pairs and not load.saved:
        raise _Refused("StopIteration")  # model_manager.py: the first of no LoRA at all


def _wrapped(module: ServedModule, served: ServedTree, options: ServeOptions) -> str | None:
    """Why vLLM puts no LoRA layer round a module, None when it does
    (model_manager.py, _create_lora_modules)."""
    found = served.architecture
    if _is_vocabulary(module) and module.suffix not in found.embedding_modules:
        return f"{found.class_name} takes no adapters of its {module.suffix}"
    if not _targeted(module, served, options):
        return f"--lora-target-modules leaves {module.suffix} out"
    part = part_of(module.path, found)
    if part is None:
        return "it belongs to no part of the model that adapters may change"
    if part != "language" and not (options.enable_tower_connector_lora and found.tower_lora):
        if not found.tower_lora:
            return f"{found.class_name} takes adapters of its language model only"
        return f"adapters of the {part} need --enable-tower-connector-lora"
    if found.non_gated and module.path.endswith("mixer.gate"):
        return "the router of a mixture without gates takes no adapter"
    if module.kind.wrapper is None and module.kind.kind != "ParallelLMHead":
        return f"no LoRA layer is written for its kind of module ({module.kind.kind})"
    return None


def _kept(module: ServedModule, served: ServedTree, options: ServeOptions) -> str | None:
    """Why a wrapped module is not used: the mixture that holds it too was wrapped before, so that
    its own name for it still means the module without LoRA (model_manager.py,
    _create_lora_modules sets the second name on the wrapper; seen on a running server)."""
    owner = served.second_owner(module.path)
    if owner is None or owner.kind.kind != "MoERunner" or _wrapped(owner, served, options):
        return None
    return "the mixture keeps its router as it was before the adapter's layer was put round it"


def _targeted(module: ServedModule, served: ServedTree, options: ServeOptions) -> bool:
    """lora/utils.py, is_in_target_modules."""
    if options.lora_target_modules is None:
        return True
    targets = set(options.lora_target_modules)
    if module.suffix in targets or module.path in targets:
        return True
    packed = served.architecture.packed
    if any(child in targets for child in packed.get(module.suffix, ())):
        return True
    return any(module.suffix in children and p in targets for p, children in packed.items())


def _applied(
    counted: list[tuple[int, AdapterModule]],
    load: _Load,
    served: ServedTree,
    tree: BaseTree,
    options: ServeOptions,
    max_rank: int,
) -> tuple[ModuleVerdict, ...]:
    _experts_complete(load, served)
    verdicts = []
    for number, module in counted:
        name = load.names.get(number)
        key = key_of(module)
        if number in load.skipped or name is None:
            detail = "vLLM skips modules of this part when it loads adapters"
            verdicts.append(_verdict(key, module, None, State.IGNORED, detail))
            continue
        if name in load.saved:
            verdicts.append(_verdict(key, module, name, State.APPLIED, ""))
            continue
        found = served.find(name)
        if found is None:
            verdicts.append(_verdict(key, module, None, State.UNMAPPED, _unmapped(name, tree)))
            continue
        where, part = found
        why = _wrapped(where, served, options) or _kept(where, served, options)
        if why is not None:
            verdicts.append(_verdict(key, module, where.path, State.IGNORED, why))
        elif number in load.lost:
            detail = f"another module of the adapter is loaded into {name} after it"
            verdicts.append(_verdict(key, module, where.path, State.DOUBLED, detail))
        else:
            verdicts.append(_put(key, module, load.pairs[name], where, part, served, max_rank))
    return tuple(verdicts)


def _verdict(
    key: str, module: AdapterModule, target: str | None, state: State, detail: str,
    applied: float | None = None,
) -> ModuleVerdict:  # fmt: skip
    meant = meant_scale(module)
    return ModuleVerdict(key, module.module, target, meant, applied, state, detail)


def _unmapped(name: str, tree: BaseTree) -> str:
    match = tree.find(name)
    if match is None:
        return f"the served model has no module {name}"
    return f"the served model has no module {name}; it means the base's {match.module.path}"


def _experts_complete(load: _Load, served: ServedTree) -> None:
    """lora_weights.py, pack_moe: all experts or none; the stacked layout: both parts or none."""
    for module in served.modules.values():
        if module.kind.kind != "MoERunner":
            continue
        if served.architecture.is_3d:
            present = [part.name in load.pairs for part in module.parts]
        else:
            number = _num_experts(served)
            present = [
                part.name.replace("{e}", str(e)) in load.pairs
                for part in module.parts
                for e in range(number)
            ]
        if any(present) and not all(present):
            raise _Refused("AssertionError")


def _put(
    key: str,
    module: AdapterModule,
    pair: _Pair,
    where: ServedModule,
    part: int,
    served: ServedTree,
    max_rank: int,
) -> ModuleVerdict:
    """What set_lora makes of a pair: its tensors are copied into the slot's corner."""
    if pair.a is None or pair.b is None:
        if not where.packed:
            raise _Refused("AssertionError")
        lacking = "A" if pair.a is None else "B"
        detail = f"its {lacking} matrix is missing, so that the slot stays empty"
        return _verdict(key, module, where.path, State.IGNORED, detail)
    base = where.parts[part].base
    if base is not None:
        experts = (
            base.num_experts if where.path.endswith("experts") and served.architecture.is_3d else 1
        )
        state, detail = _shapes(
            pair.a.shape, pair.b.shape, base.in_features, base.out_features, max_rank, experts,
            embedding=base.kind == "embedding",
        )  # fmt: skip
        if state is not State.APPLIED:
            return _verdict(key, module, where.path, state, detail, pair.scale)
    meant = meant_scale(module)
    if meant is None or _close(meant, pair.scale):
        return _verdict(key, module, where.path, State.APPLIED, "", pair.scale)
    detail = f"applied at {pair.scale:g} where training meant {meant:g}"
    return _verdict(key, module, where.path, State.WRONG_SCALE, detail, pair.scale)


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * max(abs(one), abs(other))


def _shapes(
    a: tuple[int, ...],
    b: tuple[int, ...],
    in_features: int,
    out_features: int,
    max_rank: int,
    experts: int,
    *,
    embedding: bool,
) -> tuple[State, str]:
    """A [rank, in] and B [out, rank] against the slot: larger is an error of torch's, smaller is
    padded with zeros (lora/layers/base_linear.py and the others, set_lora)."""
    if len(a) != 2 or len(b) != 2:
        _copied(a, (max_rank, in_features))
        _copied(b, (out_features, max_rank))
        raise _Refused("IndexError")
    a_rank, b_rank = a[0] // experts, b[1] // experts
    slots = [((a_rank, a[1]), (max_rank, in_features)), ((b[0], b_rank), (out_features, max_rank))]
    if embedding:
        slots[0] = ((a[1], a_rank), (in_features, max_rank))
    for given, slot in slots:
        _copied(given, slot)
    wrong = []
    if a[1] != in_features:
        wrong.append(f"A has {a[1]} columns where the module takes {in_features} inputs")
    if b[0] != out_features:
        wrong.append(f"B has {b[0]} rows where the module gives {out_features} outputs")
    if a_rank != b_rank:
        wrong.append(f"A has rank {a_rank} and B {b_rank}")
    if wrong:
        return State.SHAPE_MISMATCH, "; ".join(wrong) + ": the rest is taken for zero"
    return State.APPLIED, ""


def _copied(given: tuple[int, ...], slot: tuple[int, int]) -> None:
    """torch's copy_ into the slot's corner, as large as the first two sizes of what is copied;
    sizes are compared from the last dimension on."""
    corner = [min(size, most) for size, most in zip(given, slot, strict=False)]
    number = max(len(given), len(corner))
    for back in range(1, number + 1):
        here = corner[-back] if back <= len(corner) else 1
        size = given[-back] if back <= len(given) else 1
        if size not in (here, 1):
            raise _Refused(
                f"The size of tensor a ({here}) must match the size of tensor b "
                f"({size}) at non-singleton dimension {number - back}"
            )

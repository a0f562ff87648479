"""Where vLLM 0.32 puts the modules of an adapter: which modules it wraps, what fills their slots.

Holds the steps after the keys are read (model_manager.py, layers/), each with its place in vLLM's
source. Configuration is `vllm_config.py`, keys are `vllm_keys.py`, the whole is `vllm.py`.
"""

from __future__ import annotations

from ullage.adapters.base import BaseTree
from ullage.adapters.effect import meant_scale
from ullage.adapters.engines.served import Architecture, ServedModule, ServedTree, part_of
from ullage.adapters.engines.vllm_config import Refused
from ullage.adapters.engines.vllm_keys import Load, Pair, is_vocabulary, num_experts_of
from ullage.adapters.verdict import ModuleVerdict, ServeOptions, State
from ullage.anatomy.adapters.adapter import AdapterModule

# layers/column_parallel_linear.py: matrices of three parts and more have no fully sharded layer.
_NEVER_SHARDED = "MergedColumnParallelLinearVariableSlice"
# Classes that no model was built of for the record, whose mixtures are deepseek_v2.py's or
# exaone_moe.py's and give their gate to the runner (gate=self.gate).
_GATE_IN_RUNNER = (
    "DeepseekForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "ExaoneMoEForCausalLM",
)  # fmt: skip
# The class that models run by which vLLM has no class of its own for.
BY_LIBRARY = "TransformersForCausalLM"


def key_of(module: AdapterModule) -> str:
    """The key that stands for a module: its A matrix, or its first tensor without one."""
    tensor = module.a if module.a is not None else module.tensors[0]
    return tensor.key.text


def validate(load: Load, served: ServedTree, options: ServeOptions) -> None:
    """model_manager.py: _validate_moe_lora_format, _validate_modules_to_save, _add_adapter."""
    if not (options.enable_mixed_moe_lora_format and options.is_3d_lora_weight):
        for module in served.modules.values():
            pair = load.pairs.get(module.path)
            if module.kind.kind != "MoERunner" or served.architecture.is_3d:
                continue
            if pair is not None and pair.a is not None:
                raise Refused(
                    "LoRA adapter 1 contains fused 3D MoE weights "
                    f"for {module.path!r}, but the model uses a 2D MoE LoRA "
                    "wrapper. Start the engine with "
                    "enable_mixed_moe_lora_format=True "
                    "(--enable-mixed-moe-lora-format) and set "
                    "is_3d_lora_weight=True on the LoRA request."
                )
    for name in load.saved:
        if not served.pooling:
            raise Refused(
                f"Cannot load full module {name!r}: the model does "
                "not expose a unique ClassificationHeadWithLoRA."
            )
    for pair in load.pairs.values():
        if pair.b is None and pair.scale != 1:
            # lora_weights.py, optimize: the scale is folded into a B that is not there.
            raise Refused("unsupported operand type(s) for *=: 'NoneType' and 'float'")
    if not load.pairs and not load.saved:
        raise Refused("StopIteration")  # model_manager.py: the first of no LoRA at all
    first = _first_left(load, served, options)
    if first is not None and first.a is None:
        raise Refused("AssertionError")  # _create_merged_loras_inplace looks at that one alone


def _first_left(load: Load, served: ServedTree, options: ServeOptions) -> Pair | None:
    """The first pair of the file that is no part of a packed module that is served: the parts are
    taken out of the dictionary, and what was packed of them comes last."""
    for name, pair in load.pairs.items():
        found = served.find(name)
        if (
            found is None
            or not found[0].packed
            or why_not_wrapped(found[0], served, options) is not None
        ):
            return pair
    return None


def why_not_wrapped(module: ServedModule, served: ServedTree, options: ServeOptions) -> str | None:
    """Why vLLM puts no LoRA layer round a module, None when it does
    (model_manager.py, _create_lora_modules)."""
    found = served.architecture
    if is_vocabulary(module) and module.suffix not in found.embedding_modules:
        return f"{found.class_name} takes no adapters of its {module.suffix}"
    if not targeted(module, served, options):
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
    if options.fully_sharded_loras and module.kind.wrapper == _NEVER_SHARDED:
        return "no LoRA layer is written for its kind of module with --fully-sharded-loras"
    if module.kind.wrapper is None and module.kind.kind != "ParallelLMHead":
        return f"no LoRA layer is written for its kind of module ({module.kind.kind})"
    return None


def _kept(module: ServedModule, served: ServedTree, options: ServeOptions) -> str | None:
    """Why a wrapped module is not used: the mixture that holds it too was wrapped before, so that
    its own name for it still means the module without LoRA (model_manager.py,
    _create_lora_modules sets the second name on the wrapper; seen on a running server)."""
    if module.suffix == "kv_b_proj" and _absorbs(served.architecture):
        return "latent attention keeps kv_b_proj as it was before an adapter's layer was put on"
    if module.suffix == "conv1d":
        # layers/mamba/: causal_conv1d is given conv1d.weight.
        return "the mixer reads the weight of conv1d and never calls it"
    owner = served.second_owner(module.path)
    if served.architecture.name in _GATE_IN_RUNNER and module.suffix == "gate":
        owner = served.modules.get(module.path.removesuffix("gate") + "experts")
        if owner is None or not targeted(owner, served, options):
            return None
    elif owner is None or owner.kind.kind != "MoERunner" or why_not_wrapped(owner, served, options):
        return None
    return "the mixture keeps its router as it was before the adapter's layer was put round it"


def _absorbs(found: Architecture) -> bool:
    """Whether the class runs latent attention with weights taken from kv_b_proj.

    layers/attention/mla_attention.py: decoding multiplies by W_UK and W_UV, split off when the
    weights were loaded, and prefill calls the module that `impl` was given; `impl` is no
    nn.Module, so that no LoRA layer is put there. Where no model was built its class is one of
    DeepSeek's kin; a model that runs through the transformers library absorbs nothing.
    """
    if not found.built:
        return found.class_name != BY_LIBRARY
    return any(alias.endswith(".mla_attn.kv_b_proj") for alias in found.aliases)


def targeted(module: ServedModule, served: ServedTree, options: ServeOptions) -> bool:
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


def applied_modules(
    counted: list[tuple[int, AdapterModule]],
    load: Load,
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
        why = why_not_wrapped(where, served, options) or _kept(where, served, options)
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


def _experts_complete(load: Load, served: ServedTree) -> None:
    """lora_weights.py, pack_moe: all experts or none; the stacked layout: both parts or none."""
    for module in served.modules.values():
        if module.kind.kind != "MoERunner":
            continue
        if served.architecture.is_3d:
            present = [part.name in load.pairs for part in module.parts]
        else:
            number = num_experts_of(served)
            present = [
                part.name.replace("{e}", str(e)) in load.pairs
                for part in module.parts
                for e in range(number)
            ]
        if any(present) and not all(present):
            raise Refused("AssertionError")


def _put(
    key: str,
    module: AdapterModule,
    pair: Pair,
    where: ServedModule,
    part: int,
    served: ServedTree,
    max_rank: int,
) -> ModuleVerdict:
    """What set_lora makes of a pair: its tensors are copied into the slot's corner."""
    if pair.a is None or pair.b is None:
        if not where.packed:
            raise Refused("AssertionError")
        lacking = "A" if pair.a is None else "B"
        detail = f"its {lacking} matrix is missing, so that the slot stays empty"
        return _verdict(key, module, where.path, State.IGNORED, detail)
    if 0 in (*pair.a.shape, *pair.b.shape):
        return _verdict(key, module, where.path, State.IGNORED, "its matrices hold no values")
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
        raise Refused("IndexError")
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
            raise Refused(
                f"The size of tensor a ({here}) must match the size of tensor b "
                f"({size}) at non-singleton dimension {number - back}"
            )

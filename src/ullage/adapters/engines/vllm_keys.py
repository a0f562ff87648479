"""Where vLLM 0.32 puts an adapter's tensors: `read_keys`.

Holds lora/lora_model.py's check of all keys and its grouping into pairs, by renamed module name.
What becomes of the pairs is `vllm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ullage.adapters.engines.served import ServedModule, ServedTree
from ullage.adapters.engines.vllm_config import SAVABLE, Refused, absolute, set_text
from ullage.anatomy.adapters.adapter import Adapter, AdapterConfig, AdapterTensor
from ullage.anatomy.adapters.scale import expected_scale

_PREFIX = "base_model.model."
_BASE_WEIGHTS = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")


@dataclass(slots=True)
class Pair:
    """One entry of vLLM's `loras`: A and B as they were last set, and the scale that it multiplies
    B with. `owner` is the number of the adapter module that set it last."""

    a: AdapterTensor | None = None
    b: AdapterTensor | None = None
    scale: float = 1.0
    owner: int = -1


@dataclass(slots=True)
class Load:
    """What loading has made so far: pairs by (renamed) module name, names by adapter module."""

    pairs: dict[str, Pair] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    saved: dict[str, list[AdapterTensor]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)


def read_keys(adapter: Adapter, config: AdapterConfig, served: ServedTree) -> Load:
    """lora_model.py: from_local_checkpoint (the check of all keys), then from_lora_tensors.

    `config` is the adapter's as this version reads it (older ones know fewer keys).
    """
    names = {Path(file).name for file in adapter.files}
    if not names & {"adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"}:
        raise Refused(f"{absolute(adapter)} doesn't contain tensors")
    owners = {id(t): n for n, module in enumerate(adapter.modules) for t in module.tensors}
    _check_keys(adapter, served)
    load = Load()
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
            scale = expected_scale(config, _pattern_name(_parse(text)[0]))[1]
            pair = load.pairs[name] = Pair(scale=1.0 if scale is None else scale)
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
    expected = expected_names(served)
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
        raise Refused(
            f"While loading {absolute(adapter)}, expected target modules in "
            f"{set_text(_written_out(expected, served))} but received {unexpected}. "
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
        if parts[-2] in SAVABLE:
            return parts[-2], False
    if parts[-1] in ("lora_embedding_A", "lora_embedding_B"):
        return ".".join(parts[start:-1]), parts[-1] == "lora_embedding_A"
    raise Refused(f"{name} is unsupported LoRA weight")


def _pattern_name(name: str) -> str:
    """The name that patterns are matched with (peft_helper.py, get_rank_and_scaling)."""
    if name.endswith(".experts.base_layer"):
        return name.removesuffix(".base_layer") + ".gate_up_proj"
    return f"{name}.down_proj" if name.endswith(".experts") else name


def expected_names(served: ServedTree) -> set[str]:
    """worker_manager.py, _load_adapter: last path components (experts: from `experts` on)."""
    found = served.architecture
    supported = set(found.embedding_modules)
    for module in served.modules.values():
        if module.suffix == "{i}":  # numbered modules of a tower: their numbers were recorded
            supported |= {name for name in found.supported if name.isdecimal()}
        elif not is_vocabulary(module):
            supported.add(module.suffix)
    expected: set[str] = set()
    for name in supported:
        expected.update(found.packed.get(name) or (name,))
    if "experts" in supported:
        expected.add("experts")
    return expected


def is_vocabulary(module: ServedModule) -> bool:
    return module.kind.kind in ("ParallelLMHead", "VocabParallelEmbedding")


def _expert(suffix: str, templates: set[str], served: ServedTree) -> bool:
    parts = suffix.split(".")
    if len(parts) < 3 or not parts[1].isdecimal():
        return False
    template = ".".join((parts[0], "{e}", *parts[2:]))
    return template in templates and int(parts[1]) < num_experts_of(served)


def num_experts_of(served: ServedTree) -> int:
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
    number = num_experts_of(served)
    written: list[str] = []
    for name in names:
        each = range(number) if "{e}" in name else ()
        written += [name.replace("{e}", str(e)) for e in each] or [name]
    return written


def _vocabulary(tensor: AdapterTensor, served: ServedTree) -> None:
    rows = _vocab_size(served)
    if "lora_embedding_A" in tensor.key.text and rows is not None and tensor.shape[1:] != (rows,):
        size = tensor.shape[1] if len(tensor.shape) > 1 else 0
        raise Refused(
            f"The embedding LoRA size({size}) must be consistent"
            f" with the base model's vocabulary size({rows})."
        )


def _vocab_size(served: ServedTree) -> int | None:
    for module in served.modules.values():
        base = module.parts[0].base
        if base is not None and base.kind == "embedding" and base.role == "embed":
            return base.in_features
    return None


def _saved_modules(load: Load) -> None:
    for name, tensors in load.saved.items():
        if not any(t.key.text.endswith("weight") for t in tensors):
            raise Refused(f"Full module {name!r} is missing weight.")
    if len(load.saved) > 1:
        raise Refused(
            "Only one full classification module is supported per "
            f"adapter, received {sorted(load.saved)}."
        )

"""What TensorRT-LLM 1.2's PyTorch backend makes of an adapter, in its own order: `judge`.

Holds the rules of its loader; names are taken apart by one expression whose beginning is free, so
that prefixes do not matter. Sizes are not compared there: weights are passed on as flat memory.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ullage.adapters.base import BaseTree
from ullage.adapters.effect import meant_scale, module_verdict
from ullage.adapters.verdict import EngineAnswer, ModuleVerdict, ServeOptions, State
from ullage.anatomy.adapters.adapter import Adapter, AdapterModule, AdapterTensor, Matrix
from ullage.anatomy.adapters.scale import changes_base
from ullage.anatomy.spec import Dense

SOURCE = (
    "tensorrt-llm 1.2.0rc2 (by version.py): lora_manager.py, lora_helper.py; of a commit each, no "
    "version known: cpp/tensorrt_llm/runtime/loraUtils.cpp (2a9abd9), "
    "_torch/modules/gated_mlp.py (90f3bec)"
)
VERSION = "1.2"
DEFAULT_MAX_LORA_RANK = 64
"""lora_helper.py, LoraConfig.max_lora_rank."""

# lora_helper.py, get_default_trtllm_modules_to_hf_modules, by the checkpoint's names.
MODULES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "qkv_proj": "attn_qkv",
    "o_proj": "attn_dense", "gate_proj": "mlp_h_to_4h", "down_proj": "mlp_4h_to_h",
    "up_proj": "mlp_gate", "gate_up_proj": "mlp_gate_up", "w1": "moe_h_to_4h",
    "w2": "moe_4h_to_h", "w3": "moe_gate", "gate": "moe_router",
}  # fmt: skip
# lora_manager.py, HF_LORA_PATTERN: (prefix).(layer).(part).(module, or mixture.expert.module).
_NAME = re.compile(
    r"(.*)\.(\d+)\.(\w+)\.(\w+|\w+\.\w+|(\w+)\.(\d+)\.(\w+))\."
    r"(?:lora_(?:(A|B)\.weight|(magnitude)_vector)|weight_(m_wdecomp).weight)"
)
# The base's roles that each module is a part of, in the order of a fused matrix.
_ROLES: dict[str, tuple[str, ...]] = {
    "attn_q": ("q",), "attn_k": ("k",), "attn_v": ("v",), "attn_qkv": ("q", "k", "v"),
    "attn_dense": ("o",), "mlp_h_to_4h": ("gate",), "mlp_gate": ("up",), "mlp_4h_to_h": ("down",),
    "mlp_gate_up": ("gate", "up"),
}  # fmt: skip
_LEAVES: dict[str, tuple[str, ...]] = {
    "q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "qkv_proj": ("q", "k", "v"),
    "o_proj": ("o",), "gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",),
    "gate_up_proj": ("gate", "up"),
}  # fmt: skip


class Refused(Exception):
    """TensorRT-LLM raises; the text is what it prints."""


def judge(adapter: Adapter, tree: BaseTree, options: ServeOptions) -> EngineAnswer:
    """What becomes of every module of `adapter` when TensorRT-LLM serves it on this base model.

    Adapters lie in a cache of a size in bytes, not in slots. Without target modules the adapter is
    taken for the one of lora_dir, from which they are inferred.
    """
    counted = [
        module
        for module in adapter.modules
        if any(t.key.matrix is not Matrix.BASE for t in module.tensors)
    ]
    limit = options.max_lora_rank or DEFAULT_MAX_LORA_RANK
    message: str | None = None
    targets: tuple[str, ...] = ()
    try:
        _find_files(adapter)
        loading = _Loading(adapter, tree, limit)
        loading.read(counted)
        targets = _targets(loading, options)
        modules = loading.verdicts(counted, targets)
    except Refused as refusal:
        message = str(refusal)
        modules = tuple(
            module_verdict(module, None, State.REFUSED, detail=message) for module in counted
        )
    return EngineAnswer(
        modules=modules,
        basis="source",
        source=SOURCE,
        version=options.version or VERSION,
        message=message,
        unsure=_unsure(tree),
        slot_bytes=None,
        limits=(("max_lora_rank", limit), ("max_loras", options.max_loras)),
        supported=tuple(sorted(targets)),
        notes=("judged for the PyTorch backend and its default mapping of modules", *_notes(tree)),
    )


def _notes(tree: BaseTree) -> tuple[str, ...]:
    """What is read of a gated MLP whose activation is not SiLU (Gemma's).

    gated_mlp.py at 90f3bec runs one _apply_activation with and without adapters, and so takes what
    the base takes; at 01503f5, before that function, forward_lora asserts SiLU, and forward too
    raises for all else. No version read serves such a base and refuses its adapters.
    """
    found = {
        layer.feed_forward.activation
        for layer in tree.spec.layers
        if isinstance(layer.feed_forward, Dense) and layer.feed_forward.gated
    } - {"silu", "swish"}
    if not found:
        return ()
    return (
        f"the MLP's activation is {', '.join(sorted(found))}: adapters are taken where the base is "
        "(gated_mlp.py at 90f3bec); earlier versions of that file serve SiLU alone",
    )


def _unsure(tree: BaseTree) -> str | None:
    """Layers with two attentions (cross-attention, an encoder beside a decoder): names are told
    apart by the layer's number and the last word, and what was read serves one attention a layer.
    """
    number = re.compile(r"\.(\d+)\.")
    seen: dict[tuple[str, str], str] = {}
    for path in tree.modules:
        leaf = path.rpartition(".")[2]
        match = number.search(path)
        if match is None or leaf not in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
            continue
        other = seen.setdefault((match.group(1), leaf), path)
        if other != path:
            return (
                f"how TensorRT-LLM serves {tree.spec.architecture}, and which of {other} and "
                f"{path} an adapter of layer {match.group(1)} would reach"
            )
    return None


def _find_files(adapter: Adapter) -> None:
    """lora_manager.py, HfLoraLoader."""
    folder = str(Path(adapter.path).absolute())
    stems = {Path(file).stem for file in adapter.files}
    if "adapter_model" not in stems:
        raise Refused(f"adapter_model file does not exist in {folder}")
    if Path(adapter.config.file or "").name != "adapter_config.json":
        raise Refused(f"{folder}/adapter_config.json does not exist")
    stored = {tensor.key.text for tensor in adapter.tensors}
    for name, key in (
        ("lm_head", "base_model.model.lm_head.weight"),
        ("embed_tokens", "base_model.model.model.embed_tokens.weight"),
    ):
        if name in adapter.config.modules_to_save and key not in stored:
            raise Refused(f"'{key}'")


def _targets(loading: _Loading, options: ServeOptions) -> tuple[str, ...]:
    """load_torch_hf_lora: given, or inferred from the names; queries, keys and values together."""
    asked = options.lora_target_modules or ()
    found = [MODULES.get(name, name) for name in asked] or sorted(set(loading.names.values()))
    if not found:
        raise Refused(
            "lora_target_modules is empty. Please specify lora_target_modules or provide lora_dir "
            "to infer lora_target_modules."
        )
    parts = ("attn_q", "attn_k", "attn_v")
    if any(part in found for part in parts):
        found += [part for part in parts if part not in found]
    return tuple(found)


@dataclass(slots=True)
class _Loading:
    """One adapter on its way into the cache. `names` maps the numbers of its modules to
    TensorRT-LLM's names, `layers` to their layers, `experts` holds those that are an expert's."""

    adapter: Adapter
    tree: BaseTree
    max_rank: int

    names: dict[int, str]
    layers: dict[int, int]
    experts: set[int]

    def __init__(self, adapter: Adapter, tree: BaseTree, max_rank: int) -> None:
        self.adapter, self.tree, self.max_rank = adapter, tree, max_rank
        self.names, self.layers, self.experts = {}, {}, set()

    def read(self, modules: list[AdapterModule]) -> None:
        """lora_manager.py, iterate_hf_lora: every name, or KeyError for one that is not known."""
        for number, module in enumerate(modules):
            for tensor in module.tensors:
                self._read(number, tensor)

    def _read(self, number: int, tensor: AdapterTensor) -> None:
        text = tensor.key.text
        match = _NAME.match(text)
        if match is None:
            if "lm_head" not in text and "embed_tokens" not in text:
                raise Refused(f"'unsupported key {text} from HF LoRA weights'")
            return
        name = match.group(7) if match.group(6) is not None else match.group(4)
        if name not in MODULES:
            listed = "{" + ", ".join(repr(known) for known in sorted(MODULES)) + "}"
            raise Refused(f"hf_module {name} is not in supported list {listed}")
        self.names[number] = MODULES[name]
        self.layers[number] = int(match.group(2))
        if match.group(6) is not None:
            self.experts.add(number)

    def verdicts(
        self, modules: list[AdapterModule], targets: tuple[str, ...]
    ) -> tuple[ModuleVerdict, ...]:
        """Every module's verdict. Raises Refused for what stops loading or the request."""
        for field in ("r", "lora_alpha"):
            if field not in (self.adapter.config.raw or {}):
                raise Refused(f"'{field}'")
        used = [n for n in self.names if self.names[n] in targets]
        for number in used:
            self._require(number, modules[number])
        room = max((_size(modules[n]) for n in used), default=0)
        last: dict[tuple[int, str, str], int] = {}
        for number in sorted(used, key=lambda n: modules[n].tensors[0].key.text):
            last[self._place(number, modules[number])] = number
        return tuple(
            self._one(number, module, targets, room, last) for number, module in enumerate(modules)
        )

    def _place(self, number: int, module: AdapterModule) -> tuple[int, str, str]:
        match = _NAME.match(module.tensors[0].key.text)
        expert = match.group(6) if match is not None and match.group(6) else ""
        return self.layers[number], self.names[number], expert

    def _require(self, number: int, module: AdapterModule) -> None:
        """_check_lora_in_out; and loraUtils.cpp, loraValidateRequestTensors."""
        missing = [
            text
            for tensor, text in (
                (module.a, "'in' matrix (lora_A equivalent)"),
                (module.b, "'out' matrix (lora_B equivalent)"),
            )
            if tensor is None
        ]
        layer, name = self.layers[number], self.names[number]
        if missing:
            raise Refused(
                f"Layer {layer} is missing required {' and '.join(missing)} for {name} in LoRA "
                f"weights from directory {Path(self.adapter.path)}. LoRA adapters must contain "
                "both 'in' and 'out' matrices for all layers. Please check if the LoRA checkpoint "
                "is complete or was corrupted during loading."
            )
        if layer >= self.tree.num_layers:
            raise Refused("Expected layerId to be in the range [0, numModelLayers)")
        assert module.a is not None
        rank = module.a.shape[0] if module.a.shape else 0
        if rank > self.max_rank:
            raise Refused(
                f"Invalid low_rank ({rank}). low_rank must be smaller than mMaxLowRank "
                f"({self.max_rank})"
            )

    def _one(
        self,
        number: int,
        module: AdapterModule,
        targets: tuple[str, ...],
        room: int,
        last: dict[tuple[int, str, str], int],
    ) -> ModuleVerdict:
        name = self.names.get(number)
        if name is None:
            return self._vocabulary(module)
        where = f"layers.{self.layers[number]}.{name}"
        if name not in targets:
            detail = f"lora_target_modules leaves {name} out"
            return module_verdict(module, where, State.IGNORED, detail=detail)
        if last[self._place(number, module)] != number:
            detail = f"another module is loaded into {where} after it"
            return module_verdict(module, where, State.DOUBLED, detail=detail)
        if number in self.experts or name.startswith("moe_"):
            detail = "experts and routers are served without adapters"
            return module_verdict(module, where, State.IGNORED, detail=detail)
        sides = self._sides(self.layers[number], name)
        if sides is None:
            detail = f"layer {self.layers[number]} of the served model has no {name}"
            return module_verdict(module, None, State.UNMAPPED, detail=detail)
        return self._sized(module, name, where, sides, room)

    def _vocabulary(self, module: AdapterModule) -> ModuleVerdict:
        """modules_to_save replaces the head and the embedding when the server starts."""
        leaf = module.module.rpartition(".")[2]
        saved = all(tensor.key.matrix is Matrix.SAVED for tensor in module.tensors)
        if saved and leaf in self.adapter.config.modules_to_save:
            return module_verdict(module, leaf, State.APPLIED)
        detail = "weights of the head and the embedding are passed over, unless in modules_to_save"
        return module_verdict(module, leaf, State.IGNORED, detail=detail)

    def _sized(
        self, module: AdapterModule, name: str, where: str, sides: tuple[int, int], room: int
    ) -> ModuleVerdict:
        a, b = module.a, module.b
        assert a is not None
        assert b is not None
        rank = a.shape[0]
        applied = self._scale(rank)
        if a.shape != (rank, sides[0]) or b.shape != (sides[1], rank):
            if rank * sum(sides) > room:
                raise Refused(f"lora_weights has to few values for {name}")
            detail = f"its values are read as matrices of {sides[0]} inputs and {sides[1]} outputs"
            return module_verdict(module, where, State.SHAPE_MISMATCH, applied, detail)
        altered = self._altered(module, name)
        if altered:
            return module_verdict(module, where, State.ALTERED, applied, altered)
        meant = meant_scale(module)
        if meant is None or abs(meant - applied) <= 1e-6 * max(abs(meant), abs(applied)):
            return module_verdict(module, where, State.APPLIED, applied)
        detail = f"applied at {applied:g} where training meant {meant:g}"
        return module_verdict(module, where, State.WRONG_SCALE, applied, detail)

    def _scale(self, rank: int) -> float:
        """load_from_hf: the configuration's alpha by the matrix's own rank; no patterns."""
        alpha = (self.adapter.config.raw or {}).get("lora_alpha")
        if not isinstance(alpha, int | float):
            kind = type(alpha).__name__
            raise Refused(f"float() argument must be a string or a real number, not '{kind}'")
        return alpha / (math.sqrt(rank) if self.adapter.config.use_rslora else rank)

    def _altered(self, module: AdapterModule, name: str) -> str:
        """What is not done as training did it."""
        config = self.adapter.config
        init = config.init_lora_weights
        if module.magnitude is not None:
            return "DoRA's magnitude is stored, and the sum is not normed by it"
        if name == "mlp_gate_up":
            return "the halves of B are exchanged, unless swap_gate_up_proj_lora_b_weight is false"
        if changes_base(init):
            return f"init_lora_weights {init!r} changed the base in training, which is not redone"
        if config.alora_invocation_tokens:
            return "it is added from the first token on, not from its invocation tokens"
        if config.use_qalora or config.use_bdlora:
            return "the pooling or the blocks of its layers are not known"
        return ""

    def _sides(self, layer: int, name: str) -> tuple[int, int] | None:
        """(in, out) of a module that the layer serves, None when it serves none of the kind.

        Attention and MLP take an adapter of the fused matrix as well as of its parts, whichever the
        checkpoint has (gated_mlp.py, splitted_gate_up_lora and fused_gate_up_lora).
        """
        wanted = _ROLES[name]
        parts = _parts(self.tree).get(layer, {})
        if not all(role in parts for role in wanted):
            return None
        return parts[wanted[0]][0], sum(parts[role][1] for role in wanted)


@lru_cache(maxsize=2)
def _parts(tree: BaseTree) -> dict[int, dict[str, tuple[int, int]]]:
    """(in, out) of each part of every layer, fused matrices taken apart."""
    found: dict[int, dict[str, tuple[int, int]]] = {}
    for module in tree.modules.values():
        roles = _LEAVES.get(module.path.rpartition(".")[2])
        if module.layer is None or roles is None or module.num_experts:
            continue
        if "shared_expert" in module.path:
            continue
        outs = [module.out_features // len(roles)] * len(roles)
        if len(roles) == 3:
            half = module.grouped // 2
            outs = [module.out_features - module.grouped, half, half]
        parts = found.setdefault(module.layer, {})
        for role, out in zip(roles, outs, strict=True):
            parts.setdefault(role, (module.in_features, out))
    return found


def _size(module: AdapterModule) -> int:
    """Values of both matrices, as they lie one after another."""
    pair = (t for t in (module.a, module.b, module.magnitude) if t is not None)
    return sum(math.prod(tensor.shape) for tensor in pair)

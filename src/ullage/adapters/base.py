"""The modules of a base model that an adapter can change: `base_tree`, `BaseTree.find`.

Holds the tree as a checkpoint names it, and the other names under which the same module is trained
(bare models, wrappers of language models, stacked experts). What an engine serves is `engines/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ullage.anatomy.naming.names import naming_for
from ullage.anatomy.spec import Attention, ModelSpec
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.anatomy.tensors.tensor import TensorSpec

ModuleKind = Literal[
    "linear", "embedding", "head", "conv1d", "expert", "fused_expert", "router", "convolution"
]

MAX_PATH_CHARS = 1000
"""No path of a real module is longer; what is, is looked up nowhere."""

# Words that stand before a language model's own tree where it is a part of another model, or where
# the whole was wrapped (transformers 4 and 5, trl's value heads).
_ROOT_WORDS = frozenset(
    (
        *("model", "language_model", "text_model", "llm", "transformer", "thinker", "talker"),
        *("gpt_neox", "backbone", "decoder", "pretrained_model", "text"),
    )
)
# transformers 5 trains these under other names than their checkpoints have (conversion_mapping.py
# of 5.19: renamings that are undone when a model is saved).
_TRAINED_AS = {
    "block_sparse_moe": "mlp",
    "word_embeddings": "embed_tokens",
}


@dataclass(frozen=True, slots=True)
class BaseModule:
    """One module with a weight. `path` is the checkpoint's; {e} stands for the expert's number.

    `fused_expert`: all `num_experts` in one parameter. `in_features` and `out_features` are of one
    matrix as the forward pass sees it, also where the checkpoint stores it turned round (`conv1d`).
    For an embedding they are (vocabulary, width). `groups` counts the heads that keys and values
    are cut by, `grouped` are the rows of both in a fused matrix; `whole` is on every rank whole.
    `tied_to`: the module whose weight this one uses.
    """

    path: str
    kind: ModuleKind
    role: str
    in_features: int
    out_features: int
    layer: int | None
    num_experts: int = 0
    groups: int = 0
    grouped: int = 0
    whole: bool = False
    tied_to: str | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """Where a trained module's path leads. `naming` says how it differs from the checkpoint's.

    `checkpoint`: it does not. `bare`: the model was trained without its outer module. `wrapped`:
    under another prefix. `renamed`: the library's newer name. `prefix` is the part that differs.
    `expert` is the expert's number where the path has one.
    """

    module: BaseModule
    naming: Literal["checkpoint", "bare", "wrapped", "renamed"]
    prefix: str = ""
    expert: int | None = None


class BaseTree:
    """Every module of one base model, by the name that its checkpoint gives it.

    `root` is what stands before the language model's layers; `shared_kv` maps a layer that reads
    another one's keys and values to that layer; `towers` counts the parts that are not the language
    model (their modules are not listed, and are found by no name).
    """

    def __init__(self, spec: ModelSpec, modules: Iterable[BaseModule], root: str) -> None:
        self.spec = spec
        self.root = root
        self.modules: dict[str, BaseModule] = {m.path: m for m in modules}
        self.shared_kv: dict[int, int] = {
            layer.index: layer.mixer.kv_shared_from
            for layer in spec.layers
            if isinstance(layer.mixer, Attention) and layer.mixer.kv_shared_from is not None
        }
        self._tails = {self.tail(path): path for path in reversed(self.modules)}

    def __len__(self) -> int:
        return len(self.modules)

    @property
    def num_layers(self) -> int:
        return len(self.spec.layers)

    def find(self, module: str) -> Match | None:
        """The base module that a path of a trained model means, or None.

        A path of another prefix is only taken when all of its prefix are words that wrap language
        models; a tower's `layers.0` never passes for the language model's.
        """
        if len(module) > MAX_PATH_CHARS:
            return None
        found = self._exact(module)
        if found is not None:
            return Match(found[0], "checkpoint", "", found[1])
        start = 0
        parts = module.split(".")
        while start < len(parts):
            tail = ".".join(parts[start:])
            for renamed in (tail, _renamed(tail)):
                path, expert = self._by_tail(renamed)
                if path is not None:
                    prefix = ".".join(parts[:start])
                    naming = _naming(prefix, self.root, renamed=renamed != tail)
                    return Match(self.modules[path], naming, prefix, expert)
            if parts[start] not in _ROOT_WORDS:
                return None
            start += 1
        return None

    def _exact(self, path: str) -> tuple[BaseModule, int | None] | None:
        module = self.modules.get(path)
        if module is not None:
            return module, None
        for template, expert in _templates(path):
            module = self.modules.get(template)
            if module is not None and expert < module.num_experts:
                return module, expert
        return None

    def _by_tail(self, tail: str) -> tuple[str | None, int | None]:
        path = self._tails.get(tail)
        if path is not None:
            return path, None
        for template, expert in _templates(tail):
            path = self._tails.get(template)
            if path is not None and expert < self.modules[path].num_experts:
                return path, expert
        return None, None

    def tail(self, path: str) -> str:
        """The path without what stands before the language model's own tree."""
        if path.startswith(self.root + "."):
            path = path[len(self.root) + 1 :]
        return without_root(path)


def without_root(path: str) -> str:
    """The path without the words in front that wrap language models."""
    parts = path.split(".")
    first = 0
    while first < len(parts) - 1 and parts[first] in _ROOT_WORDS:
        first += 1
    return ".".join(parts[first:])


@lru_cache(maxsize=4)
def base_tree(spec: ModelSpec) -> BaseTree:
    """The tree of the model's weights. Norms, biases and other vectors are not in it."""
    naming = naming_for(spec.architecture, spec.model_type, spec.family)
    modules: dict[str, BaseModule] = {}
    embed: str | None = None
    for tensor in expected_tensors(spec):
        # Multi-token-prediction layers are served beside the model, and trained by no adapter.
        module = _module(tensor) if tensor.stack != "mtp" else None
        if module is None:
            continue
        modules.setdefault(module.path, module)
        if tensor.role == "embed" and tensor.stack == "decoder" and embed is None:
            embed = module.path
    for fused in _stacked(modules.values()):
        modules.setdefault(fused.path, fused)
    head = naming.paths["lm_head"]
    if spec.lm_head and spec.tie_embeddings and head not in modules and embed is not None:
        modules[head] = BaseModule(
            head, "head", "lm_head", spec.embedding_size or spec.hidden_size, spec.vocab_size, None,
            tied_to=embed,
        )  # fmt: skip
    return BaseTree(spec, modules.values(), naming.paths["root"])


def _module(tensor: TensorSpec) -> BaseModule | None:
    shape = tensor.shape
    expert = tensor.shard == "expert"
    if len(shape) < 2 or tensor.role in ("norm", "bias", "scale", "expert_bias", "tower"):
        return None
    if len(shape) == 3 and shape[1] == 1 and not expert:
        # A depthwise convolution of a state-space mixer, which engines hold as a linear one.
        return BaseModule(
            tensor.module, "convolution", tensor.role, shape[2], shape[0], tensor.layer
        )
    if tensor.role in ("sinks", "attn_bias_table", "hyper", "position", "hash_table"):
        return None
    experts = tensor.num_experts if expert else 0
    if expert and len(shape) == 3:
        turned = tensor.in_dim == 1
        rows, columns = (shape[2], shape[1]) if turned else (shape[1], shape[2])
        path = tensor.name.removesuffix(".weight")
        return BaseModule(path, "fused_expert", tensor.role, columns, rows, tensor.layer, experts)
    if len(shape) != 2:
        return None
    if tensor.role == "embed" and tensor.shard == "vocab":
        return BaseModule(tensor.module, "embedding", "embed", shape[0], shape[1], None)
    turned = tensor.in_dim == 0
    rows, columns = (shape[1], shape[0]) if turned else shape
    kind: ModuleKind = "conv1d" if turned else "linear"
    if expert:
        kind = "expert"
    elif tensor.role == "lm_head" and tensor.shard == "vocab":
        kind = "head"
    elif tensor.role in ("router", "shared_router"):
        kind = "router"
    elif tensor.role == "per_layer" and tensor.shard == "vocab":
        kind, rows, columns = "embedding", shape[1], shape[0]
    return BaseModule(
        tensor.module, kind, tensor.role, columns, rows, tensor.layer, experts, tensor.groups,
        tensor.grouped, tensor.shard == "replicated",
    )  # fmt: skip


def _stacked(modules: Iterable[BaseModule]) -> list[BaseModule]:
    """The stacked parameters that transformers 5 trains where a checkpoint has experts one by one.

    transformers 5.19 keeps `gate_up_proj` and `down_proj` of all experts in one parameter each for
    nearly every mixture (conversion_mapping.py), and PEFT's target_parameters names those.
    """
    by_layer: dict[str, dict[str, BaseModule]] = {}
    for module in modules:
        if module.kind == "expert" and ".{e}" in module.path:
            by_layer.setdefault(module.path.partition(".{e}")[0], {})[module.role] = module
    made = []
    for prefix, parts in by_layer.items():
        down, up, gate = (parts.get(f"expert_{name}") for name in ("down", "up", "gate"))
        if down is not None:
            made.append(
                replace(down, path=f"{prefix}.down_proj", kind="fused_expert")
            )  # fmt: skip
        if up is not None:
            rows = up.out_features + (gate.out_features if gate is not None else 0)
            name = "gate_up_proj" if gate is not None else "up_proj"
            role = "expert_gate_up" if gate is not None else "expert_up"
            made.append(
                replace(up, path=f"{prefix}.{name}", kind="fused_expert", role=role,
                        out_features=rows)
            )  # fmt: skip
    return made


def _templates(path: str) -> list[tuple[str, int]]:
    """`path` with one of its numbers, the last first, replaced by {e}; and that number."""
    parts = path.split(".")
    found = []
    for position in range(len(parts) - 1, 0, -1):
        if parts[position].isdecimal() and len(parts[position]) < 8:
            template = ".".join((*parts[:position], "{e}", *parts[position + 1 :]))
            found.append((template, int(parts[position])))
    return found


def _renamed(tail: str) -> str:
    """`tail` with the library's newer words turned back into the checkpoint's."""
    for stored, trained in _TRAINED_AS.items():
        if f".{trained}." in f".{tail}.":
            changed = f".{tail}.".replace(f".{trained}.", f".{stored}.", 1)[1:-1]
            if stored == "block_sparse_moe" and ".experts" not in tail and ".gate" not in tail:
                continue
            return changed
    return tail


def _naming(
    prefix: str, root: str, *, renamed: bool
) -> Literal["checkpoint", "bare", "wrapped", "renamed"]:
    if prefix == root:
        return "renamed" if renamed else "checkpoint"
    if not prefix:
        return "bare" if root else "checkpoint"
    return "wrapped"

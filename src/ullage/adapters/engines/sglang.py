"""What SGLang 0.5.23 makes of an adapter, in its own order: `judge`.

Holds the rules of loading; SGLang knows a weight by its layer's number and by words in its name, so
that prefixes do not matter. How halves of fused modules are put together is `sglang_fuse.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ullage.adapters.base import BaseModule, BaseTree
from ullage.adapters.effect import meant_scale, module_verdict
from ullage.adapters.engines.sglang_config import (
    NORMAL,
    VOCABULARY,
    check_configuration,
    leaf_of,
    normal,
    targets_of,
)
from ullage.adapters.engines.sglang_fuse import (
    STACKED,
    Refused,
    Slot,
    Weight,
    normalise,
    place,
    size_text,
)
from ullage.adapters.verdict import EngineAnswer, ModuleVerdict, ServeOptions, State
from ullage.anatomy.adapters.adapter import Adapter, AdapterModule, Matrix
from ullage.anatomy.adapters.scale import changes_base

SOURCE = (
    "sglang 0.5.23: srt/lora/lora_config.py, srt/lora/lora.py, srt/lora/lora_manager.py, "
    "srt/lora/mem_pool.py, srt/lora/utils.py, srt/lora/layers.py"
)
VERSION = "0.5.23"
DEFAULT_MAX_LORAS = 8
"""--max-loras-per-batch."""
_LAYER = re.compile(r"layers\.(\d+)\.")
# RowParallelLinear cuts A by the width of its input, the others B by the height of their output.
_ROW = ("o_proj", "down_proj", "out_proj", "wo_ud")


def judge(adapter: Adapter, tree: BaseTree, options: ServeOptions) -> EngineAnswer:
    """What becomes of every module of `adapter` when SGLang serves it on this base model.

    Without limits the adapter is taken for the one of --lora-paths, from which SGLang infers them.
    """
    counted = [
        module
        for module in adapter.modules
        if any(t.key.matrix is not Matrix.BASE for t in module.tensors)
    ]
    message: str | None = None
    rank = options.max_lora_rank or adapter.config.rank
    targets: frozenset[str] = frozenset()
    try:
        check_configuration(adapter, tree)
        targets = targets_of(adapter, tree, options)
        modules = _Loading(adapter, tree, targets).verdicts(counted)
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
        slot_bytes=None if rank is None else _slot_bytes(tree, targets, rank, options),
        limits=(
            ("--max-lora-rank", rank),
            ("--max-loras-per-batch", options.max_loras or DEFAULT_MAX_LORAS),
        ),
        supported=tuple(sorted(targets)),
    )


def _outputs(bases: list[BaseModule]) -> Iterable[int]:
    """Rows of every part, a fused matrix and shared experts beside others counted once."""
    seen: dict[str, int] = {}
    for base in bases:
        seen.setdefault(leaf_of(base), base.out_features)
    return seen.values()


# --- the weights ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Loading:
    """One adapter on its way into the pool. `targets` are the server's target modules."""

    adapter: Adapter
    tree: BaseTree
    targets: frozenset[str]

    def verdicts(self, modules: list[AdapterModule]) -> tuple[ModuleVerdict, ...]:
        """Every module's verdict. Raises Refused for what stops loading or the first request."""
        found: dict[int, ModuleVerdict] = {}
        layers: dict[int, dict[str, Weight]] = {}
        for number, module in enumerate(modules):
            inside = False
            for tensor in module.tensors:
                text = tensor.key.text.replace("unembed_tokens", "lm_head")
                match = _LAYER.search(text)
                if match is None:
                    continue
                inside, layer = True, int(match.group(1))
                if layer >= self.tree.num_layers:
                    raise Refused(f"index {layer} is out of range")
                layers.setdefault(layer, {})[text] = Weight(tensor.shape, (number,))
            if not inside:
                found[number] = self._outside(module)
        whole = {n: normalise(dict(sorted(layers[n].items()))) for n in sorted(layers)}
        for layer, weights in whole.items():
            for slot in place(weights, self.targets):
                self._inside(layer, slot, modules, found)
        return tuple(found[number] for number in range(len(modules)))

    def _outside(self, module: AdapterModule) -> ModuleVerdict:
        """lora.py, _process_weight, of a name without a layer's number."""
        text = (module.a or module.tensors[0]).key.text.replace("unembed_tokens", "lm_head")
        name = next((name for name in VOCABULARY if name in text), None)
        if name is None:
            detail = "its name has no layers.N. in it, and SGLang passes over it"
            return module_verdict(module, None, State.UNMAPPED, detail=detail)
        own = self.adapter.config.target_modules
        if not isinstance(own, str) and name not in normal(own or ()):
            detail = f"{name} is not in target_modules of adapter_config.json: it is passed over"
            return module_verdict(module, name, State.IGNORED, detail=detail)
        if name not in self.targets:
            detail = f"--lora-target-modules leaves {name} out"
            return module_verdict(module, name, State.IGNORED, detail=detail)
        if module.a is None or module.b is None:
            detail = "SGLang takes LoRA matrices alone, no whole weights"
            return module_verdict(module, name, State.IGNORED, detail=detail)
        rank = self.adapter.config.rank or 0
        spec = self.tree.spec
        width = spec.embedding_size or spec.hidden_size
        sides = (spec.vocab_size, width) if name == "embed_tokens" else (width, spec.vocab_size)
        for tensor, expected in ((module.a, (rank, sides[0])), (module.b, (sides[1], rank))):
            if tensor.shape != expected:
                raise Refused(size_text(expected, tensor.shape))
        return self._scaled(module, name)

    def _inside(
        self, layer: int, slot: Slot, modules: list[AdapterModule], found: dict[int, ModuleVerdict]
    ) -> None:
        """The verdicts on the modules of one buffer of a layer, put into `found`."""
        bases = self._bases(layer, slot)
        target = slot.target
        if bases:  # the module stands where the first of its parts does in the checkpoint
            path = bases[0].path
            parent = path.partition(".{e}")[0] if slot.is_expert else path.rpartition(".")[0]
            target = f"{parent}.{target}"
        for number, name in slot.replaced.items():
            detail = f"{name} is loaded into {target} after it"
            found[number] = module_verdict(modules[number], target, State.DOUBLED, detail=detail)
        state, detail = self._copied(layer, slot, bases)
        matrices = set(slot.a.owners) if slot.a is not None else set()
        for number in (*matrices, *(slot.b.owners if slot.b is not None else ())):
            module = modules[number]
            if state is State.APPLIED and number in matrices:
                found[number] = self._scaled(module, target)
                continue
            if state is State.APPLIED:
                detail = "there is no lora_A of it, so that nothing is added"
            applied = self._scale() if state is State.SHAPE_MISMATCH else None
            given = State.IGNORED if state is State.APPLIED else state
            where = None if state is State.UNMAPPED else target
            found[number] = module_verdict(module, where, given, applied, detail)

    def _bases(self, layer: int, slot: Slot) -> list[BaseModule]:
        """The base's modules that the buffer's target is made of."""
        return [
            module
            for module in _by_layer(self.tree).get(layer, ())
            if bool(module.num_experts) == slot.is_expert and module.kind != "fused_expert"
            and slot.target in (leaf_of(module), NORMAL.get(leaf_of(module)))
        ]  # fmt: skip

    def _copied(self, layer: int, slot: Slot, bases: list[BaseModule]) -> tuple[State, str]:
        """mem_pool.py, load_lora_weight_to_buffer: what becomes of a buffer's weights."""
        target = slot.target
        if slot.is_expert and not {"gate_up_proj", "down_proj"} <= self.targets:
            return State.IGNORED, (
                "experts take adapters only with gate_up_proj and down_proj both targeted"
            )
        if not bases:
            kind = "experts' " if slot.is_expert else ""
            return State.UNMAPPED, f"layer {layer} of the served model has no {kind}{target}"
        return self._fits(slot, bases[0].in_features, sum(_outputs(bases)))

    def _fits(self, slot: Slot, inner: int, outer: int) -> tuple[State, str]:
        """Whether A [stacked·rank, in] and B [out, rank] are of the buffer's size. The larger side
        that tensor parallelism would cut is cut in silence (layers.py, slice_lora_*_weights)."""
        rank = self.adapter.config.rank or 0
        row = slot.target in _ROW
        stacked = STACKED.get(slot.target, 1)
        cut = ""
        if slot.a is not None:
            wanted = (stacked * rank, inner)
            given = slot.a.shape
            if row and len(given) == 2 and given[1] > inner:
                cut = f"A is cut from {given[1]} columns to {inner}"
                given = (given[0], inner)
            if given != wanted:
                raise Refused(size_text(wanted, given))
            if slot.b is None and not row:
                raise Refused("'NoneType' object is not subscriptable")
        if slot.b is not None:
            wanted, given = (outer, rank), slot.b.shape
            if not row and slot.a is not None and len(given) == 2 and given[0] > outer:
                cut = f"B is cut from {given[0]} rows to {outer}"
                given = (outer, given[1])
            if given != wanted:
                raise Refused(size_text(wanted, given))
        if cut:
            return State.SHAPE_MISMATCH, cut
        if slot.b is None:
            return State.IGNORED, "it has no B, so that nothing is added"
        return State.APPLIED, ""

    def _scale(self) -> float:
        """lora.py: alpha / r, whatever use_rslora and the patterns say."""
        raw = self.adapter.config.raw or {}
        alpha, rank = raw.get("lora_alpha"), raw.get("r")
        if not isinstance(alpha, int | float) or not isinstance(rank, int | float):
            raise Refused(
                f"unsupported operand type(s) for /: '{type(alpha).__name__}' and "
                f"'{type(rank).__name__}'"
            )
        return alpha / rank

    def _scaled(self, module: AdapterModule, target: str) -> ModuleVerdict:
        applied, meant = self._scale(), meant_scale(module)
        left_out = self._left_out(module)
        if left_out:
            return module_verdict(module, target, State.ALTERED, applied, left_out)
        if meant is None or abs(meant - applied) <= 1e-6 * max(abs(meant), abs(applied)):
            return module_verdict(module, target, State.APPLIED, applied)
        detail = f"applied at {applied:g} where training meant {meant:g}"
        return module_verdict(module, target, State.WRONG_SCALE, applied, detail)

    def _left_out(self, module: AdapterModule) -> str:
        """What SGLang does not read, and the sum is another without."""
        config = self.adapter.config
        init = config.init_lora_weights
        if module.bias_b is not None:
            return "the bias of B is passed over"
        if any(tensor.key.matrix is Matrix.SAVED for tensor in module.saved):
            return "the trained bias of the base is passed over"
        if changes_base(init):
            return f"init_lora_weights {init!r} changed the base in training, which is not redone"
        if config.alora_invocation_tokens:
            return "it is added from the first token on, not from its invocation tokens"
        if config.use_qalora or config.use_bdlora:
            return "the pooling or the blocks of its layers are not known"
        return ""


@lru_cache(maxsize=2)
def _by_layer(tree: BaseTree) -> dict[int, list[BaseModule]]:
    """The tree's modules by layer."""
    found: dict[int, list[BaseModule]] = {}
    for module in tree.modules.values():
        if module.layer is not None:
            found.setdefault(module.layer, []).append(module)
    return found


# --- what a slot takes ---------------------------------------------------------------------------

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def _slot_bytes(
    tree: BaseTree, targets: frozenset[str], rank: int, options: ServeOptions
) -> int | None:
    """mem_pool.py: for every layer and target A [c·rank, in] and B [out, rank] (experts: each), in
    the model's own type. None with tensor parallelism, and where a module's part is not known."""
    width = _BYTES.get(options.lora_dtype or tree.spec.dtype)
    if width is None or options.tensor_parallel_size != 1 or not targets:
        return None
    total = 0
    for module in tree.modules.values():
        leaf = leaf_of(module)
        target = NORMAL.get(leaf, leaf)
        if target not in targets or module.kind == "fused_expert":
            continue
        total += rank * (module.in_features + module.out_features) * max(1, module.num_experts)
    return total * width
